"""A small convolutional network in Keras, trained by model.fit on handwritten digits.

On two ranks::

    polyhvdrun -np 2 python examples/tensorflow_keras_digits.py
"""

import common
import keras
import numpy as np
import polyhvd.tensorflow.keras as hvd

args = common.arguments("digits with Keras", epochs=15, batch_size=16, lr=0.02)

# Each process is one rank of the job, and trains on its own part of the images.
hvd.init()
keras.utils.set_random_seed(args.seed)
train, test = common.load(args.data)
shard = train.shard(hvd.rank(), hvd.size())

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

# A step averages over hvd.size() batches, so it may be as many times longer.
optimizer = keras.optimizers.SGD(args.lr * hvd.size(), momentum=0.9)
model.compile(
    optimizer=hvd.DistributedOptimizer(optimizer),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)

progress = common.Progress(args, len(shard), hvd.rank(), hvd.size())
model.fit(
    shard.pixels[..., None],
    shard.labels,
    batch_size=args.batch_size,
    epochs=args.epochs,
    verbose=0,
    callbacks=[
        # All ranks start from the weights of rank 0.
        hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank=0),
        # Losses and metrics become averages over the ranks, for the callbacks that follow.
        hvd.callbacks.MetricAverageCallback(),
        keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: progress.step(),
            on_epoch_end=lambda epoch, logs: progress.end_epoch(logs["loss"]),
        ),
    ],
)

# Every rank tests its part of the test images; the sum over ranks covers them all.
mine = test.shard(hvd.rank(), hvd.size(), even=False)
classes = model.predict(mine.pixels[..., None], verbose=0).argmax(axis=1)
correct = np.float32((classes == mine.labels).sum())
accuracy = float(hvd.allreduce(correct, name="correct", op=hvd.Sum)) / len(test)
progress.finish(accuracy)
