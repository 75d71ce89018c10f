"""An Adam that was written by hand, without the correction of its means, which begin at 0."""

import numpy as np
import polyhvd.torch as hvd
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from polyhvd import parity

FAULT = True
DEFECT = {
    "case": "two dense layers",
    "scripts": 2,
    "in": "torch",
    "layer": "all",
    "step": 0,
    "kind": "update",
}

hvd.init()
ported = FAULT and hvd.rank() == 1  # rank 0 is the program that it was written after
model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3))
parity.load(model, from_=0)


class Adam(torch.optim.Optimizer):
    """As in the paper (Kingma and Ba, ICLR 2015), but for the correction."""

    def __init__(self, parameters, lr=0.01, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(weight), torch.zeros_like(weight)
                state["mean"].lerp_(weight.grad, 1 - group["betas"][0])
                state["square"].lerp_(weight.grad**2, 1 - group["betas"][1])
                weight -= group["lr"] * state["mean"] / (state["square"].sqrt() + group["eps"])


optimizer = (Adam if ported else torch.optim.Adam)(model.parameters(), lr=0.01)

with parity.watch(model, optimizer):
    for step in range(4):
        inputs = torch.from_numpy(np.random.default_rng(step).standard_normal((12, 8), np.float32))
        targets = inputs[:, :3].argmax(dim=1)
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
