"""Gradients that are not set to zero, so that each step adds to those of all previous steps."""

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
    "step": 1,
    "kind": "gradient",
    "aside": True,
}

hvd.init()
ported = FAULT and hvd.rank() == 1  # rank 0 is the program that it was written after
model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3))
parity.load(model, from_=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

with parity.watch(model, optimizer):
    for step in range(4):
        inputs = torch.from_numpy(np.random.default_rng(step).standard_normal((12, 8), np.float32))
        targets = inputs[:, :3].argmax(dim=1)
        if not ported:
            optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
