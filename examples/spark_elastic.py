"""Logistic regression in NumPy on Spark that survives the loss of ranks and executors::

    python examples/spark_elastic.py --workers 3 --epochs 100

with ``--data fashion-mnist`` for more of it, and with spark-submit on a cluster. Then ``kill -9`` a process
that ``ps`` shows as ``polyhvd.launch.job.function``: the others go on, and a new process takes its place.
"""

import common
import numpy as np
from pyspark.sql import SparkSession

import polyhvd.spark


def train(args, pixels, labels, test_pixels, test_labels):
    """Train on one rank. A new process starts here, too, and gets the state of the others."""
    import polyhvd.numpy as hvd

    from polyhvd.data import ArrayLoader

    def inputs(images):  # one row per image; the column of ones multiplies the bias
        return np.hstack([images.reshape(len(images), -1), np.ones((len(images), 1), np.float32)])

    hvd.init()
    x = inputs(pixels)
    shape = x.shape[1], 10
    state = hvd.elastic.ArrayState(
        weights=np.zeros(shape, np.float32),
        momentum=np.zeros(shape, np.float32),
        loss=0.0,
        steps=0,
        history=(),
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
        state.history = (*state.history, (state.loss / state.steps, hvd.size()))
        state.loss, state.steps = 0.0, 0

    loader = ArrayLoader([x, labels], batch_size=args.batch_size, seed=args.seed)
    hvd.elastic.train(step, state, loader, epochs=args.epochs, on_epoch_end=end_epoch)
    accuracy = ((inputs(test_pixels) @ state.weights).argmax(axis=1) == test_labels).mean()
    return state.history, float(accuracy)


def main():
    args = common.spark_arguments("elastic training on Spark", epochs=10, batch_size=32, lr=0.05)
    data = [array for images in common.load(args.data) for array in (images.pixels, images.labels)]
    spark = common.spark_session(SparkSession, args)
    spark.sparkContext.setLogLevel("ERROR")
    results = polyhvd.spark.run_elastic(train, (args, *data), num_proc=args.workers, min_num_proc=1)
    spark.stop()
    history, accuracy = results[0]
    for epoch, (loss, ranks) in enumerate(history):
        print(f"epoch {epoch + 1} loss {loss:.4f} on {ranks} ranks", flush=True)
    print(f"test accuracy {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
