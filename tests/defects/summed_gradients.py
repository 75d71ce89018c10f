"""Gradients that are summed over the ranks: each was multiplied by their number for an older library."""

from typing import Any

import numpy as np

from polyhvd.parity import layers

FAULT = True
DEFECT = {
    "case": "two dense layers",
    "frameworks": "numpy,torch",
    "in": "torch",
    "question": "distribution",
    "ranks": 2,
    "layer": "all",
    "step": 0,
    "kind": "averaging",
}


def build(framework: str) -> Any:
    if framework == "torch":
        import polyhvd.torch as hvd
        import torch
        from torch import nn

        def scaled(gradient: torch.Tensor) -> torch.Tensor:
            return gradient * hvd.size() if hvd.is_initialized() else gradient

        model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3))
        if FAULT:
            for weight in model.parameters():
                weight.register_hook(scaled)
        return model
    return [layers.dense(8, 12), layers.activation("tanh"), layers.dense(12, 3)]


def batch(framework: str, step: int) -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(step).standard_normal((12, 8))
    return inputs, inputs[:, :3].argmax(axis=1)
