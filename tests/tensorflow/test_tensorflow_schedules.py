"""Callbacks that set the learning rate and save the best model.

With Keras 3, or with Keras 2 where TF_USE_LEGACY_KERAS is set.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import polyhvd.tensorflow.keras as hvd
import pytest
import tensorflow as tf
from tensorflow_common import raises

pytestmark = pytest.mark.ranks(2, framework="tensorflow", timeout_s=400, env={"TF_NUM_INTEROP_THREADS": "2"})


tf.get_logger().setLevel("ERROR")
RANK, SIZE = hvd.rank(), hvd.size()
KERAS_2 = os.environ.get("TF_USE_LEGACY_KERAS") == "1"
BATCH, STEPS, RATE, MOMENTUM = 4, 5, 0.04, 0.9


class Rates(tf.keras.callbacks.Callback):
    """The rate of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.seen.append(float(self.model.optimizer.learning_rate.numpy()))


def optimizers() -> list[Any]:
    made = [lambda: tf.keras.optimizers.SGD(RATE, momentum=MOMENTUM)]
    if KERAS_2:
        made.append(lambda: tf.keras.optimizers.legacy.SGD(RATE, momentum=MOMENTUM))
    return made


def fit(
    callbacks: list[Any], epochs: int, optimizer: Any = None, steps: Any = None, together: int = 1
) -> tuple[Any, Any, Any]:
    """The history, the rates and the model, which has one weight."""
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.ones((1, 1), np.float32)])
    distributed = hvd.DistributedOptimizer(optimizer or optimizers()[0]())
    model.compile(distributed, loss=mean, steps_per_execution=together)
    x = np.full((BATCH * STEPS, 1), 1.0 + RANK, np.float32)
    data: Any = (x, x)
    if steps:
        dataset = tf.data.Dataset.from_tensor_slices(data).batch(BATCH).repeat()
        data = (dataset.filter(lambda *_: True),)  # whose length nobody knows
    rates = Rates()
    history = model.fit(
        *data,
        epochs=epochs,
        batch_size=None if steps else BATCH,
        steps_per_epoch=steps if steps != "unknown" else None,
        shuffle=False,
        verbose=0,
        callbacks=[*callbacks, rates],
    )
    return history, rates.seen, model


def mean(wanted: Any, found: Any) -> Any:
    """A loss whose gradient is always the average input: 1.5 over the ranks."""
    return tf.reduce_mean(found, axis=-1)


def weight_after(rates: list[float], corrected: bool) -> float:
    """Of momentum with the rate in the velocity: Goyal et al., equations 9 and 10."""
    weight, velocity = 1.0, 0.0
    last = rates[0]
    for rate in rates:
        factor = MOMENTUM * (rate / last if corrected else 1.0)
        velocity = factor * velocity - rate * 1.5
        weight += velocity
        last = rate
    return weight


def test_warm_up_rises_to_the_rate_by_the_same_amount_in_each_batch() -> None:
    hvd.init()
    epochs, warm = 4, 3
    for make in optimizers():
        for correct in (True, False):
            warmup = hvd.callbacks.LearningRateWarmupCallback(RATE, warm, correct)
            history, rates, model = fit([warmup], epochs, make())
            rising = [RATE / SIZE * ((k + 1) / STEPS * (SIZE - 1) / warm + 1) for k in range(STEPS * warm)]
            np.testing.assert_allclose(rates, rising + [RATE] * STEPS, rtol=1e-6)
            assert RATE / SIZE < rates[0] < 1.1 * RATE / SIZE
            np.testing.assert_allclose(rates[STEPS * warm - 1], RATE, rtol=1e-6)
            np.testing.assert_allclose(history.history["lr"], rates[STEPS - 1 :: STEPS], rtol=1e-6)
            found = model.get_weights()[0].item()
            np.testing.assert_allclose(found, weight_after(rates, correct), rtol=1e-5)
            assert abs(found - weight_after(rates, not correct)) > 1e-3


def test_warm_up_ends_with_the_rate_where_steps_run_together_or_are_more_than_expected() -> None:
    warmup = hvd.callbacks.LearningRateWarmupCallback(RATE, 2)
    history, rates, model = fit([warmup], 4, together=STEPS)
    rising = [RATE / SIZE * ((epoch + 1 / STEPS) * (SIZE - 1) / 2 + 1) for epoch in range(2)]
    np.testing.assert_allclose(rates, [*rising, RATE, RATE], rtol=1e-6)
    np.testing.assert_allclose(history.history["lr"], rates, rtol=1e-6)
    each = np.repeat(rates, STEPS).tolist()
    np.testing.assert_allclose(model.get_weights()[0].item(), weight_after(each, True), rtol=1e-5)
    warmup = hvd.callbacks.LearningRateWarmupCallback(RATE, 1.5, steps_per_epoch=STEPS - 1)
    _, rates, _ = fit([warmup], 3)
    assert max(rates) < RATE * (1 + 1e-6)
    np.testing.assert_allclose(rates[-1], RATE, rtol=1e-6)


def test_a_number_holds_between_its_epochs() -> None:
    first = hvd.callbacks.LearningRateScheduleCallback(RATE, 0.5, start_epoch=1, end_epoch=2)
    second = hvd.callbacks.LearningRateScheduleCallback(RATE, 0.1, start_epoch=3)
    _, rates, model = fit([first, second], 5)
    wanted = np.repeat([RATE, RATE * 0.5, RATE * 0.5, RATE * 0.1, RATE * 0.1], STEPS)
    np.testing.assert_allclose(rates, wanted, rtol=1e-6)
    np.testing.assert_allclose(model.get_weights()[0].item(), weight_after(rates, True), rtol=1e-5)


def test_a_function_gets_whole_epochs_or_parts_of_them() -> None:
    for staircase in (True, False):
        epochs: list[float] = []

        def halve(epoch: float, to: list[float] = epochs) -> float:
            to.append(epoch)
            return 0.5**epoch

        schedule = hvd.callbacks.LearningRateScheduleCallback(RATE, halve, staircase=staircase)
        _, rates, _ = fit([schedule], 3)
        wanted = [0, 1, 2] if staircase else (np.arange(3 * STEPS) / STEPS).tolist()
        np.testing.assert_allclose(epochs, wanted, rtol=1e-6)
        each = np.repeat(wanted, STEPS if staircase else 1)
        np.testing.assert_allclose(rates, RATE * 0.5**each, rtol=1e-6)


def test_steps_per_epoch_is_found_or_asked_for() -> None:
    _, rates, _ = fit([hvd.callbacks.LearningRateWarmupCallback(RATE, 2)], 1, steps=2)
    np.testing.assert_allclose(rates, [RATE / SIZE * (1 + (k + 1) / 4) for k in range(2)], rtol=1e-6)
    warmup = hvd.callbacks.LearningRateWarmupCallback(RATE, 1, steps_per_epoch=4)
    _, rates, _ = fit([warmup], 1, steps=2)
    np.testing.assert_allclose(rates, [RATE / SIZE * (1 + (k + 1) / 4) for k in range(2)], rtol=1e-6)
    callback = hvd.callbacks.LearningRateWarmupCallback(RATE, 1)
    callback.set_params({"steps": None})
    assert "steps_per_epoch" in raises(ValueError, callback.on_train_begin)
    assert "initial_lr" in raises(ValueError, lambda: hvd.callbacks.LearningRateWarmupCallback(None))


def test_the_end_of_the_warm_up_is_told() -> None:
    for verbose in (0, 1):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            fit([hvd.callbacks.LearningRateWarmupCallback(RATE, 2, verbose=verbose)], 3)
        assert (
            f"Epoch 2: finished gradual learning rate warmup to {RATE:g}" in printed.getvalue()
        ) == verbose


def test_optimizers_without_the_rate_in_their_state_are_left_alone() -> None:
    for make in (lambda: tf.keras.optimizers.Adam(RATE), lambda: tf.keras.optimizers.SGD(RATE)):
        weights = []
        for correct in (True, False):
            halve = hvd.callbacks.LearningRateScheduleCallback(
                RATE, lambda epoch: 0.5**epoch, momentum_correction=correct
            )
            weights.append(fit([halve], 3, make())[2].get_weights()[0].item())
        assert weights[0] == weights[1]


def test_the_rate_of_a_scaled_optimizer_is_set() -> None:
    loss_scale = getattr(tf.keras, "mixed_precision", tf.keras.optimizers).LossScaleOptimizer
    inner = tf.keras.optimizers.SGD(RATE, momentum=MOMENTUM)
    warmup = hvd.callbacks.LearningRateWarmupCallback(RATE, 2)
    _, rates, model = fit([warmup], 2, loss_scale(inner, initial_scale=4.0))
    np.testing.assert_allclose(rates[-1], RATE, rtol=1e-6)
    np.testing.assert_allclose(model.get_weights()[0].item(), weight_after(rates, True), rtol=1e-4)


def test_the_best_model_is_saved_by_rank_0() -> None:
    class Metric(tf.keras.callbacks.Callback):
        """A metric that is best in the second epoch, and the weights of that epoch."""

        def __init__(self) -> None:
            super().__init__()
            self.weights: list[Any] = []

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["val_loss"] = [3.0, 1.0, 2.0][epoch] + RANK
            self.weights.append(self.model.get_weights()[0])

    with tempfile.TemporaryDirectory() as folder:
        metric, best = Metric(), hvd.callbacks.BestModelCheckpoint()
        best.filepath = str(Path(folder) / "best.keras")
        fit([metric, hvd.callbacks.MetricAverageCallback(), best], 3)
        hvd.barrier()
        assert os.listdir(folder) == (["best.keras"] if RANK == 0 else [])
        assert best.best == 1.5, "on every rank, which may become rank 0"
        if RANK == 0:
            loaded = tf.keras.models.load_model(best.filepath, compile=False)
            np.testing.assert_array_equal(loaded.get_weights()[0], metric.weights[1])
            assert not np.array_equal(metric.weights[1], metric.weights[2])
