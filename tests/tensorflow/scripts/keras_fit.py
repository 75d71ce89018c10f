"""Written for Horovod: tf.keras with model.fit and callbacks."""

import hashlib
import os

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf

hvd.init()

gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

numbers = np.random.default_rng(7)
centers = numbers.normal(size=(10, 64)).astype(np.float32)
labels = numbers.integers(0, 10, 640)
images = centers[labels] + numbers.normal(scale=0.5, size=(640, 64)).astype(np.float32)
dataset = tf.data.Dataset.from_tensor_slices((images, labels.astype(np.int64)))
dataset = dataset.repeat().shuffle(1000, seed=hvd.rank()).batch(32)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Dense(32, activation="relu"),
        tf.keras.layers.Dropout(0.1),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)

scaled_lr = 0.01 * hvd.size()
opt = tf.keras.optimizers.Adam(scaled_lr)

opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=1, average_aggregated_gradients=True)

model.compile(loss=tf.keras.losses.SparseCategoricalCrossentropy(), optimizer=opt, metrics=["accuracy"])

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=2, verbose=1),
    hvd.callbacks.LearningRateScheduleCallback(initial_lr=scaled_lr, multiplier=1e-1, start_epoch=4),
]

if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.keras"))

verbose = 2 if hvd.rank() == 0 else 0

history = model.fit(
    dataset, steps_per_epoch=20 // hvd.size(), callbacks=callbacks, epochs=5, verbose=verbose
).history

assert history["loss"][-1] < 0.5 * history["loss"][0], history
np.testing.assert_allclose(history["lr"][1:], [scaled_lr] * 3 + [0.1 * scaled_lr], rtol=1e-5)
if hvd.rank() == 0:
    assert sorted(os.listdir(".")) == [f"checkpoint-{epoch}.keras" for epoch in range(1, 6)]
    restored = hvd.load_model("./checkpoint-5.keras")
    assert type(restored.optimizer).__name__ == "Adam"
digest = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest()
print("RESULT", digest, history["loss"])
