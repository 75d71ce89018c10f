"""A network in Keras that survives the loss of ranks, and of the job. To be killed by hand::

    polyhvdrun -np 3 --min-np 2 --spares 1 python examples/elastic_keras.py --checkpoint run

with ``--data fashion-mnist`` for more of it. Then ``kill -9`` any of the Python processes, or all of them
and start the job again.
"""

import common
import keras
import numpy as np
import polyhvd.keras as hvd

from polyhvd.data import ArrayLoader

args = common.elastic_arguments("digits in Keras", epochs=10, batch_size=16, lr=0.02)

hvd.init()
keras.utils.set_random_seed(args.seed)
train, test = common.load(args.data)
model = keras.Sequential(
    [
        keras.Input((*train.pixels.shape[1:], 1)),
        keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ]
)
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(args.lr * hvd.size(), momentum=0.9))
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
state = hvd.elastic.KerasState(model)


def scale():
    """A step averages over hvd.size() batches, so it may be as many times longer."""
    optimizer.learning_rate.assign(args.lr * hvd.size())


state.register_reset_callbacks([scale])


def step(batch):
    pixels, labels = batch
    # The weight makes the average over ranks that over rows, where ranks have different numbers of them.
    weights = np.full(len(labels), batch.weight, np.float32)
    return model.train_on_batch(pixels[..., None], labels, weights)


loader = ArrayLoader([train.pixels, train.labels], batch_size=args.batch_size, seed=args.seed)
hvd.elastic.train(step, state, loader, epochs=args.epochs, checkpoint=args.checkpoint)

classes = model.predict(test.pixels[..., None], verbose=0).argmax(axis=1)
if hvd.rank() == 0:
    print(f"test accuracy {(classes == test.labels).mean():.4f}", flush=True)
