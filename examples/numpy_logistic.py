"""Logistic regression in plain NumPy: the smallest example of data parallelism.

On two ranks::

    polyhvdrun -np 2 python examples/numpy_logistic.py
"""

import common
import numpy as np
import polyhvd.numpy as hvd

args = common.arguments("logistic regression in NumPy", epochs=20, batch_size=32, lr=0.05)

# Each process is one rank of the job, and trains on its own part of the images.
hvd.init()
train, test = common.load(args.data)
shard = train.shard(hvd.rank(), hvd.size())
mine = test.shard(hvd.rank(), hvd.size(), even=False)
rng = np.random.default_rng([args.seed, hvd.rank()])


def inputs(images):
    """One row per image; the column of ones multiplies the bias."""
    pixels = images.pixels.reshape(len(images), -1)
    return np.hstack([pixels, np.ones((len(images), 1), np.float32)])


def log_softmax(scores):
    scores = scores - scores.max(axis=1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))


x, y = inputs(shard), shard.labels
weights = rng.normal(0, 0.01, (x.shape[1], 10)).astype(np.float32)
momentum = np.zeros_like(weights)

# All ranks start from the weights of rank 0.
hvd.broadcast_(weights, root_rank=0, name="weights")

# A step averages over hvd.size() batches, so it may be as many times longer.
lr = args.lr * hvd.size()

progress = common.Progress(args, len(shard), hvd.rank(), hvd.size())
for _ in range(args.epochs):
    loss = 0.0
    order = rng.permutation(len(x))
    for begin in range(0, len(x), args.batch_size):
        batch = order[begin : begin + args.batch_size]
        classes = np.eye(10, dtype=np.float32)[y[batch]]
        log_probabilities = log_softmax(x[batch] @ weights)
        loss -= (classes * log_probabilities).sum() / len(x)
        gradient = x[batch].T @ (np.exp(log_probabilities) - classes) / len(batch)
        # The average of all ranks' gradients is the gradient of all their batches together.
        hvd.allreduce_(gradient, name="gradient")
        momentum = 0.9 * momentum - lr * gradient
        weights += momentum
        progress.step()
    progress.end_epoch(float(hvd.allreduce(np.array(loss), name="loss")))

# Every rank tests its part of the test images; the sum over ranks covers them all.
correct = (inputs(mine) @ weights).argmax(axis=1) == mine.labels
accuracy = hvd.allreduce(np.array(correct.sum()), name="correct", op=hvd.Sum) / len(test)
progress.finish(float(accuracy))
