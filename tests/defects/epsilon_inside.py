"""RMSProp with its epsilon, 0.001, inside the root."""

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
    "aside": True,
}

hvd.init()
ported = FAULT and hvd.rank() == 1  # rank 0 is the program that it was written after
model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3))
parity.load(model, from_=0)


class RMSProp(torch.optim.Optimizer):
    """With epsilon where TensorFlow has it."""

    def __init__(self, parameters, lr, alpha, eps):
        super().__init__(parameters, {"lr": lr, "alpha": alpha, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["square"] = torch.zeros_like(weight)
                state["square"].lerp_(weight.grad**2, 1 - group["alpha"])
                weight -= group["lr"] * weight.grad / (state["square"] + group["eps"]).sqrt()


kind = RMSProp if ported else torch.optim.RMSprop
optimizer = kind(model.parameters(), lr=0.001, alpha=0.9, eps=1e-3)

with parity.watch(model, optimizer):
    for step in range(4):
        inputs = torch.from_numpy(np.random.default_rng(step).standard_normal((12, 8), np.float32))
        targets = inputs[:, :3].argmax(dim=1)
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
