"""A network in Gluon that survives the loss of ranks, and of the job. To be killed by hand::

    polyhvdrun -np 3 --min-np 2 --spares 1 python examples/elastic_gluon.py --checkpoint run

with ``--data fashion-mnist`` for more of it. Then ``kill -9`` any of the Python processes, or all of them
and start the job again.
"""

import common
import polyhvd.mxnet as hvd  # before mxnet, which newer versions of NumPy break

# isort: split
import mxnet as mx
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

from polyhvd.data import ArrayLoader

args = common.elastic_arguments("digits in Gluon", epochs=10, batch_size=16, lr=0.02)

hvd.init()
mx.random.seed(args.seed)
train, test = common.load(args.data)
net = nn.HybridSequential()
net.add(
    nn.Conv2D(16, 3, padding=1, activation="relu"),
    nn.MaxPool2D(2),
    nn.Flatten(),
    nn.Dense(64, activation="relu"),
    nn.Dense(10),
)
net.initialize(mx.init.Xavier())
net.hybridize()
net(nd.array(train.pixels[:1, None]))  # now its parameters have their shapes, and values
options = {"learning_rate": args.lr * hvd.size(), "momentum": 0.9}
trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", options)
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()
state = hvd.elastic.GluonState(net, trainer)


def scale():
    """A step averages over hvd.size() batches, so it may be as many times longer."""
    trainer.set_learning_rate(args.lr * hvd.size())


state.register_reset_callbacks([scale])


def step(batch):
    pixels, labels = batch
    with autograd.record():
        # The weight makes the average over ranks that over rows, where ranks have different numbers of them.
        loss = batch.weight * cross_entropy(net(nd.array(pixels[:, None])), nd.array(labels)).mean()
    loss.backward()
    trainer.step(1)
    return loss.asscalar()


loader = ArrayLoader([train.pixels, train.labels], batch_size=args.batch_size, seed=args.seed)
hvd.elastic.train(step, state, loader, epochs=args.epochs, checkpoint=args.checkpoint)

classes = net(nd.array(test.pixels[:, None])).argmax(axis=1).asnumpy()
if hvd.rank() == 0:
    print(f"test accuracy {(classes == test.labels).mean():.4f}", flush=True)
