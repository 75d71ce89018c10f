"""The PyTorch half of a job of two frameworks: rank 0 trains in Gluon, rank 1 here, and both have one model.

Together with its other half::

    polyhvdrun -np 1 python examples/mixed_gluon.py : -np 1 python examples/mixed_torch.py
"""

import common
import numpy as np
import polyhvd.torch as hvd
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from polyhvd import parity

args = common.arguments("digits with Gluon and PyTorch", epochs=15, batch_size=16, lr=0.02)

# Each process is one rank of the job, and trains on its own part of the images.
hvd.init()
torch.manual_seed(args.seed)
rng = np.random.default_rng([args.seed, hvd.rank()])
train, test = common.load(args.data)
shard = train.shard(hvd.rank(), hvd.size())
mine = test.shard(hvd.rank(), hvd.size(), even=False)

height, width = train.pixels.shape[1:]
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(32 * (height // 4) * (width // 4), 64),
    nn.ReLU(),
    nn.Linear(64, 10),
)

# The same weights on every rank, whatever its framework is, and the same names for their gradients.
mapping = parity.mapping(model, prefix="digits")
mapping.broadcast(root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, mapping=mapping)

progress = common.Progress(args, len(shard), hvd.rank(), hvd.size())
for _ in range(args.epochs):
    total = 0.0
    order = rng.permutation(len(shard))
    for begin in range(0, len(shard), args.batch_size):
        batch = order[begin : begin + args.batch_size]
        x, y = torch.from_numpy(shard.pixels[batch, None]), torch.from_numpy(shard.labels[batch])
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(batch) / len(shard)
        progress.step()
    progress.end_epoch(np.mean(hvd.allgather_object(total, name="loss")))

# Every rank tests its part of the test images.
with torch.no_grad():
    classes = model(torch.from_numpy(mine.pixels[:, None])).argmax(dim=1).numpy()
correct = int((classes == mine.labels).sum())
accuracy = sum(hvd.allgather_object(correct, name="correct")) / len(test)

# Both have trained one model: rank 0's weights are close to those of the others.
weights = np.concatenate([array.ravel() for array in mapping.arrays().values()])
others = hvd.broadcast_object(weights, root_rank=0, name="weights")
assert np.allclose(weights, others, rtol=1e-3, atol=1e-4), np.abs(weights - others).max()
progress.finish(accuracy)
