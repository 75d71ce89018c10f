"""A small convolutional network in Keras, trained by model.fit on images in Parquet files.

On two ranks of one host, on handwritten digits::

    polyhvdrun -np 2 python examples/parquet_keras.py

with ``--data fashion-mnist --epochs 3 --batch-size 64`` on 60,000 images of clothes.
"""

import tempfile
from pathlib import Path

import common
import keras
import numpy as np
import polyhvd.keras as hvd
from polyhvd.keras.data import Batches

from polyhvd.data import ParquetLoader, write_parquet

args = common.arguments("Parquet files with Keras", epochs=15, batch_size=16, lr=0.02)

# Each process is one rank of the job.
hvd.init()
keras.utils.set_random_seed(args.seed)
train, test = common.load(args.data)

model = keras.Sequential(
    [
        keras.Input((*train.pixels.shape[1:], 1)),
        keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ]
)
optimizer = keras.optimizers.SGD(args.lr * hvd.size(), momentum=0.9)
model.compile(
    optimizer=hvd.DistributedOptimizer(optimizer),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
progress = common.Progress(args, len(train) // hvd.size(), hvd.rank(), hvd.size())

with tempfile.TemporaryDirectory() as own:
    # Every rank writes its part of the images to a file of rank 0's folder.
    folder = Path(hvd.broadcast_object(own))
    mine = train.shard(hvd.rank(), hvd.size(), even=False)
    images = {"image": mine.pixels[..., None], "label": mine.labels}
    write_parquet(images, folder / f"{hvd.rank()}.parquet", rows_per_group=len(mine) // 20)
    hvd.barrier()

    # The ranks together read every image once in each epoch. The data set has weights of the rows, since
    # the last step of an epoch may have more of them on some ranks than on others.
    loader = ParquetLoader(folder, batch_size=args.batch_size, seed=args.seed)
    model.fit(
        Batches(loader, x="image", y="label").dataset(),
        epochs=args.epochs,
        verbose=0,
        callbacks=[
            # All ranks start from the weights of rank 0.
            hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank=0),
            # The next epoch has another order.
            hvd.callbacks.DataPositionCallback(loader),
            # Losses and metrics become averages over the ranks, for the callbacks that follow.
            hvd.callbacks.MetricAverageCallback(),
            keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: progress.step(),
                on_epoch_end=lambda epoch, logs: progress.end_epoch(logs["loss"]),
            ),
        ],
    )
    hvd.barrier()  # rank 0 removes the folder

# Every rank tests its part of the test images; the sum over ranks covers them all.
mine = test.shard(hvd.rank(), hvd.size(), even=False)
classes = model.predict(mine.pixels[..., None], verbose=0).argmax(axis=1)
correct = np.float32((classes == mine.labels).sum())
accuracy = float(hvd.allreduce(correct, name="correct", op=hvd.Sum)) / len(test)
progress.finish(accuracy)
