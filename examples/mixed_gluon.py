"""The Gluon half of a job of two frameworks: rank 0 trains here, rank 1 in PyTorch, and both have one model.

Together with its other half::

    polyhvdrun -np 1 python examples/mixed_gluon.py : -np 1 python examples/mixed_torch.py
"""

import common
import polyhvd.mxnet as hvd  # before mxnet, which newer versions of NumPy break

# isort: split
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

from polyhvd import parity

args = common.arguments("digits with Gluon and PyTorch", epochs=15, batch_size=16, lr=0.02)

# Each process is one rank of the job, and trains on its own part of the images.
hvd.init()
mx.random.seed(args.seed)
rng = np.random.default_rng([args.seed, hvd.rank()])
train, test = common.load(args.data)
shard = train.shard(hvd.rank(), hvd.size())
mine = test.shard(hvd.rank(), hvd.size(), even=False)

net = nn.HybridSequential()
net.add(
    nn.Conv2D(16, 3, padding=1, activation="relu"),
    nn.MaxPool2D(2),
    nn.Conv2D(32, 3, padding=1, activation="relu"),
    nn.MaxPool2D(2),
    nn.Flatten(),
    nn.Dense(64, activation="relu"),
    nn.Dense(10),
)
net.initialize(mx.init.Xavier())
net(nd.array(shard.pixels[:1, None]))  # creates the weights
net.hybridize()

# The same weights on every rank, whatever its framework is, and the same names for their gradients.
mapping = parity.mapping(net, prefix="digits")
mapping.broadcast(root_rank=0)
trainer = hvd.DistributedTrainer(
    net.collect_params(),
    "sgd",
    {"learning_rate": args.lr * hvd.size(), "momentum": 0.9},
    mapping=mapping,
)
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()

progress = common.Progress(args, len(shard), hvd.rank(), hvd.size())
for _ in range(args.epochs):
    total = 0.0
    order = rng.permutation(len(shard))
    for begin in range(0, len(shard), args.batch_size):
        batch = order[begin : begin + args.batch_size]
        x, y = nd.array(shard.pixels[batch, None]), nd.array(shard.labels[batch])
        with autograd.record():
            loss = cross_entropy(net(x), y).mean()  # as PyTorch's: gradients are averaged as they are
        loss.backward()
        trainer.step(1)
        total += loss.asscalar() * len(batch) / len(shard)
        progress.step()
    progress.end_epoch(np.mean(hvd.allgather_object(total, name="loss")))

# Every rank tests its part of the test images.
correct = int((net(nd.array(mine.pixels[:, None])).argmax(axis=1).asnumpy() == mine.labels).sum())
accuracy = sum(hvd.allgather_object(correct, name="correct")) / len(test)

# Both have trained one model: rank 0's weights are close to those of the others.
weights = np.concatenate([array.ravel() for array in mapping.arrays().values()])
others = hvd.broadcast_object(weights, root_rank=0, name="weights")
assert np.allclose(weights, others, rtol=1e-3, atol=1e-4), np.abs(weights - others).max()
progress.finish(accuracy)
