"""ResNet-18 on Fashion-MNIST in Keras: examples/migration_gluon.py, moved.

Run it by itself, or in a job with ranks of the other scripts (docs/moving-from-mxnet.md).
"""

import common
import keras
import migration_model
import numpy as np
import polyhvd.keras as hvd
import tensorflow as tf

from polyhvd import parity

args = common.arguments("ResNet-18 with Keras", epochs=1, batch_size=32, lr=0.02, files=True)

hvd.init()
keras.utils.set_random_seed(args.seed)
rng = np.random.default_rng([args.seed, hvd.rank()])
train, test = common.load(args.data)
shard = train.first(args.images).shard(hvd.rank(), hvd.size())
mine = test.first(args.images).shard(hvd.rank(), hvd.size(), even=False)

model = migration_model.keras_model()
if args.start:
    model.load_weights(args.start)


def accuracy():
    logits = model.predict(mine.pixels[..., None], batch_size=256, verbose=0)  # channels last
    correct = int((logits.argmax(axis=1) == mine.labels).sum())
    return sum(hvd.allgather_object(correct)) / len(test.first(args.images))


mapping = parity.mapping(model)
mapping.broadcast(root_rank=0)
optimizer = hvd.DistributedOptimizer(
    keras.optimizers.SGD(args.lr * hvd.size(), momentum=0.9), mapping=mapping
)
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)  # the mean over the batch


@tf.function
def step(x, y):
    with tf.GradientTape() as tape:
        loss = cross_entropy(y, model(x, training=True))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss


if args.start:
    start = accuracy()
    if hvd.rank() == 0:
        print(f"test accuracy of {args.start} in Keras: {start:.4f}", flush=True)
progress = common.Progress(args, len(shard), hvd.rank(), hvd.size())
for _ in range(args.epochs):
    total = 0.0
    order = rng.permutation(len(shard))
    for begin in range(0, len(shard), args.batch_size):
        batch = order[begin : begin + args.batch_size]
        loss = step(tf.constant(shard.pixels[batch, ..., None]), tf.constant(shard.labels[batch]))
        total += float(loss) * len(batch) / len(shard)
        progress.step()
    progress.end_epoch(np.mean(hvd.allgather_object(total)))

if args.save and hvd.rank() == 0:
    model.save_weights(args.save)
progress.finish(accuracy())
