"""A dense layer that sums its products in float16, one after the other."""

from typing import Any

import numpy as np

from polyhvd.parity import layers

FAULT = True
DEFECT = {
    "case": "two dense layers, 512 inputs",
    "frameworks": "numpy,torch",
    "in": "torch",
    "layer": 0,
    "step": 0,
    "kind": "activation",
}


def build(framework: str) -> Any:
    if framework == "torch":
        import torch
        from torch import nn

        class Dense(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if not FAULT:
                    return super().forward(x)
                products = x.half()[:, None, :] * self.weight.half()
                total = products.new_zeros(products.shape[:2])
                for number in range(products.shape[-1]):
                    total = total + products[..., number]
                return total.float() + self.bias

        return nn.Sequential(Dense(512, 12), nn.Tanh(), nn.Linear(12, 3))
    return [layers.dense(512, 12), layers.activation("tanh"), layers.dense(12, 3)]


def batch(framework: str, step: int) -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(step).standard_normal((12, 512))
    return inputs, inputs[:, :3].argmax(axis=1)
