"""SyncBatchNormalization against BatchNormalization on the joined batch.

With Keras 3, or with Keras 2 where TF_USE_LEGACY_KERAS is set.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import polyhvd.tensorflow as hvd
import polyhvd.tensorflow.keras as hvd_keras
import pytest
import tensorflow as tf
from depth import repeats  # tests/harness, on the path by tests/conftest.py
from tensorflow_common import raises

import polyhvd

pytestmark = pytest.mark.ranks(2, framework="tensorflow", timeout_s=400, env={"TF_NUM_INTEROP_THREADS": "2"})


tf.get_logger().setLevel("ERROR")
RANK, SIZE = hvd.rank(), hvd.size()
KERAS_2 = os.environ.get("TF_USE_LEGACY_KERAS") == "1"
MODES = (lambda f: f, tf.function)
ROWS = [(3, 5), (5, 3), (0, 4), (1, 7)]  # of each rank


def joined(rows: tuple[int, ...], rest: tuple[int, ...], large: float = 0.0) -> Any:
    """The ranks' rows, one after the other; channels differ in mean and in scale."""
    numbers = np.random.default_rng([sum(rows), *rest])
    x = numbers.normal(size=(sum(rows), *rest)) * np.arange(1, rest[-1] + 1) + np.arange(rest[-1])
    return (x + large).astype(np.float32)


def own(array: Any, rows: tuple[int, ...]) -> Any:
    begin = sum(rows[:RANK])
    return array[begin : begin + rows[RANK]]


def options() -> dict[str, Any]:
    """The fused kernel of Keras 2 corrects the moving variance, which is another layer."""
    return {"fused": False} if KERAS_2 else {}


def step(layer: Any, x: Any, weight: Any, **arguments: Any) -> tuple[Any, ...]:
    """Outputs, and gradients of a weighted sum with respect to inputs, scale and offset."""
    x = tf.convert_to_tensor(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x, training=True, **arguments)
        loss = tf.reduce_sum(tf.cast(y, tf.float32) ** 2 * weight)
    return y, *tape.gradient(loss, [x, *layer.trainable_variables])


def compare(
    rows: tuple[int, ...], rest: tuple[int, ...], mode: Any, mask: Any = None, **settings: Any
) -> None:
    x = joined(rows, rest)
    weight = joined(rows, rest, 1.0)
    alone = tf.keras.layers.BatchNormalization(**settings, **options())
    together = hvd.SyncBatchNormalization(**settings)
    arguments = [{}, {}] if mask is None else [{"mask": mask}, {"mask": own(mask, rows)}]
    for _ in range(2):
        expected = step(alone, x, weight, **arguments[0])
        before = polyhvd.counters()["operations"]
        found = mode(lambda x, w, a=arguments[1], s=together: step(s, x, w, **a))(
            own(x, rows), own(weight, rows)
        )
        assert polyhvd.counters()["operations"] - before == 2  # forward, and backward
        tolerance = {"rtol": 2e-4, "atol": 2e-4}
        for i, (theirs, ours) in enumerate(zip(expected, found, strict=True)):
            if i < 2:
                np.testing.assert_allclose(ours, own(theirs.numpy(), rows), **tolerance)
            else:  # parameters: the sum over the ranks
                total = hvd.allreduce(ours, op=hvd.Sum)
                np.testing.assert_allclose(total, theirs, **tolerance)
        for theirs, ours in zip(alone.non_trainable_variables, together.non_trainable_variables, strict=True):
            np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-4, atol=1e-5)
    everybody = hvd.allgather_object([v.numpy().tobytes() for v in together.non_trainable_variables])
    assert all(other == everybody[0] for other in everybody)
    inference = joined((2, 2), rest)
    np.testing.assert_allclose(together(inference), alone(inference), rtol=1e-3, atol=1e-3)


@pytest.mark.ranks(initialized=False)
def test_it_equals_batch_normalization_on_the_joined_batch() -> None:
    layer = hvd.SyncBatchNormalization()
    assert layer(tf.ones([2, 3])).shape == (2, 3)  # inference, before init()
    assert "hvd.init()" in raises(Exception, lambda: layer(tf.ones([2, 3]), training=True))
    hvd.init()
    for rows in ROWS:
        compare(rows, (4,), MODES[0])
    # A graph records the same calls, so it has the cases whose shapes differ most.
    compare((0, 4), (4,), tf.function)
    for mode in MODES:
        compare((3, 2), (3, 5, 4), mode, axis=1)
    for mode in MODES[: repeats(1, 2)]:
        compare((2, 3), (6, 5, 3), mode)
        compare((4, 1), (4,), mode, scale=False, momentum=0.5, epsilon=1e-2)
        compare((4, 1), (4,), mode, center=False)


def test_a_mask_decides_what_counts() -> None:
    for mode in MODES:
        for rows in ((2, 3), (0, 3)):
            mask = np.random.default_rng(1).integers(0, 2, (sum(rows), 6)).astype(bool)
            mask[0, 0] = mask[-1, -1] = True
            compare(rows, (6, 4), mode, mask=mask)


def test_what_is_masked_may_be_no_number() -> None:
    x = joined((2, 2), (3, 4))
    mask = np.ones(x.shape[:2], bool)
    mask[:, 1] = False
    x[:, 1] = np.nan
    layer = hvd.SyncBatchNormalization(momentum=0.0)
    layer(own(x, (2, 2)), training=True, mask=own(mask, (2, 2)))
    np.testing.assert_allclose(layer.moving_mean.numpy(), np.nanmean(x, axis=(0, 1)), rtol=1e-5)
    np.testing.assert_allclose(layer.moving_variance.numpy(), np.nanvar(x, axis=(0, 1)), rtol=1e-5)


def test_a_large_mean_loses_no_digits() -> None:
    rows = (300, 200)
    x = joined(rows, (3,), 1e4)
    layer = hvd.SyncBatchNormalization(momentum=0.0)
    layer(own(x, rows), training=True)
    exact = x.astype(np.float64)
    np.testing.assert_allclose(layer.moving_mean.numpy(), exact.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(layer.moving_variance.numpy(), exact.var(axis=0), rtol=2e-3)
    naive = (x**2).mean(axis=0) - x.mean(axis=0) ** 2
    assert np.abs(naive / exact.var(axis=0) - 1).max() > 0.01  # which sums of squares would give


def test_half_precision_has_statistics_in_single() -> None:
    rows = (6, 4)
    for dtype in ("mixed_float16", "mixed_bfloat16"):
        x = joined(rows, (4,), 300.0).astype(np.float16)  # whose squares are no float16
        layer = hvd.SyncBatchNormalization(momentum=0.0, dtype=dtype)
        out = layer(tf.cast(own(x, rows), layer.compute_dtype), training=True)
        assert out.dtype.name == dtype.removeprefix("mixed_")
        assert tf.as_dtype(layer.moving_mean.dtype) == tf.float32
        seen = tf.cast(tf.cast(x, out.dtype), tf.float64).numpy()
        np.testing.assert_allclose(layer.moving_mean.numpy(), seen.mean(axis=0), rtol=1e-5)
        np.testing.assert_allclose(layer.moving_variance.numpy(), seen.var(axis=0), rtol=1e-3)


def test_a_frozen_layer_and_inference_are_local() -> None:
    layer = hvd.SyncBatchNormalization()
    layer.build((None, 3))
    before = polyhvd.counters()["operations"]
    layer(tf.ones([RANK + 1, 3]), training=False)
    layer.trainable = False
    layer(tf.ones([RANK + 1, 3]), training=True)
    assert polyhvd.counters()["operations"] == before
    np.testing.assert_array_equal(layer.moving_mean.numpy(), np.zeros(3))


def test_second_derivatives_are_refused() -> None:
    layer = hvd.SyncBatchNormalization()
    layer.build((None, 2))
    x = tf.constant([[1.0 + RANK, 2.0], [3.0, 5.0 + RANK]])

    def twice() -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(layer(x, training=True) ** 3)
            gradient = inner.gradient(loss, x)
        return outer.gradient(gradient, x)

    assert "first derivatives" in raises(Exception, tf.function(twice))


def test_two_layers_in_a_model_fit_as_alone() -> None:
    def train(layer: Any, optimizer: Any, x: Any, y: Any, batch: int) -> Any:
        tf.keras.utils.set_random_seed(3)
        inputs = tf.keras.Input((6, 6, 2))
        hidden = inputs
        for strides in (1, 2):
            hidden = tf.keras.layers.Conv2D(3, 3, strides=strides, use_bias=False)(hidden)
            hidden = tf.keras.layers.Activation("relu")(layer()(hidden))
        outputs = tf.keras.layers.Dense(1)(tf.keras.layers.Flatten()(hidden))
        model = tf.keras.Model(inputs, outputs)
        model.compile(optimizer, loss=tf.keras.losses.MeanSquaredError())
        model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0)
        return model

    batch, steps = 4, 3
    x = joined((batch * SIZE * steps,), (6, 6, 2))
    y = x.mean(axis=(1, 2, 3), keepdims=True)[:, 0, 0]
    mine = [a.reshape(steps, SIZE, batch, *a.shape[1:])[:, RANK].reshape(-1, *a.shape[1:]) for a in (x, y)]
    alone = train(
        lambda: tf.keras.layers.BatchNormalization(**options()),
        tf.keras.optimizers.SGD(0.05),
        x,
        y,
        batch * SIZE,
    )
    optimizer = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.05))
    together = train(hvd_keras.SyncBatchNormalization, optimizer, *mine, batch)
    for theirs, ours in zip(alone.get_weights(), together.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
    everybody = hvd.allgather_object([w.tobytes() for w in together.get_weights()])
    assert everybody[0] == everybody[1]
    with tempfile.TemporaryDirectory() as folder:
        for suffix in ("keras", "h5"):
            path = Path(folder) / f"model.{suffix}"
            together.save(path)
            loaded = tf.keras.models.load_model(path)  # the class is registered
            assert sum(isinstance(each, hvd.SyncBatchNormalization) for each in loaded.layers) == 2
            np.testing.assert_allclose(
                loaded.predict(x[:3], verbose=0), together.predict(x[:3], verbose=0), rtol=1e-6
            )


def test_a_layer_of_a_process_set_stays_in_it() -> None:
    mine = [hvd.add_process_set(hvd.ProcessSet([r])) for r in range(SIZE)][RANK]
    layer = hvd.SyncBatchNormalization(momentum=0.0, process_set=mine)
    layer(tf.fill([2, 1], float(RANK)), training=True)
    assert layer.moving_mean.numpy() == RANK
    copy = type(layer).from_config(layer.get_config())
    copy(tf.fill([2, 1], float(RANK)), training=True)
    assert copy.moving_mean.numpy() == RANK
    unknown = hvd.SyncBatchNormalization(process_set=[0, 1, 5])
    assert "add_process_set" in raises(ValueError, lambda: unknown(tf.ones([2, 1]), training=True))


def test_there_is_one_class_for_each_keras() -> None:
    assert hvd.SyncBatchNormalization is hvd_keras.SyncBatchNormalization
    assert issubclass(hvd.SyncBatchNormalization, tf.keras.layers.BatchNormalization)
    hvd.SyncBatchNormalization(fused=False)
    for option in ("fused", "renorm", "synchronized"):
        wrap = lambda o=option: hvd.SyncBatchNormalization(**{o: True})  # noqa: E731
        assert option in raises(ValueError, wrap)
