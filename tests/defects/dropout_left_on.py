"""Dropout by a function that has no evaluation mode; the reference evaluates without dropout."""

from typing import Any

import numpy as np

from polyhvd.parity import layers

FAULT = True
DEFECT = {
    "case": "three dense layers",
    "frameworks": "numpy,torch",
    "in": "torch",
    "layer": 1,
    "step": 0,
    "kind": "activation",
}


def build(framework: str) -> Any:
    if framework == "torch":
        import torch
        from torch import nn
        from torch.nn import functional

        class Dropping(nn.Sequential):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                hidden = super().forward(x)
                return functional.dropout(hidden, 0.1) if FAULT else hidden

        body = Dropping(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh())
        return nn.Sequential(body, nn.Linear(12, 3))
    return [
        layers.dense(8, 12),
        layers.activation("tanh"),
        layers.dense(12, 12),
        layers.activation("tanh"),
        layers.dense(12, 3),
    ]


def batch(framework: str, step: int) -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(step).standard_normal((12, 8))
    return inputs, inputs[:, :3].argmax(axis=1)
