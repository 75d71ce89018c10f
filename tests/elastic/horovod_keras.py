"""A script as Horovod's documentation of elastic training has them for Keras, with its import changed.

Arguments: a file that is there once rank 1 has been killed.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import keras
import numpy as np
import polyhvd.keras as hvd

hvd.init()
keras.utils.set_random_seed(42)

random = np.random.default_rng(3)
inputs = random.normal(size=(512, 10)).astype("float32")
targets = (inputs @ random.normal(size=(10, 3))).argmax(1)

model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(3)])
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])


class Kill(keras.callbacks.Callback):  # type: ignore[misc]
    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if hvd.rank() == 1 and state.epoch == 1 and batch == 5 and not os.path.exists(sys.argv[1]):
            open(sys.argv[1], "w").close()
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        # The history of fit() does not have the epochs before the last change of the world.
        print(f"losses {logs['loss']:.3f}", flush=True)


@hvd.elastic.run
def train(state: Any) -> None:
    share = slice(hvd.rank(), None, hvd.size())
    model.fit(
        inputs[share],
        targets[share],
        batch_size=16,
        epochs=6 - state.epoch,
        shuffle=False,
        callbacks=[
            Kill(),
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.CommitStateCallback(state),
        ],
        verbose=0,
    )


state = hvd.elastic.KerasState(model, batch=0, epoch=0)
train(state)
total = sum(float(np.sum(np.asarray(weight, np.float64))) for weight in model.get_weights())
moments = sum(float(np.sum(np.asarray(v.numpy(), np.float64))) for v in optimizer.variables)
print("end", state.epoch, total.hex(), moments.hex(), int(optimizer.iterations), flush=True)
