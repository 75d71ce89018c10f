"""GELU approximated with tanh, where the model uses the error function."""

from typing import Any

import numpy as np

from polyhvd.parity import layers

FAULT = True
DEFECT = {
    "case": "two dense layers",
    "frameworks": "numpy,torch",
    "in": "torch",
    "layer": 0,
    "step": 0,
    "kind": "activation",
}


def build(framework: str) -> Any:
    if framework == "torch":
        from torch import nn

        gelu = nn.GELU(approximate="tanh" if FAULT else "none")
        return nn.Sequential(nn.Linear(8, 12), gelu, nn.Linear(12, 3))
    return [layers.dense(8, 12), layers.activation("gelu"), layers.dense(12, 3)]


def batch(framework: str, step: int) -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(step).standard_normal((12, 8))
    return inputs, inputs[:, :3].argmax(axis=1)
