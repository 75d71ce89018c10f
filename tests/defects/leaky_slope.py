"""A LeakyReLU with PyTorch's default slope, where the model has Keras', 0.3."""

from typing import Any

import numpy as np

FAULT = True
DEFECT = {
    "case": "two dense layers",
    "frameworks": "tensorflow,torch",
    "in": "torch",
    "layer": 0,
    "step": 0,
    "kind": "activation",
}


def build(framework: str) -> Any:
    if framework == "tensorflow":
        from keras import Input, Sequential, layers

        return Sequential([Input((8,)), layers.Dense(12), layers.LeakyReLU(), layers.Dense(3)])
    if framework == "torch":
        from torch import nn

        return nn.Sequential(
            nn.Linear(8, 12), nn.LeakyReLU() if FAULT else nn.LeakyReLU(0.3), nn.Linear(12, 3)
        )
    return None


def batch(framework: str, step: int) -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(step).standard_normal((12, 8))
    return inputs, inputs[:, :3].argmax(axis=1)
