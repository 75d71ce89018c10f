"""A loader that drops the last batch of an epoch, and begins the next one instead."""

import itertools

import numpy as np
import polyhvd.torch as hvd
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from polyhvd import parity

FAULT = True
DEFECT = {
    "case": "two dense layers",
    "scripts": 2,
    "in": "torch",
    "layer": None,
    "step": 2,
    "kind": "data",
}

hvd.init()
ported = FAULT and hvd.rank() == 1  # rank 0 is the program that it was written after
model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3))
parity.load(model, from_=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.from_numpy(np.random.default_rng(5).standard_normal((30, 8), np.float32))
loader = DataLoader(TensorDataset(rows, rows[:, :3].argmax(dim=1)), batch_size=12, drop_last=ported)

with parity.watch(model, optimizer):
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for inputs, targets in itertools.islice(batches, 5):
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
