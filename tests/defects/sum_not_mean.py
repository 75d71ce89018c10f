"""An optimizer that is set to sum the gradients of the ranks, where the reference averages them."""

import numpy as np
import polyhvd.torch as hvd
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from polyhvd import parity

FAULT = True
DEFECT = {
    "case": "two dense layers, 2 ranks each",
    "scripts": 2,
    "ranks": 2,
    "in": "torch",
    "layer": "all",
    "step": 0,
    "kind": "averaging",
}

hvd.init()
# Ranks 0 and 1 are the job as it was, 2 and 3 as it was ported; rank 2 has the data of rank 0, 3 those of 1.
jobs = [hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])]
pairs = [hvd.add_process_set([0, 2]), hvd.add_process_set([1, 3])]
part = hvd.rank() % 2
ported = FAULT and hvd.rank() >= 2
model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3))
parity.load(model, from_=0)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1),
    named_parameters=model.named_parameters(),
    op=hvd.Sum if ported else hvd.Average,
    process_set=jobs[hvd.rank() // 2],
)

with parity.watch(model, optimizer, process_set=pairs[part], prefix=f"part {part}"):
    for step in range(4):
        inputs = torch.from_numpy(np.random.default_rng([step, part]).standard_normal((12, 8), np.float32))
        optimizer.zero_grad()
        cross_entropy(model(inputs), inputs[:, :3].argmax(dim=1)).backward()
        optimizer.step()

hvd.barrier()  # rank 0 coordinates the others, and has to stay until they are done
