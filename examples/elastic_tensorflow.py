"""A network in TensorFlow that survives the loss of ranks, and of the job. To be killed by hand::

    polyhvdrun -np 3 --min-np 2 --spares 1 python examples/elastic_tensorflow.py --checkpoint run

with ``--data fashion-mnist`` for more of it. Then ``kill -9`` any of the Python processes, or all of them
and start the job again.
"""

import common
import polyhvd.tensorflow as hvd
import tensorflow as tf

from polyhvd.data import ArrayLoader

args = common.elastic_arguments("digits in TensorFlow", epochs=10, batch_size=16, lr=0.02)

hvd.init()
tf.keras.utils.set_random_seed(args.seed)
train, test = common.load(args.data)
model = tf.keras.Sequential(
    [
        tf.keras.Input((*train.pixels.shape[1:], 1)),
        tf.keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
        tf.keras.layers.MaxPooling2D(),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(64, activation="relu"),
        tf.keras.layers.Dense(10),
    ]
)
cross_entropy = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = tf.keras.optimizers.SGD(args.lr * hvd.size(), momentum=0.9)
optimizer.build(model.trainable_variables)
state = hvd.elastic.TensorFlowKerasState(model, optimizer)


def scale():
    """A step averages over hvd.size() batches, so it may be as many times longer."""
    optimizer.learning_rate.assign(args.lr * hvd.size())


state.register_reset_callbacks([scale])


@tf.function(reduce_retracing=True)
def train_step(pixels, labels, weight):
    with tf.GradientTape() as tape:
        loss = weight * cross_entropy(labels, model(pixels, training=True))
    gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


def step(batch):
    pixels, labels = batch
    # The weight makes the average over ranks that over rows, where ranks have different numbers of them.
    weight = tf.constant(batch.weight, tf.float32)
    return train_step(tf.constant(pixels[..., None]), tf.constant(labels), weight)


loader = ArrayLoader([train.pixels, train.labels], batch_size=args.batch_size, seed=args.seed)
hvd.elastic.train(step, state, loader, epochs=args.epochs, checkpoint=args.checkpoint)

classes = tf.argmax(model(test.pixels[..., None]), axis=1).numpy()
if hvd.rank() == 0:
    print(f"test accuracy {(classes == test.labels).mean():.4f}", flush=True)
