"""Models, data and comparisons that the scripts of Keras 3 share; imported by ranks alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import keras
import numpy as np
import polyhvd.keras as hvd
import tensorflow as tf

__all__ = [
    "BATCH",
    "FEATURES",
    "RANK",
    "SIZE",
    "STEPS",
    "assert_close",
    "assert_same_on_all_ranks",
    "dataset",
    "make_model",
    "mine",
    "sgd",
    "train_alone",
    "train_together",
    "value",
]

tf.get_logger().setLevel("ERROR")

RANK, SIZE = hvd.rank(), hvd.size()
BATCH, STEPS, FEATURES = 8, 6, 5


def dataset() -> tuple[Any, Any]:
    numbers = np.random.default_rng(3)
    inputs = numbers.normal(size=(BATCH * SIZE * STEPS, FEATURES)).astype(np.float32)
    targets = (inputs @ numbers.normal(size=(FEATURES, 1)) + 0.1).astype(np.float32)
    return inputs, targets


def mine(array: Any) -> Any:
    """This rank's share of every batch of the union."""
    return array.reshape(STEPS, SIZE, BATCH, -1)[:, RANK].reshape(STEPS * BATCH, -1)


def value(variable: Any) -> float:
    return float(keras.ops.convert_to_numpy(variable))


def make_model(seed: int = 1, **first: Any) -> Any:
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((FEATURES,)), layers.Dense(7, activation="tanh", **first), layers.Dense(1)]
    )


def sgd(**arguments: Any) -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9, **arguments)


def train_alone(optimizer: Any = None, epochs: int = 2) -> list[Any]:
    """The weights after training in one process on the union of the ranks' batches."""
    return _train_alone(optimizer, epochs) if optimizer else _train_alone_with_sgd(epochs)


@cache
def _train_alone_with_sgd(epochs: int) -> list[Any]:
    """What most tests compare with: the same in each of them."""
    return _train_alone(sgd(), epochs)


def _train_alone(optimizer: Any, epochs: int) -> list[Any]:
    model = make_model()
    model.compile(optimizer, loss="mse")
    inputs, targets = dataset()
    model.fit(inputs, targets, batch_size=BATCH * SIZE, epochs=epochs, shuffle=False, verbose=0)
    return model.get_weights()


def train_together(model: Any, callbacks: Any = (), epochs: int = 2) -> Any:
    inputs, targets = (mine(array) for array in dataset())
    return model.fit(
        inputs, targets, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks)
    )


def assert_same_on_all_ranks(weights: list[Any]) -> None:
    everybody = hvd.allgather_object([np.asarray(w).tobytes() for w in weights])
    assert all(other == everybody[0] for other in everybody), "ranks differ"


def assert_close(weights: list[Any], expected: list[Any], tolerance: float = 1e-5) -> None:
    for found, wanted in zip(weights, expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)
