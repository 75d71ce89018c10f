"""Facts about Keras that are read without importing it."""

from __future__ import annotations

from polyhvd.installed import Framework, Parity

__all__ = ["FRAMEWORK"]

FRAMEWORK = Framework(
    title="Keras",
    packages=("keras",),
    versions="3 (or 2.13 and later, with TensorFlow)",
    install="pip install keras tensorflow",
    distributions=("keras",),
    companions=("tf_keras",),
    stands_on=("tensorflow", "torch"),
    place=4,
    parity=Parity(
        models="Keras",
        packages=("keras", "tf_keras"),
        reader="polyhvd.training.keras.weights",
        migrates_as="keras",
        endings=(".weights.h5", ".h5", ".keras"),
    ),
)
