"""The program that another was ported from, with a learning rate that is halved: no defect."""

import numpy as np
import polyhvd.torch as hvd
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from polyhvd import parity

hvd.init()
model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3))
parity.load(model, from_=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

with parity.watch(model, optimizer):
    for step in range(5):
        if step == 3:
            optimizer.param_groups[0]["lr"] = 0.05
        inputs = torch.from_numpy(np.random.default_rng(step).standard_normal((12, 8), np.float32))
        optimizer.zero_grad()
        cross_entropy(model(inputs), inputs[:, :3].argmax(dim=1)).backward()
        optimizer.step()
