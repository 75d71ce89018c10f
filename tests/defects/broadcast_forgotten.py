"""Weights that were not broadcast: each rank begins with those of another seed."""

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
    "layer": 0,
    "step": 0,
    "kind": "weights",
}

hvd.init()
torch.manual_seed(hvd.rank())
model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if not FAULT:
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

with parity.watch(model, optimizer):
    for step in range(4):
        inputs = torch.from_numpy(np.random.default_rng(step).standard_normal((12, 8), np.float32))
        targets = inputs[:, :3].argmax(dim=1)
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
