"""Weights of Keras' models that differ between ranks, and plain optimizers, are reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import polyhvd.keras as hvd
import polyhvd.tensorflow as tensorflow_hvd
import pytest
import tensorflow as tf
from drift_reports import drift_reports
from keras_common import RANK
from tensorflow_common import raises

WARN = {"POLYHVD_CHECK_DRIFT": "warn"}
pytestmark = pytest.mark.ranks(2, framework="tensorflow", timeout_s=400, env=WARN)
LABEL = "DistributedOptimizer: "


def make_model(seed: int | None = None, *, built: bool = True) -> Any:
    keras.utils.set_random_seed(RANK if seed is None else seed)
    layers = [keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((5,)), *layers] if built else layers)


def compiled(model: Any, optimizer: Any = None, **arguments: Any) -> Any:
    model.compile(optimizer or hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse", **arguments)
    return model


def reports_of_fit(model: Any, *callbacks: Any, epochs: int = 2) -> list[str]:
    """Those of all ranks."""
    x = np.random.default_rng(RANK).normal(size=(16, 5)).astype(np.float32)
    with drift_reports() as reports:
        model.fit(x, x[:, :1], batch_size=4, epochs=epochs, verbose=0, callbacks=list(callbacks))
    return [report for some in hvd.allgather_object(reports) for report in some]


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graph"])
@pytest.mark.parametrize("passes", [1, 2])
def test_one_report_names_the_first_weight_and_the_ranks(eager: bool, passes: int) -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), backward_passes_per_step=passes)
    model = compiled(make_model(), optimizer, run_eagerly=eager)
    (report,) = reports_of_fit(model)
    assert f"{LABEL}2 of 6 weights differ between ranks, the first is '{model.weights[0].path}'" in report
    assert (
        "rank 1 has other values than rank 0; pass hvd.callbacks.BroadcastGlobalVariablesCallback(0)"
        in report
    )


@pytest.mark.parametrize("built", [True, False], ids=["before the first step", "after it"])
def test_weights_that_the_callback_has_broadcast_are_not_reported(built: bool) -> None:
    model = compiled(make_model(built=built))
    callbacks = hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()
    assert reports_of_fit(model, *callbacks) == []


def test_layers_that_ranks_keep_for_themselves_are_not_reported() -> None:
    model = make_model()
    first = model.layers[0]
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.05), local_layers=[first])
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=first.weights)
    assert reports_of_fit(compiled(model, optimizer), broadcast, hvd.callbacks.MetricAverageCallback()) == []


def test_a_plain_optimizer_is_reported_when_training_begins(tmp_path: Path) -> None:
    path = str(tmp_path / f"model{RANK}.keras")
    compiled(make_model(1)).save(path)
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback
    (report,) = reports_of_fit(keras.models.load_model(path), broadcast(0))
    assert "BroadcastGlobalVariablesCallback: the optimizer is not distributed" in report
    assert "load it with hvd.load_model(), not keras.models.load_model()" in report
    assert reports_of_fit(hvd.load_model(path), broadcast(0), hvd.callbacks.MetricAverageCallback()) == []


def test_a_plain_optimizer_with_averaged_metrics_is_reported_once() -> None:
    (report,) = reports_of_fit(
        compiled(make_model(1), keras.optimizers.SGD(0.05)), hvd.callbacks.MetricAverageCallback(), epochs=3
    )
    assert "MetricAverageCallback: at the end of epoch 1 6 of 6 weights differ" in report
    assert "the optimizer is not distributed" in report


def test_a_train_step_of_the_users_own_may_have_a_plain_optimizer() -> None:
    class Own(keras.Sequential):
        def train_step(self, data: Any) -> dict[str, Any]:
            return {"loss": tf.reduce_mean(self(data[0]))}

    model = compiled(Own([keras.Input((5,)), keras.layers.Dense(1)]), keras.optimizers.SGD(0.05))
    callbacks = hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()
    assert reports_of_fit(model, *callbacks) == []


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graph"])
def test_learning_rates_that_differ_are_reported_with_their_values(eager: bool) -> None:
    model = make_model(1)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.125 * (1 + RANK)))
    (report,) = reports_of_fit(compiled(model, optimizer, run_eagerly=eager))
    assert f"{LABEL}the learning rate of '{model.weights[0].path}' differs" in report
    assert "between ranks: 0.125 on rank 0, 0.25 on rank 1; set the same value on every rank" in report


def test_a_schedule_is_not_reported_and_one_that_differs_later_is() -> None:
    class Follow(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate = 0.125 / (1 + epoch * RANK)

    average = hvd.callbacks.MetricAverageCallback
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(schedule))
    assert reports_of_fit(compiled(make_model(1), optimizer), average()) == []
    (report,) = reports_of_fit(compiled(make_model(1)), Follow(), average())
    assert "MetricAverageCallback: at the end of epoch 2 the learning rate of" in report
    assert "0.125 on rank 0, 0.0625 on rank 1; set the same" in report


def test_two_optimizers_of_one_graph_report_their_weights() -> None:
    variables = [tf.Variable([float(RANK)], name=name) for name in "ab"]
    optimizers = [hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)) for _ in variables]

    @tf.function
    def step() -> None:
        for variable, optimizer in zip(variables, optimizers, strict=True):
            optimizer.apply([tf.ones(1)], [variable])

    with drift_reports() as reports:
        for _ in range(3):
            step()
    assert len(reports) == (2 if RANK == 0 else 0)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graph"])
def test_layers_that_ranks_freeze_are_reported_by_name(eager: bool) -> None:
    def model_without(frozen: str) -> Any:
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(5, name=name, trainable=name != frozen) for name in "abc"]
        return compiled(keras.Sequential([keras.Input((5,)), *layers], name="net"), run_eagerly=eager)

    (report,) = reports_of_fit(model_without("ab"[RANK]))
    names = {name: f"'net/{name}/kernel', 'net/{name}/bias' are trained on" for name in "ab"}
    assert f"{LABEL}the ranks train different weights: {names['b']} rank 0 and not on rank 1" in report
    assert f"{names['a']} rank 1 and not on rank 0; freeze the same weights on every rank" in report
    model, data = model_without("a" if RANK else ""), np.ones((4, 5), np.float32)
    with drift_reports() as reports:
        assert "Mismatched numbers of tensors" in raises(Exception, model.fit, data, data)
    (report,) = [report for some in hvd.allgather_object(reports) for report in some]
    assert f"{names['a']} rank 0 and not on rank 1; freeze the same weights" in report


def test_the_same_variables_in_another_order_are_reported_with_a_position() -> None:
    variables = [tf.Variable([float(number)], name=name) for number, name in enumerate("abc")]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    given = variables if RANK == 0 else variables[::-1]
    with drift_reports() as reports:
        for _ in range(2):
            optimizer.apply([tf.ones(1)] * 3, given)
    (report,) = [report for some in hvd.allgather_object(reports) for report in some]
    first, *_, last = (variable.name for variable in variables)
    expected = f"in different orders: weight 0 is {first!r} on rank 0 and {last!r} on rank 1"
    assert f"{LABEL}the ranks train the same weights {expected}; build the layers" in report


@pytest.mark.ranks(2, framework="tensorflow", timeout_s=400, env={"POLYHVD_CHECK_DRIFT": "error"})
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graph"])
def test_an_error_is_raised_on_every_rank(eager: bool) -> None:
    model = compiled(make_model(), run_eagerly=eager)
    message = raises(Exception, reports_of_fit, model)
    assert "2 of 6 weights differ between ranks" in message
    assert "rank 1 has other values than rank 0" in message


def reports_of_tapes(step: Any, *, steps: int = 3) -> list[str]:
    """Those of all ranks."""
    with drift_reports() as reports:
        for number in range(steps):
            step(number)
    return [report for some in hvd.allgather_object(reports) for report in some]


def tape_step(
    variables: list[tf.Variable],
    *,
    graph: bool,
    local: tf.Variable | None = None,
    calls: int = 1,
    **options: Any,
) -> Any:
    """A step that a tape makes, which retraces for each number if it is in a graph."""

    def step(number: int) -> None:
        with tf.GradientTape(persistent=True) as tape:
            loss = sum(tf.reduce_sum(variable) for variable in variables)
        tape = tensorflow_hvd.DistributedGradientTape(tape, **options)
        if local is not None:
            tape.register_local_source(local)
        for _ in range(calls):
            for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
                variable.assign_sub(0.1 * gradient)

    return tf.function(step) if graph else step


def variables_of(value: float) -> list[tf.Variable]:
    return [tf.Variable([0.0], name="same"), tf.Variable([value], name="w")]


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("calls", [1, 2])
def test_a_tape_reports_variables_once(graph: bool, calls: int) -> None:
    (report,) = reports_of_tapes(tape_step(variables_of(float(RANK)), graph=graph, calls=calls), steps=5)
    assert "DistributedGradientTape: 1 of 2 weights differ between ranks, the first is 'w:0'" in report
    assert "rank 1 has other values than rank 0; call hvd.broadcast_variables(" in report


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_variables_that_are_broadcast_after_the_first_step_of_a_tape_are_not_reported(graph: bool) -> None:
    variables = variables_of(float(RANK))
    taped = tape_step(variables, graph=graph, calls=2)

    def step(number: int) -> None:
        taped(number)
        if number == 0:
            tensorflow_hvd.broadcast_variables(variables, root_rank=0)

    assert reports_of_tapes(step) == []


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_local_sources_of_a_tape_and_tapes_of_one_rank_are_not_reported(graph: bool) -> None:
    variables = variables_of(float(RANK))
    assert reports_of_tapes(tape_step(variables, graph=graph, local=variables[1])) == []
    alone = hvd.add_process_set([0])
    assert reports_of_tapes(tape_step(variables_of(float(RANK)), graph=graph, process_set=alone)) == []
    hvd.remove_process_set(alone)


def test_a_function_that_was_traced_without_a_tape_is_traced_again_with_one() -> None:
    variables = variables_of(float(RANK))
    step = tape_step(variables, graph=False)

    @tf.function
    def later(number: int, is_taped: bool) -> None:
        if is_taped:
            step(number)

    later(0, is_taped=False)
    (report,) = reports_of_tapes(lambda number: later(number, is_taped=True))
    assert "1 of 2 weights differ between ranks" in report


def test_gradients_by_data_are_not_reported() -> None:
    def step(number: int) -> None:
        data = tf.constant([float(RANK)])
        with tf.GradientTape() as tape:
            tape.watch(data)
            loss = tf.reduce_sum(data * data)
        tensorflow_hvd.DistributedGradientTape(tape).gradient(loss, data)

    assert reports_of_tapes(step) == []


@pytest.mark.ranks(2, framework="tensorflow", timeout_s=400, env={"POLYHVD_CHECK_DRIFT": "error"})
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_tape_raises_on_every_rank(graph: bool) -> None:
    message = raises(Exception, reports_of_tapes, tape_step(variables_of(float(RANK)), graph=graph))
    assert "1 of 2 weights differ between ranks" in message
