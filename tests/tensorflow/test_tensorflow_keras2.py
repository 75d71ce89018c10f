"""Training with Keras 2: of TensorFlow 2.13 to 2.15, or tf_keras."""

from __future__ import annotations

import importlib.metadata
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import polyhvd.tensorflow.keras as hvd
import pytest
import tensorflow as tf
from tensorflow_common import raises

from polyhvd.testing.stand_ins import is_installed

_HAS_KERAS_2 = is_installed("tf_keras") or (
    is_installed("keras") and importlib.metadata.version("keras").startswith("2.")
)
pytestmark = [
    pytest.mark.ranks(
        2,
        framework="tensorflow",
        timeout_s=400,
        env={"TF_NUM_INTEROP_THREADS": "2", "TF_USE_LEGACY_KERAS": "1"},
    ),
    pytest.mark.skipif(not _HAS_KERAS_2, reason="Keras 2 (tf_keras) is not installed"),
]


tf.get_logger().setLevel("ERROR")
RANK, SIZE = hvd.rank(), hvd.size()
BATCH, STEPS, FEATURES = 8, 6, 5


def dataset() -> tuple[Any, Any]:
    numbers = np.random.default_rng(3)
    inputs = numbers.normal(size=(BATCH * SIZE * STEPS, FEATURES)).astype(np.float32)
    return inputs, (inputs @ numbers.normal(size=(FEATURES, 1)) + 0.1).astype(np.float32)


def mine(array: Any) -> Any:
    return array.reshape(STEPS, SIZE, BATCH, -1)[:, RANK].reshape(STEPS * BATCH, -1)


def make_model(seed: int = 1, build: bool = True) -> Any:
    tf.keras.utils.set_random_seed(seed)
    layers = tf.keras.layers
    model = tf.keras.Sequential([layers.Dense(7, activation="tanh"), layers.Dense(1)])
    if build:
        model.build((None, FEATURES))
    return model


def optimizers() -> list[Any]:
    legacy = getattr(tf.keras.optimizers, "legacy", None)
    classes = [tf.keras.optimizers.SGD, *([legacy.SGD] if legacy else [])]
    return [lambda cls=cls, **kw: cls(0.05, momentum=0.9, **kw) for cls in classes]


def train_alone(make: Any, **arguments: Any) -> list[Any]:
    model = make_model()
    model.compile(make(**arguments), loss="mse")
    inputs, targets = dataset()
    model.fit(inputs, targets, batch_size=BATCH * SIZE, epochs=2, shuffle=False, verbose=0)
    return list(model.get_weights())


def train_together(model: Any, callbacks: Any = ()) -> Any:
    inputs, targets = (mine(array) for array in dataset())
    return model.fit(
        inputs, targets, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=list(callbacks)
    )


def assert_same_on_all_ranks(weights: list[Any]) -> None:
    everybody = hvd.allgather_object([np.asarray(w).tobytes() for w in weights])
    assert all(other == everybody[0] for other in everybody), "ranks differ"


def assert_close(weights: list[Any], expected: list[Any]) -> None:
    for found, wanted in zip(weights, expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_fit_equals_training_alone_on_the_union() -> None:
    hvd.init()
    for make in optimizers():
        for clip in ({}, {"clipnorm": 0.05}):
            model = make_model()
            model.compile(hvd.DistributedOptimizer(make(**clip)), loss="mse")
            train_together(model)
            assert_same_on_all_ranks(model.get_weights())
            assert_close(model.get_weights(), train_alone(make, **clip))


def test_passes_are_added_up() -> None:
    for make in optimizers():
        for average in (False, True):
            alone, inputs, targets = make_model(), *dataset()
            optimizer = make(clipnorm=0.05)
            for k in range(0, STEPS, 2):
                with tf.GradientTape() as tape:
                    parts = [slice(j * BATCH * SIZE, (j + 1) * BATCH * SIZE) for j in (k, k + 1)]
                    losses = [tf.reduce_mean(tf.square(alone(inputs[p]) - targets[p])) for p in parts]
                    loss = tf.add_n(losses) / (2 if average else 1)
                variables = alone.trainable_variables
                optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            model = make_model()
            wrapped = hvd.DistributedOptimizer(
                make(clipnorm=0.05), backward_passes_per_step=2, average_aggregated_gradients=average
            )
            model.compile(wrapped, loss="mse")
            before = hvd.counters()["operations"]
            x, y = (mine(array) for array in (inputs, targets))
            model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
            assert hvd.counters()["operations"] - before == STEPS // 2
            assert int(wrapped.iterations) == STEPS // 2
            assert_same_on_all_ranks(model.get_weights())
            assert_close(model.get_weights(), alone.get_weights())


def test_nothing_changes_before_the_last_pass() -> None:
    for make in optimizers():
        for mode in (lambda f: f, tf.function):
            variable, table = tf.Variable(1.0), tf.Variable(tf.zeros([3, 1]))
            optimizer = hvd.DistributedOptimizer(make(), backward_passes_per_step=2)

            def step(gradient: Any, o: Any = optimizer, v: Any = variable, t: Any = table) -> None:
                slices = tf.IndexedSlices(tf.ones([1, 1]), [RANK], tf.constant([3, 1]))
                o.apply_gradients([(gradient, v), (slices, t)])

            run = mode(step)
            run(tf.constant(1.0 + RANK))
            assert float(variable) == 1.0
            assert not table.numpy().any()
            assert int(optimizer.iterations) == 0
            run(tf.constant(1.0 + RANK))
            np.testing.assert_allclose(float(variable), 1.0 - 0.05 * 3.0, rtol=1e-6)
            np.testing.assert_allclose(table.numpy()[:, 0], [-0.05, -0.05, 0.0], rtol=1e-6)
            assert int(optimizer.iterations) == 1


def test_local_variables_keep_their_own_gradients() -> None:
    for make in optimizers():
        layer = tf.keras.layers.Dense(1, use_bias=False)
        optimizer = hvd.PartialDistributedOptimizer(make(), local_layers=layer)
        layer.build((None, 1))
        shared, local = tf.Variable(0.0), tf.Variable(0.0)
        optimizer.register_local_var(local)
        before = layer.get_weights()[0]
        gradient = tf.constant(1.0 + RANK)
        optimizer.apply_gradients([(gradient, shared), (gradient, local), ([[gradient]], layer.kernel)])
        found = [float(shared), float(local), (layer.get_weights()[0] - before).item()]
        np.testing.assert_allclose(
            found, [-0.05 * 1.5, -0.05 * (1 + RANK) / 2, -0.05 * (1 + RANK) / 2], rtol=1e-5
        )


def test_groups_train_as_alone() -> None:
    for make in optimizers():
        model = make_model()
        kernels = [v for v in model.trainable_variables if "kernel" in v.name]
        model.compile(hvd.DistributedOptimizer(make(), groups=[kernels]), loss="mse")
        before = hvd.counters()["operations"]
        train_together(model)
        assert hvd.counters()["operations"] - before == 2 * STEPS * 3  # the kernels, and each bias
        assert_close(model.get_weights(), train_alone(make))


def test_slices_are_applied_as_dense_gradients_are() -> None:
    # Every word is in every batch: the momentum of words that are not differs, by Keras.
    inputs = ((RANK + 1) * np.arange(BATCH * STEPS * FEATURES) % 9).reshape(-1, FEATURES)
    targets = np.ones((len(inputs), 1), np.float32)
    for make in optimizers():
        weights = []
        for sparse_as_dense in (True, False):
            tf.keras.utils.set_random_seed(1)
            layers = tf.keras.layers
            model = tf.keras.Sequential(
                [layers.Embedding(9, 3, input_length=FEATURES), layers.Flatten(), layers.Dense(1)]
            )
            model.build((None, FEATURES))
            model.compile(hvd.DistributedOptimizer(make(), sparse_as_dense=sparse_as_dense), loss="mse")
            model.fit(inputs, targets, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
            assert_same_on_all_ranks(model.get_weights())
            weights.append(model.get_weights())
        assert_close(*weights)


def test_callbacks_start_all_ranks_alike_and_average_metrics() -> None:
    for make in optimizers():
        for build in (True, False):
            model = make_model(1 + RANK, build)
            model.compile(hvd.DistributedOptimizer(make()), loss="mse", metrics=["mae"])
            send = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
            history = train_together(model, [send, hvd.callbacks.MetricAverageCallback()])
            assert_same_on_all_ranks(model.get_weights())
            everybody = hvd.allgather_object(history.history)
            assert everybody[0] == everybody[1]


def test_overflow_on_one_rank_is_everybodys() -> None:
    variable = tf.Variable(1.0)
    inner = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(1.0))
    scaled = tf.keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=4.0)

    @tf.function
    def step(gradient: Any) -> None:
        scaled.apply_gradients([(gradient, variable)])

    step(tf.constant(float("inf") if RANK == 1 else 4.0))
    assert float(variable) == 1.0
    assert float(scaled.loss_scale) == 2.0
    step(tf.constant(2.0 * (RANK + 1)))
    assert float(variable) == 1.0 - 3.0  # apply_gradients takes unscaled gradients here
    own = tf.Variable(1.0)
    inner = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(1.0))
    inner.build([own, variable])
    inner.register_local_var(own)
    scaled = tf.keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=4.0)
    scaled.apply_gradients(
        [(tf.constant(float("inf") if RANK == 1 else 1.0), own), (tf.constant(1.0), variable)]
    )
    assert (float(own), float(variable), float(scaled.loss_scale)) == (1.0, -2.0, 2.0)


def test_overflow_in_one_pass_of_one_rank_is_everybodys() -> None:
    variable = tf.Variable(1.0)
    inner = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    scaled = tf.keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=4.0)
    step = tf.function(lambda gradient: scaled.apply_gradients([(gradient, variable)]))
    step(tf.constant(float("inf") if RANK == 1 else 4.0))
    step(tf.constant(1.0))
    assert float(variable) == 1.0
    assert float(scaled.loss_scale) == 2.0
    step(tf.constant(1.0))
    assert float(variable) == 1.0
    step(tf.constant(1.0 + RANK))
    assert float(variable) == 1.0 - 2.5


def test_a_saved_model_keeps_the_optimizers_state() -> None:
    model = make_model()
    model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.05, momentum=0.9)), loss="mse")
    train_together(model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.h5"
        model.save(path)
        plain = tf.keras.models.load_model(path)
        again = hvd.load_model(path)
    assert type(plain.optimizer) is tf.keras.optimizers.SGD
    assert isinstance(again.optimizer, tf.keras.optimizers.SGD)
    assert int(again.optimizer.iterations) == 2 * STEPS
    train_together(again)
    assert_same_on_all_ranks(again.get_weights())


def test_xla_is_refused_with_advice() -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.05))
    model.compile(optimizer, loss="mse", jit_compile=True)
    assert "compile(jit_compile=False)" in raises(Exception, train_together, model)
