"""Logistic regression in NumPy on actors of Ray, trained on images in Parquet files.

On this machine, on handwritten digits::

    python examples/ray_numpy.py --workers 2

with ``--data fashion-mnist`` on 60,000 images of clothes, and ``--address auto --folder /shared/images`` on a
cluster whose nodes share that folder.
"""

import tempfile
import time
from pathlib import Path

import common
import numpy as np
import polyhvd.numpy as hvd
import ray

from polyhvd.data import ParquetLoader, write_parquet
from polyhvd.ray import RayExecutor


def inputs(pixels):
    """One row per image; the column of ones multiplies the bias."""
    return np.hstack([pixels.reshape(len(pixels), -1), np.ones((len(pixels), 1), np.float32)])


class Trainer:
    """The model of one rank, which stays in its actor from call to call."""

    def __init__(self, folder, columns, batch_size, lr, seed):
        hvd.init()
        self.loader = ParquetLoader(folder, batch_size=batch_size, seed=seed)
        self.weights = np.zeros((columns, 10), np.float32)
        self.momentum = np.zeros_like(self.weights)
        self.lr = lr * hvd.size()  # a step averages over so many batches

    def train_epoch(self, epoch):
        """Take one pass over the images; return the mean loss of all ranks."""
        self.loader.set_epoch(epoch)
        losses = []
        for batch in self.loader:
            x, labels = inputs(batch["image"]), batch["label"]
            scores = x @ self.weights
            scores -= scores.max(axis=1, keepdims=True)
            odds = np.exp(scores)
            odds /= odds.sum(axis=1, keepdims=True)
            gradient = x.T @ (odds - np.eye(10, dtype=np.float32)[labels]) / np.float32(len(x))
            gradient *= np.float32(batch.weight)
            hvd.allreduce_(gradient, name="gradient")
            self.momentum = 0.9 * self.momentum - self.lr * gradient
            self.weights += self.momentum
            losses.append(-np.log(odds[np.arange(len(labels)), labels] + 1e-9).mean())
        return float(hvd.allreduce(np.mean(losses), name="loss"))

    def accuracy(self, pixels, labels):
        """The share of images that are recognized; each rank tests a part of them."""
        mine = slice(hvd.rank(), None, hvd.size())
        correct = ((inputs(pixels[mine]) @ self.weights).argmax(axis=1) == labels[mine]).sum()
        return float(hvd.allreduce(np.float64(correct), op=hvd.Sum, name="correct")) / len(labels)


def main():
    args = common.ray_arguments("NumPy on Ray", epochs=10, batch_size=32, lr=0.05)
    train, test = common.load(args.data)
    ray.init(address=args.address, log_to_driver=False)
    with tempfile.TemporaryDirectory() as own:
        folder = Path(args.folder or own)
        images = {"image": train.pixels, "label": train.labels}
        write_parquet(images, folder / "images.parquet", rows_per_group=len(train) // 40)

        executor = RayExecutor(num_workers=args.workers)
        executor.start(Trainer, [folder, train.pixels[0].size + 1, args.batch_size, args.lr, args.seed])
        began = time.perf_counter()
        for epoch in range(args.epochs):
            loss = executor.execute(lambda trainer, epoch=epoch: trainer.train_epoch(epoch))[0]
            print(f"epoch {epoch + 1}/{args.epochs} loss {loss:.4f}", flush=True)
        images_per_s = len(train) * args.epochs / (time.perf_counter() - began)
        pixels, labels = test.pixels, test.labels
        accuracy = executor.execute(lambda trainer: trainer.accuracy(pixels, labels))[0]
        executor.shutdown()
    print(f"test accuracy {accuracy:.4f}, {args.workers} ranks, {images_per_s:.0f} images/s", flush=True)


if __name__ == "__main__":
    main()
