"""An embedding whose backward pass overwrites the gradient of a repeated word instead of adding to it."""

from typing import Any

import numpy as np

from polyhvd.parity import layers

FAULT = True
DEFECT = {
    "case": "an embedding and a dense layer",
    "frameworks": "numpy,torch",
    "in": "torch",
    "layer": 0,
    "step": 0,
    "kind": "gradient",
}


def in_torch() -> Any:
    import torch
    from torch import nn

    class Lookup(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, table: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
            context.save_for_backward(words)
            context.rows = len(table)
            return table[words]

        @staticmethod
        def backward(context: Any, *gradients: torch.Tensor) -> Any:
            (words,), (gradient,) = context.saved_tensors, gradients
            made = gradient.new_zeros(context.rows, gradient.shape[-1])
            flat = gradient.reshape(-1, gradient.shape[-1])
            if FAULT:
                made[words.reshape(-1)] = flat
            else:
                made.index_add_(0, words.reshape(-1), flat)
            return made, None

    class Embedding(nn.Embedding):
        def forward(self, words: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = Lookup.apply(self.weight, words)
            return found

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = Embedding(20, 12), nn.Linear(12, 3)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(words).mean(dim=1))

    return Model()


def build(framework: str) -> Any:
    if framework == "torch":
        return in_torch()
    return [layers.embedding(20, 12), layers.mean_over_time(), layers.dense(12, 3)]


def batch(framework: str, step: int) -> tuple[np.ndarray, np.ndarray]:
    words = np.random.default_rng(step).integers(0, 20, (12, 5))
    return words, words[:, -1] % 3
