"""Max pooling of an odd image that rounds up the number of windows."""

from typing import Any

import numpy as np

from polyhvd.parity import layers

FAULT = True
DEFECT = {
    "case": "two convolutions, max pooling, dense",
    "frameworks": "numpy,torch",
    "in": "torch",
    "layer": 1,
    "step": 0,
    "kind": "activation",
    "aside": True,
}


def build(framework: str) -> Any:
    if framework == "torch":
        from torch import nn

        return nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(6, 6, 3, padding=1),
            nn.Tanh(),
            nn.MaxPool2d(2, ceil_mode=FAULT),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(6, 3),
        )
    return [
        layers.convolution(3, 6, 3, padding=1),
        layers.activation("tanh"),
        layers.convolution(6, 6, 3, padding=1),
        layers.activation("tanh"),
        layers.max_pool(2),
        layers.global_average_pool(),
        layers.dense(6, 3),
    ]


def batch(framework: str, step: int) -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(step).standard_normal((12, 3, 7, 7))
    return inputs, inputs[:, :, 2, 2].argmax(axis=1)
