"""A GRU that resets the state before its kernel, as in the first version of the paper, not after it."""

from typing import Any

import numpy as np

from polyhvd.parity import layers

FAULT = True
DEFECT = {
    "case": "a GRU and a dense layer",
    "frameworks": "numpy,torch",
    "in": "torch",
    "layer": 0,
    "step": 0,
    "kind": "activation",
    "aside": True,
}


def in_torch() -> Any:
    import torch
    from torch import nn
    from torch.nn.functional import linear

    class Cells(nn.GRU):
        """Steps one after the other, with the reset gate where the code that it was ported from has it."""

        def forward(self, x: torch.Tensor, hx: Any = None) -> Any:
            hidden = x.new_zeros(len(x), self.hidden_size)
            kernels, biases = self.weight_hh_l0.chunk(3), self.bias_hh_l0.chunk(3)
            states = []
            for now in x.unbind(1):
                of_input = linear(now, self.weight_ih_l0, self.bias_ih_l0).chunk(3, dim=1)
                reset = (of_input[0] + linear(hidden, kernels[0], biases[0])).sigmoid()
                update = (of_input[1] + linear(hidden, kernels[1], biases[1])).sigmoid()
                if FAULT:
                    state = linear(reset * hidden, kernels[2], biases[2])
                else:
                    state = reset * linear(hidden, kernels[2], biases[2])
                new = (of_input[2] + state).tanh()
                hidden = (1 - update) * new + update * hidden
                states.append(hidden)
            return torch.stack(states, dim=1), hidden

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells, self.head = Cells(8, 12, batch_first=True), nn.Linear(12, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.cells(x)[0][:, -1])

    return Model()


def build(framework: str) -> Any:
    if framework == "torch":
        return in_torch()
    return [layers.gru(8, 12), layers.last(), layers.dense(12, 3)]


def batch(framework: str, step: int) -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(step).standard_normal((12, 5, 8))
    return inputs, inputs[:, -1, :3].argmax(axis=1)
