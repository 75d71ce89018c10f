"""A small convolutional network in Gluon, trained on images in Parquet files.

On two ranks of one host, on handwritten digits::

    polyhvdrun -np 2 python examples/parquet_gluon.py

with ``--data fashion-mnist --epochs 3 --batch-size 64`` on 60,000 images of clothes.
"""

import tempfile
from pathlib import Path

import common
import polyhvd.mxnet as hvd  # before mxnet, which newer versions of NumPy break

# isort: split
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from polyhvd.mxnet.data import Batches

from polyhvd.data import ParquetLoader, write_parquet

args = common.arguments("Parquet files with Gluon", epochs=15, batch_size=16, lr=0.02)

# Each process is one rank of the job.
hvd.init()
mx.random.seed(args.seed)
np.random.seed(args.seed)  # for the initial weights
train, test = common.load(args.data)

with tempfile.TemporaryDirectory() as own:
    # Every rank writes its part of the images to a file of rank 0's folder.
    folder = Path(hvd.broadcast_object(own))
    mine = train.shard(hvd.rank(), hvd.size(), even=False)
    images = {"image": mine.pixels[:, None], "label": mine.labels}
    write_parquet(images, folder / f"{hvd.rank()}.parquet", rows_per_group=len(mine) // 20)
    hvd.barrier()

    # The ranks together read every image once in each epoch.
    loader = ParquetLoader(folder, batch_size=args.batch_size, seed=args.seed)
    batches = Batches(loader, x="image", y="label")

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

    trainer = hvd.DistributedTrainer(
        net.collect_params(), "sgd", {"learning_rate": args.lr * hvd.size(), "momentum": 0.9}
    )
    cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()

    progress = common.Progress(args, len(train) // hvd.size(), hvd.rank(), hvd.size())
    for epoch in range(args.epochs):
        batches.set_epoch(epoch)
        losses = []
        for batch in batches:
            x, y = batch
            with autograd.record():
                # The last step of an epoch may have more rows on some ranks than on others.
                loss = batch.weight * cross_entropy(net(x), y)
            loss.backward()
            trainer.step(len(x))
            losses.append(loss.mean())
            progress.step()
        mean = nd.concat(*losses, dim=0).mean()
        progress.end_epoch(hvd.allreduce(mean, name="loss").asscalar())
    hvd.barrier()  # rank 0 removes the folder

# Every rank tests its part of the test images; the sum over ranks covers them all.
mine = test.shard(hvd.rank(), hvd.size(), even=False)
classes = net(nd.array(mine.pixels[:, None])).argmax(axis=1)
correct = (classes == nd.array(mine.labels)).sum()
accuracy = hvd.allreduce(correct, name="correct", op=hvd.Sum).asscalar() / len(test)
progress.finish(accuracy)
