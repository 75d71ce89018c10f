"""Facts about MXNet that are read without importing it."""

from __future__ import annotations

from polyhvd.installed import Framework, Parity

__all__ = ["FRAMEWORK"]

FRAMEWORK = Framework(
    title="MXNet",
    packages=("mxnet",),
    versions="1.9.1",
    install="pip install mxnet==1.9.1 'numpy<2'",
    remark="which needs Python below 3.12",
    distributions=("mxnet",),
    place=1,
    count_gpus=lambda mxnet: mxnet.context.num_gpus(),
    ones=lambda mxnet, count, dtype: mxnet.nd.ones((count,), dtype=dtype),
    finish=lambda array: array.wait_to_read(),
    parity=Parity(
        models="Gluon",
        packages=("mxnet",),
        session="GluonSession",
        cannot_compute=lambda precision, kinds: "MXNet has no half types on processors",
        migrates_as="gluon",
        endings=(".params",),
    ),
)
