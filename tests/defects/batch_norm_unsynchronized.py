"""Batch normalization on 2 ranks, each with the statistics of only its part of the batch."""

from typing import Any

import numpy as np

from polyhvd.parity import layers

FAULT = True
DEFECT = {
    "case": "convolution, batch normalization, dense",
    "frameworks": "numpy,torch",
    "in": "torch",
    "ranks": 2,
    "question": "distribution",
    "layer": 1,
    "step": 0,
    "kind": "activation",
}


def build(framework: str) -> Any:
    if framework == "torch" and FAULT:
        from torch import nn

        return nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.BatchNorm2d(6),
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
