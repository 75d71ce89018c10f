"""Real models against one process on the joined batch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import polyhvd.keras as hvd
import polyhvd.tensorflow as hvd_tf
import pytest
import tensorflow as tf
from keras_common import RANK, SIZE, assert_close, assert_same_on_all_ranks, value

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ranks(2, framework="tensorflow", timeout_s=400, env={"TF_NUM_INTEROP_THREADS": "2"}),
]


BATCH, STEPS, WORDS, LENGTH = 4, 10, 5000, 12
layers = keras.layers

Data = tuple[Any, Any]


def images() -> Data:
    numbers = np.random.default_rng(1)
    x = numbers.normal(size=(BATCH * SIZE * STEPS, 12, 12, 3)).astype(np.float32)
    return x, numbers.integers(0, 5, len(x))


def sentences() -> Data:
    numbers = np.random.default_rng(2)
    x = np.minimum(numbers.zipf(1.3, (BATCH * SIZE * STEPS, LENGTH)), WORDS - 1)
    return x, numbers.integers(0, 5, len(x))


def mine(data: Data) -> Data:
    """This rank's share of every batch of the union."""
    x, y = (a.reshape(STEPS, SIZE, BATCH, *a.shape[1:])[:, RANK] for a in data)
    return x.reshape(-1, *x.shape[2:]), y.reshape(-1)


def residual(x: Any, filters: int, strides: int, norm: Callable[[], Any]) -> Any:
    short = x
    if strides > 1:
        short = norm()(layers.Conv2D(filters, 1, strides=strides, use_bias=False)(x))
    x = layers.Conv2D(filters, 3, strides=strides, padding="same", use_bias=False)(x)
    x = layers.ReLU()(norm()(x))
    x = norm()(layers.Conv2D(filters, 3, padding="same", use_bias=False)(x))
    return layers.ReLU()(layers.Add()([x, short]))


def resnet(norm: Callable[[], Any]) -> Any:
    inputs = keras.Input((12, 12, 3))
    x = layers.ReLU()(norm()(layers.Conv2D(8, 3, padding="same", use_bias=False)(inputs)))
    for filters, strides in ((8, 1), (16, 2), (24, 2)):
        x = residual(x, filters, strides, norm)
    return keras.Model(inputs, layers.Dense(5)(layers.GlobalAveragePooling2D()(x)))


class Transformer(keras.Model):
    """One block of attention, over a table of words that is larger than all the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.words = layers.Embedding(WORDS, 16)
        self.places = layers.Embedding(LENGTH, 16)
        self.attention = layers.MultiHeadAttention(2, 8)
        self.norms = [layers.LayerNormalization() for _ in range(2)]
        self.wide, self.narrow = layers.Dense(32, activation="gelu"), layers.Dense(16)
        self.head = layers.Dense(5)

    def call(self, inputs: Any) -> Any:
        x = self.words(inputs) + self.places(keras.ops.arange(LENGTH))
        x = self.norms[0](x + self.attention(x, x))
        x = self.norms[1](x + self.narrow(self.wide(x)))
        return self.head(keras.ops.mean(x, axis=1))


def lstm(_: Any = None) -> Any:
    return keras.Sequential(
        [keras.Input((LENGTH,), dtype="int32"), layers.Embedding(WORDS, 8), layers.LSTM(8), layers.Dense(5)]
    )


class OwnStep(keras.Model):
    """An MLP whose step is its own: the optimizer sees the gradients as Keras's own step does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = layers.Dense(16, activation="relu"), layers.Dense(5)

    def call(self, inputs: Any) -> Any:
        return self.last(self.first(keras.ops.reshape(inputs, (-1, 12 * 12 * 3))))

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def loss() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


Make = Callable[[], Any]


def build(make: Make, data: Data) -> Any:
    keras.utils.set_random_seed(4)
    model = make()
    model(data[0][:1])
    return model


def fit(make: Make, optimizer: Any, data: Data, batch: int, callbacks: Any = ()) -> Any:
    model = build(make, data)
    model.compile(optimizer, loss())
    model.fit(*data, batch_size=batch, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


def expect_equal(make: Make, alone: Make, data: Data, optimizer: Make) -> None:
    """Train both ways."""
    expected = fit(alone, optimizer(), data, BATCH * SIZE)
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    wrapped = hvd.DistributedOptimizer(optimizer())
    found = fit(make, wrapped, mine(data), BATCH, [start])
    assert value(found.optimizer.iterations) == STEPS
    assert_same_on_all_ranks([*found.get_weights(), *(np.asarray(v) for v in wrapped.variables)])
    assert_close(found.get_weights(), expected.get_weights(), 1e-3)
    before = build(make, data).get_weights()[0]
    assert not np.allclose(found.get_weights()[0], before, atol=1e-3), "it has not trained"


def sgd() -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def test_a_resnet_with_synchronised_normalization() -> None:
    hvd.init()
    expect_equal(
        lambda: resnet(hvd.SyncBatchNormalization), lambda: resnet(layers.BatchNormalization), images(), sgd
    )


def test_a_transformer_with_a_large_sparse_embedding() -> None:
    expect_equal(Transformer, Transformer, sentences(), sgd)


def test_an_lstm_with_a_large_sparse_embedding() -> None:
    expect_equal(lstm, lstm, sentences(), lambda: keras.optimizers.Adagrad(0.05))


def test_an_mlp_with_a_step_of_its_own() -> None:
    expect_equal(OwnStep, OwnStep, images(), sgd)
    accumulating = keras.optimizers.SGD(0.05, gradient_accumulation_steps=2)
    alone = fit(OwnStep, accumulating, images(), BATCH * SIZE)
    wrapped = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.05), backward_passes_per_step=2, average_aggregated_gradients=True
    )
    together = fit(OwnStep, wrapped, mine(images()), BATCH)
    assert_same_on_all_ranks(together.get_weights())
    assert_close(together.get_weights(), alone.get_weights(), 1e-4)


def test_a_resnet_in_a_loop_with_a_tape() -> None:
    def train(norm: Any, data: Data, batch: int, wrap: Callable[[Any], Any]) -> Any:
        keras.utils.set_random_seed(4)
        model, optimizer, criterion = resnet(norm), sgd(), loss()
        optimizer.build(model.trainable_variables)

        @tf.function
        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                error = criterion(y, model(x, training=True))
            gradients = wrap(tape).gradient(error, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        for k in range(STEPS):
            step(*(tf.constant(a[k * batch : (k + 1) * batch]) for a in data))
        return model.get_weights()

    together = train(hvd.SyncBatchNormalization, mine(images()), BATCH, hvd_tf.DistributedGradientTape)
    assert_same_on_all_ranks(together)
    assert_close(together, train(layers.BatchNormalization, images(), BATCH * SIZE, lambda t: t), 1e-3)


def test_a_model_that_is_saved_goes_on_where_it_was() -> None:
    data = images()
    whole = np.concatenate([data[0]] * 2), np.concatenate([data[1]] * 2)
    optimizers: tuple[Make, ...] = (lambda: keras.optimizers.Adam(0.01), sgd)

    def small() -> Any:
        return keras.Sequential([keras.Input((12, 12, 3)), layers.Flatten(), layers.Dense(5)])

    for make in optimizers:
        alone = fit(small, make(), whole, BATCH * SIZE)
        together = fit(small, hvd.DistributedOptimizer(make()), mine(data), BATCH)
        with tempfile.TemporaryDirectory() as folder:
            together.save(Path(folder) / "model.keras")
            again = hvd.load_model(Path(folder) / "model.keras")
            together.save(Path(folder) / "model.h5")  # last: in Keras 3 it spoils what is saved after it
            legacy = hvd.load_model(Path(folder) / "model.h5")  # from which Keras 3 cannot train on
        for loaded in (legacy, again):
            assert type(loaded.optimizer) is not type(make())
            assert isinstance(loaded.optimizer, type(make()))
            assert value(loaded.optimizer.iterations) == STEPS
            assert_close(loaded.get_weights(), together.get_weights(), 0.0)
        again.fit(*mine(data), batch_size=BATCH, shuffle=False, verbose=0)
        assert_same_on_all_ranks(again.get_weights())
        assert_close(again.get_weights(), alone.get_weights(), 1e-3)
