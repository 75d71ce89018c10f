"""The program of small weights and activations that others were ported from, with either optimizer."""

import sys

import numpy as np
import polyhvd.torch as hvd
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from polyhvd import parity

hvd.init()
torch.manual_seed(7)
model = nn.Sequential(nn.LayerNorm(32, eps=1e-6), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 3))
for layer in model:
    if isinstance(layer, nn.Linear):
        nn.init.normal_(layer.weight, std=0.02)
        nn.init.zeros_(layer.bias)
parity.load(model, from_=0)
if sys.argv[1] == "adamw":
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

with parity.watch(model, optimizer):
    for step in range(4):
        inputs = torch.from_numpy(np.random.default_rng(step).standard_normal((24, 32), np.float32)) * 0.1
        optimizer.zero_grad()
        cross_entropy(model(inputs), inputs[:, :3].argmax(dim=1)).backward()
        optimizer.step()
