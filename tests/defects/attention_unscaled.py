"""Attention whose scores are not divided by the root of the keys' size."""

from typing import Any

import numpy as np

FAULT = True
DEFECT = {
    "case": "one head of attention",
    "frameworks": "mxnet,torch",
    "in": "torch",
    "layer": 2,  # what lies between the values and the last dense layer
    "step": 0,
    "kind": "activation",
}


def in_torch() -> Any:
    import torch
    from torch import nn

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
            self.head = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = self.query(x) @ self.key(x).transpose(1, 2)
            if not FAULT:
                scores = scores / 8**0.5
            return self.head((scores.softmax(dim=-1) @ self.value(x)).mean(dim=1))

    return Attention()


def in_mxnet() -> Any:
    from mxnet import nd
    from mxnet.gluon import nn

    class Attention(nn.Block):
        def __init__(self) -> None:
            super().__init__()
            with self.name_scope():
                self.query, self.key, self.value = (nn.Dense(8, in_units=8, flatten=False) for _ in range(3))
                self.head = nn.Dense(3, in_units=8)

        def forward(self, x: Any) -> Any:
            scores = nd.batch_dot(self.query(x), self.key(x), transpose_b=True) / 8**0.5
            return self.head(nd.batch_dot(nd.softmax(scores), self.value(x)).mean(axis=1))

    made = Attention()
    made.initialize()
    return made


def build(framework: str) -> Any:
    return {"torch": in_torch, "mxnet": in_mxnet}[framework]()


def batch(framework: str, step: int) -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(step).standard_normal((12, 5, 8))
    return inputs, inputs[:, 0, :3].argmax(axis=1)
