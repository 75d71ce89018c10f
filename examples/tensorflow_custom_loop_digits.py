"""A small convolutional network in TensorFlow, trained by a custom loop on handwritten digits.

On two ranks::

    polyhvdrun -np 2 python examples/tensorflow_custom_loop_digits.py
"""

import common
import polyhvd.tensorflow as hvd
import tensorflow as tf

args = common.arguments("digits with TensorFlow", epochs=15, batch_size=16, lr=0.02)

# Each process is one rank of the job, and trains on its own part of the images.
hvd.init()
tf.keras.utils.set_random_seed(args.seed)
train, test = common.load(args.data)
shard = train.shard(hvd.rank(), hvd.size())
images = tf.data.Dataset.from_tensor_slices((shard.pixels[..., None], shard.labels))
images = images.shuffle(len(shard), seed=args.seed).batch(args.batch_size).prefetch(2)

model = tf.keras.Sequential(
    [
        tf.keras.Input((*train.pixels.shape[1:], 1)),
        tf.keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
        tf.keras.layers.MaxPooling2D(),
        tf.keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
        tf.keras.layers.MaxPooling2D(),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(64, activation="relu"),
        tf.keras.layers.Dense(10),
    ]
)
cross_entropy = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

# A step averages over hvd.size() batches, so it may be as many times longer.
optimizer = tf.keras.optimizers.SGD(args.lr * hvd.size(), momentum=0.9)

# All ranks start from the weights of rank 0.
optimizer.build(model.trainable_variables)
hvd.broadcast_variables(model.variables, root_rank=0)
hvd.broadcast_variables(optimizer.variables, root_rank=0)


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = cross_entropy(y, model(x, training=True))
    # The tape averages the gradients over the ranks.
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


progress = common.Progress(args, len(shard), hvd.rank(), hvd.size())
for _ in range(args.epochs):
    total = tf.zeros(())
    for x, y in images:
        total += train_step(x, y) * len(x)
        progress.step()
    progress.end_epoch(float(hvd.allreduce(total / len(shard), name="loss")))

# Every rank tests its part of the test images; the sum over ranks covers them all.
mine = test.shard(hvd.rank(), hvd.size(), even=False)
classes = tf.argmax(model(mine.pixels[..., None]), axis=1)
correct = tf.reduce_sum(tf.cast(classes == mine.labels, tf.float32))
accuracy = float(hvd.allreduce(correct, name="correct", op=hvd.Sum)) / len(test)
progress.finish(accuracy)
