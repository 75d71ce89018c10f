"""Layer normalization after the activation function instead of before it."""

from typing import Any

import numpy as np

from polyhvd.parity import layers

FAULT = True
DEFECT = {
    "case": "two dense layers, layer normalization",
    "frameworks": "numpy,torch",
    "in": "torch",
    "layer": 0,  # what the normalization is given
    "step": 0,
    "kind": "activation",
}


def build(framework: str) -> Any:
    if framework == "torch":
        from torch import nn

        normalized = [nn.LayerNorm(12), nn.Tanh()]
        return nn.Sequential(
            nn.Linear(8, 12), *(reversed(normalized) if FAULT else normalized), nn.Linear(12, 3)
        )
    return [
        layers.dense(8, 12),
        layers.layer_normalization(12),
        layers.activation("tanh"),
        layers.dense(12, 3),
    ]


def batch(framework: str, step: int) -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(step).standard_normal((12, 8))
    return inputs, inputs[:, :3].argmax(axis=1)
