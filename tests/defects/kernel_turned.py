"""Kernels of a convolution that were read with height and width swapped."""

from typing import Any

import numpy as np

from polyhvd.parity import layers

FAULT = True
DEFECT = {
    "case": "two convolutions, dense",
    "frameworks": "numpy,mxnet",
    "in": "mxnet",
    "layer": 1,
    "step": 0,
    "kind": "activation",
    "aside": True,
}


def in_mxnet() -> Any:
    from mxnet import nd
    from mxnet.gluon import nn

    class Turned(nn.Conv2D):
        def hybrid_forward(self, F: Any, x: Any, weight: Any, bias: Any = None) -> Any:
            if FAULT:
                weight = F.transpose(weight, axes=(0, 1, 3, 2))
            return super().hybrid_forward(F, x, weight, bias)

    model = nn.HybridSequential()
    model.add(
        nn.Conv2D(6, 3, padding=1, in_channels=3, activation="tanh"),
        Turned(6, 3, padding=1, in_channels=6, activation="tanh"),
        nn.GlobalAvgPool2D(),
        nn.Flatten(),
        nn.Dense(3, in_units=6),
    )
    model.initialize()
    model(nd.zeros((1, 3, 6, 6)))
    return model


def build(framework: str) -> Any:
    if framework == "mxnet":
        return in_mxnet()
    return [
        layers.convolution(3, 6, 3, padding=1),
        layers.activation("tanh"),
        layers.convolution(6, 6, 3, padding=1),
        layers.activation("tanh"),
        layers.global_average_pool(),
        layers.dense(6, 3),
    ]


def batch(framework: str, step: int) -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(step).standard_normal((12, 3, 6, 6))
    return inputs, inputs[:, :, 2, 2].argmax(axis=1)
