"""A small convolutional network in Gluon, trained on handwritten digits.

On two ranks::

    polyhvdrun -np 2 python examples/mxnet_gluon_digits.py
"""

import common
import polyhvd.mxnet as hvd  # before mxnet, which newer versions of NumPy break

# isort: split
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

args = common.arguments("digits with Gluon", epochs=15, batch_size=16, lr=0.02)

# Each process is one rank of the job, and trains on its own part of the images.
hvd.init()
mx.random.seed(args.seed)
np.random.seed(args.seed)  # for the loader
train, test = common.load(args.data)
shard = train.shard(hvd.rank(), hvd.size())
images = gluon.data.ArrayDataset(shard.pixels[:, None], shard.labels)
loader = gluon.data.DataLoader(images, args.batch_size, shuffle=True)

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
net.hybridize()

# All ranks start from the weights of rank 0, which the first batch is going to create.
hvd.broadcast_parameters(net.collect_params(), root_rank=0)

# A step averages over hvd.size() batches, so it may be as many times longer.
trainer = hvd.DistributedTrainer(
    net.collect_params(), "sgd", {"learning_rate": args.lr * hvd.size(), "momentum": 0.9}
)
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()

progress = common.Progress(args, len(shard), hvd.rank(), hvd.size())
for _ in range(args.epochs):
    total = nd.zeros(1)
    for x, y in loader:
        with autograd.record():
            loss = cross_entropy(net(x), y)
        loss.backward()
        trainer.step(len(x))
        total += loss.sum()
        progress.step()
    progress.end_epoch(hvd.allreduce(total / len(shard), name="loss").asscalar())

# Every rank tests its part of the test images; the sum over ranks covers them all.
mine = test.shard(hvd.rank(), hvd.size(), even=False)
classes = net(nd.array(mine.pixels[:, None])).argmax(axis=1)
correct = (classes == nd.array(mine.labels)).sum()
accuracy = hvd.allreduce(correct, name="correct", op=hvd.Sum).asscalar() / len(test)
progress.finish(accuracy)
