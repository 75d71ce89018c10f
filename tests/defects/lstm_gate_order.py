"""An LSTM with its gates in the order input, forget, output, cell of another library."""

from typing import Any

import numpy as np

from polyhvd.parity import layers

FAULT = True
DEFECT = {
    "case": "an LSTM and a dense layer",
    "frameworks": "numpy,torch",
    "in": "torch",
    "layer": 0,
    "step": 0,
    "kind": "activation",
}


def in_torch() -> Any:
    import torch
    from torch import nn
    from torch.nn.functional import linear

    class Cells(nn.LSTM):
        """Steps one after the other, to have each cell's state."""

        def forward(self, x: torch.Tensor, hx: Any = None) -> Any:
            hidden = cell = x.new_zeros(len(x), self.hidden_size)
            states = []
            for now in x.unbind(1):
                gates = linear(now, self.weight_ih_l0, self.bias_ih_l0)
                gates = gates + linear(hidden, self.weight_hh_l0, self.bias_hh_l0)
                first, forget, third, fourth = gates.chunk(4, dim=1)
                new, out = (fourth, third) if FAULT else (third, fourth)
                cell = forget.sigmoid() * cell + first.sigmoid() * new.tanh()
                hidden = out.sigmoid() * cell.tanh()
                states.append(hidden)
            return torch.stack(states, dim=1), (hidden, cell)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = Cells(8, 12, batch_first=True)
            self.cells.bias_hh_l0.requires_grad_(False).zero_()
            self.head = nn.Linear(12, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.cells(x)[0][:, -1])

    return Model()


def build(framework: str) -> Any:
    if framework == "torch":
        return in_torch()
    return [layers.lstm(8, 12), layers.last(), layers.dense(12, 3)]


def batch(framework: str, step: int) -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(step).standard_normal((12, 5, 8))
    return inputs, inputs[:, -1, :3].argmax(axis=1)
