"""Weight decay of the scale of a normalization, which the reference does not decay."""

import numpy as np
import polyhvd.torch as hvd
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from polyhvd import parity

FAULT = True
DEFECT = {
    "case": "two dense layers, layer normalization",
    "scripts": 2,
    "in": "torch",
    "layer": 1,
    "step": 0,
    "kind": "update",
}

hvd.init()
ported = FAULT and hvd.rank() == 1  # rank 0 is the program that it was written after
model = nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 3))
parity.load(model, from_=0)
normalization = list(model[1].parameters())
others = [*model[0].parameters(), *model[3].parameters()]
groups = [{"params": others}, {"params": normalization, "weight_decay": 0.1 if ported else 0.0}]
optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)

with parity.watch(model, optimizer):
    for step in range(4):
        inputs = torch.from_numpy(np.random.default_rng(step).standard_normal((12, 8), np.float32))
        targets = inputs[:, :3].argmax(dim=1)
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
