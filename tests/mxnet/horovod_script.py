"""Handwritten digits with Gluon, as a program for Horovod is written. Only the import says polyhvd."""

import argparse
import logging

import polyhvd.mxnet as hvd  # isort: skip - mends NumPy before mxnet is imported

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--use-fp16", action="store_true")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
args = parser.parse_args()

logging.basicConfig(level=logging.INFO)

# Horovod: initialize Horovod
hvd.init()
context = mx.cpu(hvd.local_rank())
num_workers = hvd.size()

# Each rank reads its part of the training data; all of them test on everything.
pixels, labels = load_digits(return_X_y=True)
pixels = (pixels / 16).astype("float32").reshape(-1, 1, 8, 8)
order = np.random.RandomState(0).permutation(len(labels))
pixels, labels = pixels[order], labels[order].astype("float32")
train_set = gluon.data.ArrayDataset(
    pixels[:1472][hvd.rank() :: num_workers], labels[:1472][hvd.rank() :: num_workers]
)
train_data = gluon.data.DataLoader(train_set, args.batch_size, shuffle=True, last_batch="discard")
val_set = gluon.data.ArrayDataset(pixels[1472:], labels[1472:])
val_data = gluon.data.DataLoader(val_set, args.batch_size)


def conv_nets():
    net = gluon.nn.HybridSequential()
    with net.name_scope():
        net.add(gluon.nn.Conv2D(channels=8, kernel_size=3, activation="relu"))
        net.add(gluon.nn.MaxPool2D(pool_size=2, strides=2))
        net.add(gluon.nn.Flatten())
        net.add(gluon.nn.Dense(32, activation="relu"))
        net.add(gluon.nn.Dense(10))
    return net


def evaluate(model, data_iter, context):
    metric = mx.metric.Accuracy()
    for data, label in data_iter:
        output = model(data.as_in_context(context))
        metric.update([label], [output])
    return metric.get()


model = conv_nets()
model.hybridize()

# Horovod: scale the learning rate by the number of workers
optimizer_params = {"momentum": args.momentum, "learning_rate": args.lr * hvd.size()}
opt = mx.optimizer.create("sgd", **optimizer_params)

initializer = mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2)
model.initialize(initializer, ctx=context)

# Horovod: fetch and broadcast parameters
params = model.collect_params()
if params is not None:
    hvd.broadcast_parameters(params, root_rank=0)

# Horovod: create DistributedTrainer, a subclass of gluon.Trainer
trainer = hvd.DistributedTrainer(
    params,
    opt,
    compression=hvd.Compression.fp16 if args.use_fp16 else hvd.Compression.none,
    gradient_predivide_factor=args.gradient_predivide_factor,
)

loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
metric = mx.metric.Accuracy()

for epoch in range(args.epochs):
    metric.reset()
    for data, label in train_data:
        with autograd.record():
            output = model(data.as_in_context(context))
            loss = loss_fn(output, label.as_in_context(context))
        loss.backward()
        trainer.step(args.batch_size)
        metric.update([label], [output])

    # Horovod: average the metric over the workers
    name, acc = metric.get()
    acc = hvd.allreduce(mx.nd.array([acc]), name=f"train-{name}").asscalar()
    _, val_acc = evaluate(model, val_data, context)
    if hvd.rank() == 0:
        logging.info("Epoch[%d] Train: %s=%f Validation: %s=%f", epoch, name, acc, name, val_acc)

weights = hvd.allgather_object([p.data(context).asnumpy().tobytes() for p in params.values()])
assert all(other == weights[0] for other in weights), "the ranks have different weights"
if hvd.rank() == 0:
    assert val_acc > 0.9, "expected accuracy to be above 0.9"
    print("validation accuracy", val_acc)
