"""ResNet-18 on Fashion-MNIST in Gluon: the script that moves to PyTorch or Keras.

Run it by itself, or in a job with the other two, in which each rank trains on its part of the images
(docs/moving-from-mxnet.md)::

    polyhvdrun -np 1 python examples/migration_gluon.py : -np 1 python examples/migration_torch.py
"""

import common
import migration_model
import polyhvd.mxnet as hvd  # before mxnet, which newer versions of NumPy break

# isort: split
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd

from polyhvd import parity

args = common.arguments("ResNet-18 with Gluon", epochs=1, batch_size=32, lr=0.02, files=True)

hvd.init()
mx.random.seed(args.seed)
rng = np.random.default_rng([args.seed, hvd.rank()])
train, test = common.load(args.data)
shard = train.first(args.images).shard(hvd.rank(), hvd.size())
mine = test.first(args.images).shard(hvd.rank(), hvd.size(), even=False)

net = migration_model.gluon_model()
net.initialize(mx.init.Xavier())
net(nd.array(shard.pixels[:1, None]))  # creates the weights
if args.start:
    net.load_parameters(args.start)
net.hybridize()


def accuracy():
    parts = np.array_split(mine.pixels[:, None], -(-len(mine) // 256))
    classes = np.concatenate([net(nd.array(part)).argmax(axis=1).asnumpy() for part in parts])
    return sum(hvd.allgather_object(int((classes == mine.labels).sum()))) / len(test.first(args.images))


mapping = parity.mapping(net)
mapping.broadcast(root_rank=0)
trainer = hvd.DistributedTrainer(
    net.collect_params(),
    "sgd",
    {"learning_rate": args.lr * hvd.size(), "momentum": 0.9},
    mapping=mapping,
)
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()

if args.start:
    start = accuracy()
    if hvd.rank() == 0:
        print(f"test accuracy of {args.start} in Gluon: {start:.4f}", flush=True)
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
    progress.end_epoch(np.mean(hvd.allgather_object(total)))

if args.save and hvd.rank() == 0:
    net.save_parameters(args.save)
progress.finish(accuracy())
