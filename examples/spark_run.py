"""Logistic regression in NumPy on ranks that tasks of Spark start, trained on a table that Spark has written.

On this machine, on handwritten digits::

    python examples/spark_run.py --workers 2

with ``--data fashion-mnist`` on 60,000 images of clothes, and with spark-submit and ``--folder
/shared/images`` on a cluster whose hosts share that folder.
"""

import tempfile
import time
from pathlib import Path

import common
import numpy as np
from pyspark.sql import SparkSession

import polyhvd.spark


def train(args, folder, columns, test):
    """Train on one rank; return the mean loss of each epoch, and the test accuracy."""
    import polyhvd.numpy as hvd

    from polyhvd.data import ParquetLoader

    def inputs(pixels):  # one row per image; the column of ones multiplies the bias
        return np.hstack([pixels.reshape(len(pixels), -1), np.ones((len(pixels), 1), np.float32)])

    hvd.init()
    loader = ParquetLoader(folder, batch_size=args.batch_size, seed=args.seed, pad={"image": 0})
    weights = np.zeros((columns + 1, 10), np.float32)
    momentum = np.zeros_like(weights)
    history = []
    for epoch in range(args.epochs):
        loader.set_epoch(epoch)
        losses = []
        for batch in loader:
            x, labels = inputs(batch["image"]), batch["label"]
            scores = x @ weights
            scores -= scores.max(axis=1, keepdims=True)
            odds = np.exp(scores)
            odds /= odds.sum(axis=1, keepdims=True)
            gradient = x.T @ (odds - np.eye(10, dtype=np.float32)[labels]) / np.float32(len(x))
            gradient *= np.float32(batch.weight)
            hvd.allreduce_(gradient, name="gradient")
            momentum = 0.9 * momentum - args.lr * hvd.size() * gradient
            weights += momentum
            losses.append(-np.log(odds[np.arange(len(labels)), labels] + 1e-9).mean())
        history.append(float(hvd.allreduce(np.mean(losses), name="loss")))
    pixels, labels = test
    mine = slice(hvd.rank(), None, hvd.size())
    correct = ((inputs(pixels[mine]) @ weights).argmax(axis=1) == labels[mine]).sum()
    return history, float(hvd.allreduce(np.float64(correct), op=hvd.Sum, name="correct")) / len(labels)


def main():
    args = common.spark_arguments("NumPy on Spark", epochs=10, batch_size=32, lr=0.05)
    images, test = common.load(args.data)
    spark = common.spark_session(SparkSession, args)
    spark.sparkContext.setLogLevel("ERROR")
    with tempfile.TemporaryDirectory() as own:
        folder = str(Path(args.folder or own) / "images.parquet")
        pixels = images.pixels.reshape(len(images), -1)
        rows = list(zip(pixels.tolist(), images.labels.tolist(), strict=True))
        table = spark.createDataFrame(rows, "image array<float>, label long").repartition(2 * args.workers)
        table.write.parquet(folder)

        began = time.perf_counter()
        arguments = args, folder, pixels.shape[1], (test.pixels, test.labels)
        history, accuracy = polyhvd.spark.run(train, arguments, num_proc=args.workers)[0]
        images_per_s = len(images) * args.epochs / (time.perf_counter() - began)
        spark.stop()
    for epoch, loss in enumerate(history):
        print(f"epoch {epoch + 1}/{args.epochs} loss {loss:.4f}", flush=True)
    print(f"test accuracy {accuracy:.4f}, {args.workers} ranks, {images_per_s:.0f} images/s", flush=True)


if __name__ == "__main__":
    main()
