"""Logistic regression in NumPy that survives the loss of ranks, and of the job. To be killed by hand::

    polyhvdrun -np 3 --min-np 2 --spares 1 python examples/elastic_numpy.py --checkpoint run

with ``--data fashion-mnist`` for more of it. Then ``kill -9`` any of the Python processes, or all of them
and start the job again.
"""

import common
import numpy as np
import polyhvd.numpy as hvd

from polyhvd.data import ArrayLoader

args = common.elastic_arguments("logistic regression in NumPy", epochs=20, batch_size=32, lr=0.05)

hvd.init()
train, test = common.load(args.data)


def inputs(images):
    """One row per image; the column of ones multiplies the bias."""
    pixels = images.pixels.reshape(len(images), -1)
    return np.hstack([pixels, np.ones((len(images), 1), np.float32)])


x = inputs(train)
state = hvd.elastic.ArrayState(
    weights=np.zeros((x.shape[1], 10), np.float32), momentum=np.zeros((x.shape[1], 10), np.float32)
)


def step(batch):
    """A step of SGD. All ranks have the same weights before it, and after it."""
    rows, labels = batch
    scores = rows @ state.weights
    scores -= scores.max(axis=1, keepdims=True)
    odds = np.exp(scores)
    odds /= odds.sum(axis=1, keepdims=True)
    gradient = rows.T @ (odds - np.eye(10, dtype=np.float32)[labels]) / np.float32(len(rows))
    # The weight makes the average over ranks that over rows, where ranks have different numbers of them.
    gradient *= np.float32(batch.weight)
    hvd.allreduce_(gradient, name="gradient")
    state.momentum[:] = 0.9 * state.momentum - args.lr * hvd.size() * gradient
    state.weights += state.momentum
    return -np.log(odds[np.arange(len(labels)), labels] + 1e-9).mean()


loader = ArrayLoader([x, train.labels], batch_size=args.batch_size, seed=args.seed)
hvd.elastic.train(step, state, loader, epochs=args.epochs, checkpoint=args.checkpoint)

accuracy = ((inputs(test) @ state.weights).argmax(axis=1) == test.labels).mean()
if hvd.rank() == 0:
    print(f"test accuracy {accuracy:.4f}", flush=True)
