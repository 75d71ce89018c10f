"""A script as Horovod's documentation of elastic training has them for TensorFlow 2, with its import changed.

Arguments: a file that is there once rank 1 has been killed.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import numpy as np
import polyhvd.tensorflow as hvd
import tensorflow as tf

hvd.init()
tf.keras.utils.set_random_seed(42)

random = np.random.default_rng(3)
inputs = random.normal(size=(512, 10)).astype("float32")
targets = (inputs @ random.normal(size=(10, 3))).argmax(1)
dataset = tf.data.Dataset.from_tensor_slices((inputs, targets)).repeat().shuffle(512).batch(16)

model = tf.keras.Sequential(
    [tf.keras.Input((10,)), tf.keras.layers.Dense(32, "relu"), tf.keras.layers.Dense(3)]
)
optimizer = tf.keras.optimizers.Adam(0.01)
loss = tf.losses.SparseCategoricalCrossentropy(from_logits=True)


@tf.function
def train_one_batch(data: Any, target: Any, allreduce: bool = True) -> Any:
    with tf.GradientTape() as tape:
        value = loss(target, model(data, training=True))
    if allreduce:
        tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(value, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))  # noqa: B905
    return value


# Initialize model and optimizer state so we can synchronize across workers
data, target = next(iter(dataset))
train_one_batch(data, target, allreduce=False)


@hvd.elastic.run
def train(state: Any) -> None:
    left = dataset.skip(state.batch).take(200 - state.batch)
    for state.batch, (data, target) in enumerate(left, state.batch):  # noqa: B020
        if hvd.rank() == 1 and state.batch == 50 and not os.path.exists(sys.argv[1]):
            open(sys.argv[1], "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        value = train_one_batch(data, target)
        if state.batch % 40 == 0:
            print(f"losses {float(value):.3f}", flush=True)
        if state.batch % 10 == 9:
            state.batch += 1
            state.commit()


def on_state_reset() -> None:
    optimizer.learning_rate.assign(0.01)


state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)
state.register_reset_callbacks([on_state_reset])
train(state)
total = sum(float(np.sum(np.asarray(weight, np.float64))) for weight in model.get_weights())
moments = sum(float(np.sum(np.asarray(v.numpy(), np.float64))) for v in optimizer.variables)
print("end", total.hex(), moments.hex(), int(optimizer.iterations), flush=True)
