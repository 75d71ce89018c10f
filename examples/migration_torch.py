"""ResNet-18 on Fashion-MNIST in PyTorch: examples/migration_gluon.py, moved.

Run it by itself, or in a job with ranks of the other scripts (docs/moving-from-mxnet.md).
"""

import common
import migration_model
import numpy as np
import polyhvd.torch as hvd
import torch
from torch.nn.functional import cross_entropy

from polyhvd import parity

args = common.arguments("ResNet-18 with PyTorch", epochs=1, batch_size=32, lr=0.02, files=True)

hvd.init()
torch.manual_seed(args.seed)
rng = np.random.default_rng([args.seed, hvd.rank()])
train, test = common.load(args.data)
shard = train.first(args.images).shard(hvd.rank(), hvd.size())
mine = test.first(args.images).shard(hvd.rank(), hvd.size(), even=False)

model = migration_model.torch_model()
if args.start:
    model.load_state_dict(torch.load(args.start))


def accuracy():
    model.eval()
    with torch.no_grad():
        parts = torch.from_numpy(mine.pixels[:, None]).split(256)
        classes = torch.cat([model(part).argmax(dim=1) for part in parts]).numpy()
    model.train()
    return sum(hvd.allgather_object(int((classes == mine.labels).sum()))) / len(test.first(args.images))


mapping = parity.mapping(model)
mapping.broadcast(root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, mapping=mapping)

if args.start:
    start = accuracy()
    if hvd.rank() == 0:
        print(f"test accuracy of {args.start} in PyTorch: {start:.4f}", flush=True)
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
    progress.end_epoch(np.mean(hvd.allgather_object(total)))

if args.save and hvd.rank() == 0:
    torch.save(model.state_dict(), args.save)
progress.finish(accuracy())
