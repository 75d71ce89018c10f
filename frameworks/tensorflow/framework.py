"""Facts about TensorFlow that are read without importing it."""

from __future__ import annotations

from polyhvd.installed import Framework, Parity

__all__ = ["FRAMEWORK"]

FRAMEWORK = Framework(
    title="TensorFlow",
    packages=("tensorflow",),
    versions="2.13 to 2.21",
    install="pip install tensorflow",
    distributions=("tensorflow", "tensorflow-cpu", "tf-nightly"),
    companions=("keras",),
    place=3,
    count_gpus=lambda tensorflow: len(tensorflow.config.list_physical_devices("GPU")),
    ones=lambda tensorflow, count, dtype: tensorflow.ones([count], dtype),
    parity=Parity(
        models="Keras",
        packages=("tensorflow",),
        session="KerasSession",
        requires=("tensorflow", "keras>=3"),
        made_by="keras",
    ),
)
