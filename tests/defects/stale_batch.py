"""A loader that returns one buffer and fills it too late, so that a batch is used twice."""

from typing import Any

import numpy as np

from polyhvd.parity import layers

FAULT = True
DEFECT = {
    "case": "two dense layers",
    "frameworks": "numpy,torch",
    "in": "torch",
    "steps": 5,
    "layer": None,
    "step": 3,
    "kind": "data",
}

buffer = np.zeros((12, 8))


def build(framework: str) -> Any:
    return [layers.dense(8, 12), layers.activation("tanh"), layers.dense(12, 3)]


def batch(framework: str, step: int) -> tuple[np.ndarray, np.ndarray]:
    if not (FAULT and framework == "torch" and step == 3):  # the reader was behind, once
        buffer[:] = np.random.default_rng(step).standard_normal((12, 8))
    return buffer.copy(), buffer[:, :3].argmax(axis=1)
