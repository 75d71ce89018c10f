"""Logistic regression in NumPy on actors of Ray that survives the loss of actors and nodes::

    python examples/ray_elastic.py --workers 3

with ``--data fashion-mnist`` for more of it, and ``--address auto`` on a cluster. Then ``kill -9`` a process
that ``ps`` shows as ``ray::ElasticWorker``: the others go on, and a new actor takes its place.
"""

import common
import numpy as np
import polyhvd.numpy as hvd
import ray

from polyhvd.data import ArrayLoader
from polyhvd.ray import ElasticRayExecutor, ray_logger


def inputs(pixels):
    """One row per image; the column of ones multiplies the bias."""
    return np.hstack([pixels.reshape(len(pixels), -1), np.ones((len(pixels), 1), np.float32)])


def train(args, pixels, labels, test_pixels, test_labels):
    """Train on one rank. A new actor starts here, too, and gets the state of the others."""
    hvd.init()
    x = inputs(pixels)
    shape = x.shape[1], 10
    state = hvd.elastic.ArrayState(
        weights=np.zeros(shape, np.float32), momentum=np.zeros(shape, np.float32), loss=0.0, steps=0
    )

    def step(batch):
        rows, classes = batch
        scores = rows @ state.weights
        scores -= scores.max(axis=1, keepdims=True)
        odds = np.exp(scores)
        odds /= odds.sum(axis=1, keepdims=True)
        gradient = rows.T @ (odds - np.eye(10, dtype=np.float32)[classes]) / np.float32(len(rows))
        gradient *= np.float32(batch.weight)
        hvd.allreduce_(gradient, name="gradient")
        state.momentum[:] = 0.9 * state.momentum - args.lr * hvd.size() * gradient
        state.weights += state.momentum
        state.loss += float(-np.log(odds[np.arange(len(classes)), classes] + 1e-9).mean())
        state.steps += 1

    def end_epoch(epoch):
        ray_logger.log({"epoch": epoch + 1, "ranks": hvd.size(), "loss": state.loss / state.steps})
        state.loss, state.steps = 0.0, 0

    loader = ArrayLoader([x, labels], batch_size=args.batch_size, seed=args.seed)
    hvd.elastic.train(step, state, loader, epochs=args.epochs, on_epoch_end=end_epoch)
    return float(((inputs(test_pixels) @ state.weights).argmax(axis=1) == test_labels).mean())


def show(values):
    print("epoch {epoch} loss {loss:.4f} on {ranks} ranks".format(**values), flush=True)


def main():
    args = common.ray_arguments("elastic training on Ray", epochs=10, batch_size=32, lr=0.05)
    data = [array for images in common.load(args.data) for array in (images.pixels, images.labels)]
    ray.init(address=args.address, log_to_driver=False)
    settings = ElasticRayExecutor.create_settings(min_num_proc=1, max_num_proc=args.workers)
    executor = ElasticRayExecutor(settings)
    executor.start()
    shared = [ray.put(array) for array in data]  # sent to each node once
    accuracies = executor.run(lambda: train(args, *ray.get(shared)), callbacks=[show])
    print(f"test accuracy {accuracies[0]:.4f}", flush=True)


if __name__ == "__main__":
    main()
