"""Batch normalization with momentum 0.9, which in PyTorch's convention is 0.1."""

from typing import Any

import numpy as np

from polyhvd.parity import layers

FAULT = True
DEFECT = {
    "case": "convolution, batch normalization, dense",
    "frameworks": "numpy,torch",
    "in": "torch",
    "layer": 1,
    "step": 0,
    "kind": "statistics",
}


def build(framework: str) -> Any:
    if framework == "torch":
        from torch import nn

        normalization = nn.BatchNorm2d(6, momentum=0.9 if FAULT else 0.1)
        return nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            normalization,
            nn.Tanh(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(6, 3),
        )
    return [
        layers.convolution(3, 6, 3, padding=1),
        layers.batch_normalization(6),
        layers.activation("tanh"),
        layers.global_average_pool(),
        layers.dense(6, 3),
    ]


def batch(framework: str, step: int) -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(step).standard_normal((12, 3, 6, 6))
    return inputs, inputs[:, :, 2, 2].argmax(axis=1)
