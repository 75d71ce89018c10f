"""Written for Horovod: a loop of one's own, with a tape in a tf.function."""

import hashlib

import horovod.tensorflow as hvd
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
    [tf.keras.layers.Dense(32, activation="relu"), tf.keras.layers.Dense(10, activation="softmax")]
)
loss = tf.keras.losses.SparseCategoricalCrossentropy()

opt = tf.keras.optimizers.Adam(0.005 * hvd.size())

checkpoint = tf.train.Checkpoint(model=model)


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        probs = model(images, training=True)
        loss_value = loss(labels, probs)

    tape = hvd.DistributedGradientTape(tape)

    grads = tape.gradient(loss_value, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    if first_batch:  # now that the optimizer has its variables
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(opt.variables, root_rank=0)

    return loss_value


losses = []
for batch, (x, y) in enumerate(dataset.take(60 // hvd.size())):
    losses.append(float(training_step(x, y, batch == 0)))
    if batch % 10 == 0 and hvd.local_rank() == 0:
        print(f"step {batch}: loss {losses[-1]:.6f}")

if hvd.rank() == 0:
    checkpoint.save("./checkpoints")

assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5]), losses
mean_loss = hvd.allreduce(tf.constant(losses[-1]), name="last_loss")
digest = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest()
print("RESULT", digest, float(mean_loss))
