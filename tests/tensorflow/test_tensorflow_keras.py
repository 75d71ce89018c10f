"""Training with Keras and with tapes."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import polyhvd.keras as hvd
import polyhvd.tensorflow as hvd_tf
import polyhvd.tensorflow.keras as hvd_tf_keras
import pytest
import tensorflow as tf
from depth import repeats  # tests/harness, on the path by tests/conftest.py
from drift_reports import drift_reports
from keras_common import (
    BATCH,
    FEATURES,
    RANK,
    SIZE,
    STEPS,
    assert_close,
    assert_same_on_all_ranks,
    dataset,
    make_model,
    mine,
    sgd,
    train_alone,
    train_together,
    value,
)
from tensorflow_common import raises

import polyhvd
from polyhvd.training.passes import passes_held

pytestmark = pytest.mark.ranks(2, framework="tensorflow", timeout_s=400, env={"TF_NUM_INTEROP_THREADS": "2"})


def test_fit_equals_training_alone_on_the_union() -> None:
    hvd.init()
    model = make_model()
    model.compile(hvd.DistributedOptimizer(sgd()), loss="mse")
    before = polyhvd.counters()["operations"]
    train_together(model)
    # All gradients of a step are one operation.
    assert polyhvd.counters()["operations"] - before == 2 * STEPS
    assert_same_on_all_ranks(model.get_weights())
    assert_close(model.get_weights(), train_alone())


def test_training_without_the_wrapper_differs() -> None:
    model = make_model()
    model.compile(sgd(), loss="mse")
    train_together(model)
    everybody = hvd.allgather_object(model.get_weights()[0].tobytes())
    assert everybody[0] != everybody[1]


def test_clipping_comes_after_averaging() -> None:
    clips = ({"global_clipnorm": 0.05}, {"clipnorm": 0.05}, {"clipvalue": 0.01})
    for clip in clips[: repeats(1, len(clips))]:
        model = make_model()
        model.compile(hvd.DistributedOptimizer(sgd(**clip)), loss="mse")
        train_together(model)
        assert_same_on_all_ranks(model.get_weights())
        assert_close(model.get_weights(), train_alone(sgd(**clip)))


def test_other_optimizers_and_arguments_average_too() -> None:
    for optimizer, arguments in (
        (
            keras.optimizers.Adam(0.01),
            {"gradient_predivide_factor": 2.0, "process_set": hvd.global_process_set},
        ),
        (keras.optimizers.AdamW(0.01), {"name": "mine"}),
    ):
        alone = train_alone(type(optimizer).from_config(optimizer.get_config()))
        model = make_model()
        model.compile(hvd.DistributedOptimizer(optimizer, **arguments), loss="mse")
        train_together(model)
        assert_same_on_all_ranks(model.get_weights())
        assert_close(model.get_weights(), alone, 2e-4)


def test_fp16_compression_trains() -> None:
    model = make_model()
    model.compile(hvd.DistributedOptimizer(sgd(), compression=hvd.Compression.fp16), loss="mse")
    train_together(model)
    assert_same_on_all_ranks(model.get_weights())
    assert_close(model.get_weights(), train_alone(), 1e-2)


def test_a_custom_loop_with_a_tape_equals_training_alone() -> None:
    def train(distributed: bool, in_graph: bool) -> list[Any]:
        model, optimizer = make_model(), sgd()
        inputs, targets = (mine(a) for a in dataset()) if distributed else dataset()
        batch = BATCH if distributed else BATCH * SIZE

        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
            if distributed:
                tape = hvd_tf.DistributedGradientTape(tape)
                assert isinstance(tape, tf.GradientTape)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        optimizer.build(model.trainable_variables)
        run = tf.function(step) if in_graph else step
        for k in range(STEPS):
            run(
                tf.constant(inputs[k * batch : (k + 1) * batch]),
                tf.constant(targets[k * batch : (k + 1) * batch]),
            )
        return model.get_weights()

    alone = train(False, True)
    for in_graph in (False, True):
        together = train(True, in_graph)
        assert_same_on_all_ranks(together)
        assert_close(together, alone)


def test_a_tape_that_wraps_another_records() -> None:
    variable, local, unused = tf.Variable(2.0), tf.Variable(3.0), tf.Variable(1.0)
    with hvd_tf.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        loss = variable * local * (RANK + 1.0)
    tape.register_local_source(local)
    gradients = tape.gradient(loss, {"v": variable, "l": local, "u": unused})
    assert float(gradients["v"]) == 3.0 * 1.5
    assert float(gradients["l"]) == 2.0 * (RANK + 1.0) / SIZE
    assert gradients["u"] is None
    with hvd_tf.DistributedGradientTape(tf.GradientTape(), op=hvd_tf.Sum) as tape:
        loss = variable * (RANK + 1.0)
    assert float(tape.gradient(loss, variable)) == 3.0


def test_sparse_gradients_are_dense_on_request_and_have_each_index_once_otherwise() -> None:
    table = tf.Variable(tf.ones([4, 2]))
    expected = np.array([[0.5, 0.5], [0.5, 0.5], [1.0, 1.0], [0.0, 0.0]])

    def gradient(sparse_as_dense: bool) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [RANK, 2]))
        tape = hvd_tf.DistributedGradientTape(tape, sparse_as_dense=sparse_as_dense)
        return tape.gradient(loss, table)

    for mode in (lambda f: f, tf.function):
        np.testing.assert_array_equal(mode(gradient)(True).numpy(), expected)
        slices = mode(gradient)(False)
        assert isinstance(slices, tf.IndexedSlices)
        assert sorted(slices.indices.numpy()) == [0, 1, 2]
        np.testing.assert_array_equal(tf.convert_to_tensor(slices).numpy(), expected)


def vocabulary_model() -> Any:
    keras.utils.set_random_seed(1)
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((FEATURES,)), layers.Embedding(50, 4), layers.Flatten(), layers.Dense(1)]
    )


def words() -> tuple[Any, Any]:
    numbers = np.random.default_rng(5)
    inputs = numbers.integers(0, 50, (BATCH * SIZE * STEPS, FEATURES))
    inputs[:, 0] = 7  # in every row of every rank
    return inputs, numbers.normal(size=(len(inputs), 1)).astype(np.float32)


def test_embeddings_train_as_alone() -> None:
    inputs, targets = words()

    def fit(optimizer: Any, x: Any, y: Any, batch: int) -> list[Any]:
        model = vocabulary_model()
        model.compile(optimizer, loss="mse")
        model.fit(x, y, batch_size=batch, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    makers = (lambda: sgd(global_clipnorm=0.1), sgd, lambda: keras.optimizers.Adam(0.05))
    for make in makers[: repeats(1, len(makers))]:
        dense = hvd.DistributedOptimizer(make(), sparse_as_dense=True)
        expected = fit(dense, mine(inputs), mine(targets), BATCH)
        before = polyhvd.counters()["operations"]
        found = fit(hvd.DistributedOptimizer(make()), mine(inputs), mine(targets), BATCH)
        assert polyhvd.counters()["operations"] - before == 2 * STEPS * 2  # the dense ones, and the slices
        assert_same_on_all_ranks(found)
        assert_close(found, expected, 1e-4)
    together = fit(hvd.DistributedOptimizer(sgd()), mine(inputs), mine(targets), BATCH)
    assert_close(together, fit(sgd(), inputs, targets, BATCH * SIZE))


def test_groups_are_operations_and_train_as_alone() -> None:
    alone = train_alone()
    kernels = [0, 2]
    cases: list[tuple[Any, int]] = [
        (lambda v: {"groups": [[v[i] for i in kernels]]}, 3),  # and each bias by itself
        (lambda _: {"groups": 2}, 2),
        (lambda _: {"num_groups": 3}, 3),
        (lambda _: {"groups": 9}, 4),  # more than there are variables
        (lambda v: {"groups": [v[2:], v[:2]]}, 2),
    ]
    for arguments, count in cases[: repeats(3, len(cases))]:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(), **arguments(model.trainable_variables))
        model.compile(optimizer, loss="mse")
        before = polyhvd.counters()["operations"]
        train_together(model)
        assert polyhvd.counters()["operations"] - before == 2 * STEPS * count
        assert_same_on_all_ranks(model.get_weights())
        assert_close(model.get_weights(), alone)


def test_groups_of_a_tape_may_have_several_dtypes() -> None:
    wide = [tf.Variable(tf.ones([2], d)) for d in (tf.float64, tf.float32, tf.float16)]
    for arguments, count in (({}, 1), ({"groups": [wide[:2]]}, 2), ({"num_groups": 3}, 3)):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(tf.cast(v, tf.float32)) for v in wide]) * (RANK + 1.0)
        before = polyhvd.counters()["operations"]
        gradients = hvd_tf.DistributedGradientTape(tape, **arguments).gradient(loss, wide)
        assert polyhvd.counters()["operations"] - before == count
        for gradient, variable in zip(gradients, wide, strict=True):
            assert gradient.dtype == variable.dtype
            np.testing.assert_array_equal(gradient.numpy(), [1.5, 1.5])


def test_a_group_is_all_or_none() -> None:
    variables = [tf.Variable(1.0), tf.Variable([1.0, 2.0] if RANK == 0 else [1.0])]
    with tf.GradientTape() as tape:
        loss = variables[0] * 2.0 + tf.reduce_sum(variables[1])
    tape = hvd_tf.DistributedGradientTape(tape, groups=[variables])
    assert "Mismatched" in raises(tf.errors.FailedPreconditionError, tape.gradient, loss, variables)


def test_groups_are_checked() -> None:
    variable, other = tf.Variable(1.0), tf.Variable(2.0)
    bad: list[Any] = [
        -1,
        True,
        "all",
        1.5,
        [variable],
        [[variable], [variable]],
        [[variable, other, variable]],
    ]
    for groups in bad:
        assert "groups" in raises(ValueError, lambda g=groups: hvd.DistributedOptimizer(sgd(), groups=g))
        tape = lambda g=groups: hvd_tf.DistributedGradientTape(tf.GradientTape(), groups=g)  # noqa: E731
        assert "groups" in raises(tf.errors.InvalidArgumentError, tape)
    assert "num_groups" in raises(ValueError, lambda: hvd.DistributedOptimizer(sgd(), num_groups=-2))
    both = lambda: hvd.DistributedOptimizer(sgd(), num_groups=2, groups=2)  # noqa: E731
    assert "exclude" in raises(ValueError, both)


def test_groups_may_list_what_a_step_does_not_have() -> None:
    variable, other = tf.Variable(1.0), tf.Variable(2.0)
    for groups in (0, [[other], [variable]], [[variable, other]]):
        with tf.GradientTape() as tape:
            loss = variable * (RANK + 1.0)
        tape = hvd_tf.DistributedGradientTape(tape, groups=groups)
        assert float(tape.gradient(loss, variable)) == 1.5


@pytest.mark.parametrize("kind", ["dense", "slices", "one slice"])
def test_gradients_of_other_variables_are_an_error_with_their_names(kind: str) -> None:
    sources = [tf.Variable(tf.ones([4, 2]), name=name) for name in ("shared", "first", "second")]
    used = [1 + RANK] if kind == "one slice" else [0, 1 + RANK]
    differences = "'first:0' is on rank 0 and not on rank 1; 'second:0' is on rank 1 and not on rank 0"

    def gradients() -> Any:
        with tf.GradientTape() as tape:
            parts = [sources[i] if kind == "dense" else tf.gather(sources[i], [0]) for i in used]
            loss = tf.add_n([tf.reduce_sum(part) for part in parts])
        return hvd_tf.DistributedGradientTape(tape).gradient(loss, sources)

    assert differences in raises(tf.errors.FailedPreconditionError, gradients)
    assert "Mismatched" in raises(tf.errors.FailedPreconditionError, tf.function(gradients))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build(sources)
    given = [tf.ones([4, 2]) if i in used else None for i in range(len(sources))]
    assert differences in raises(tf.errors.FailedPreconditionError, optimizer.apply, given, sources)
    optimizer.apply([tf.ones([4, 2]), None, tf.fill([4, 2], 1.0 + RANK)], sources)
    assert [float(source[0, 0]) for source in sources] == [0.0, 1.0, -0.5]
    # Programs leave out variables without a gradient.
    some = [
        (gradient, source) for gradient, source in zip(given, sources, strict=True) if gradient is not None
    ]
    assert differences in raises(tf.errors.FailedPreconditionError, optimizer.apply_gradients, some)
    optimizer.apply_gradients([(tf.fill([4, 2], 1.0 + RANK), sources[2])])
    assert [float(source[0, 0]) for source in sources] == [0.0, 1.0, -2.0]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("arguments", ["groups", "num_groups"])
def test_groups_of_other_variables_are_an_error(arguments: str, compiled: bool) -> None:
    sources = [tf.Variable(tf.ones([4, 2])) for _ in range(3)]
    given: dict[str, Any] = {"groups": {"groups": [sources[1:]]}, "num_groups": {"num_groups": 3}}[arguments]

    def gradients(used: Sequence[int]) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(sources[i]) for i in used])
        return hvd_tf.DistributedGradientTape(tape, **given).gradient(loss, sources)

    for used in ([0, 1 + RANK], [0, 1, 2][: 2 + RANK], [RANK, 2]):
        step = (tf.function if compiled else lambda function: function)(lambda used=used: gradients(used))
        expected = "Mismatched" if compiled else "gradients of different variables"
        assert expected in raises(tf.errors.FailedPreconditionError, step)
    assert float(gradients([0, 1])[1][0, 0]) == 1.0


@pytest.mark.parametrize("compiled", [False, True])
def test_slices_that_only_one_rank_has_are_an_error(compiled: bool) -> None:
    shared, table = (tf.Variable(tf.ones([4, 2]), name=name) for name in ("shared", "table"))

    def gradients() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(shared)
            if RANK == 0:
                loss += tf.reduce_sum(tf.gather(table, [0]))
        return hvd_tf.DistributedGradientTape(tape).gradient(loss, [shared, table])

    message = raises(tf.errors.FailedPreconditionError, tf.function(gradients) if compiled else gradients)
    assert ("Mismatched" if compiled else "'table:0' is on rank 0 and not on rank 1") in message


def test_gradients_may_be_added_adaptively() -> None:
    variable = tf.Variable([0.0, 0.0])
    with tf.GradientTape() as tape:
        loss = variable[RANK] * 3.0
    gradient = hvd_tf.DistributedGradientTape(tape, op=hvd_tf.Adasum).gradient(loss, variable)
    np.testing.assert_array_equal(tf.convert_to_tensor(gradient).numpy(), [3.0, 3.0])  # orthogonal: their sum


def test_a_wrapped_optimizer_is_of_its_own_class() -> None:
    plain = sgd(nesterov=True)
    wrapped = hvd.DistributedOptimizer(plain)
    assert isinstance(wrapped, keras.optimizers.SGD)
    assert isinstance(wrapped, keras.optimizers.Optimizer)
    assert wrapped.get_config() == plain.get_config()
    copy = type(wrapped).from_config(wrapped.get_config())
    assert copy.get_config() == plain.get_config()
    assert value(wrapped.learning_rate) == value(plain.learning_rate)
    wrapped.learning_rate = 0.5
    assert value(plain.learning_rate) == 0.5
    raises(ValueError, hvd.DistributedOptimizer, wrapped)
    raises(ValueError, hvd.DistributedOptimizer, object())


def test_a_saved_model_keeps_the_optimizers_state() -> None:
    alone = train_alone(epochs=4)
    model = make_model()
    model.compile(hvd.DistributedOptimizer(sgd()), loss="mse")
    train_together(model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        plain = keras.models.load_model(path)  # as in a script without polyhvd
        assert type(plain.optimizer) is keras.optimizers.SGD
        again = hvd.load_model(path)
        with_table = keras.models.load_model(path, custom_objects={"SGD": type(model.optimizer)})
    assert isinstance(again.optimizer, keras.optimizers.SGD)
    assert type(again.optimizer) is not keras.optimizers.SGD
    assert value(again.optimizer.iterations) == 2 * STEPS
    train_together(again)
    assert_same_on_all_ranks(again.get_weights())
    assert_close(again.get_weights(), alone)
    assert with_table.optimizer.get_config() == model.optimizer.get_config()


def test_jit_compile_is_declined() -> None:
    alone = train_alone()
    model = make_model()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.compile(hvd.DistributedOptimizer(sgd()), loss="mse", jit_compile=True)
    assert any("jit_compile" in str(warning.message) for warning in caught)
    assert not model.jit_compile
    train_together(model)
    assert_same_on_all_ranks(model.get_weights())
    assert_close(model.get_weights(), alone)
    # Another optimizer's model may still be compiled.
    plain = make_model()
    plain.compile(sgd(), loss="mse", jit_compile=True)
    assert plain.jit_compile


def test_auto_does_not_choose_xla_on_a_machine_with_a_gpu() -> None:
    real = tf.config.list_physical_devices
    pretended = [type("Device", (), {"device_type": "GPU"})]
    tf.config.list_physical_devices = lambda *a: pretended
    try:
        model, plain = make_model(), make_model()
        model.compile(hvd.DistributedOptimizer(sgd()), loss="mse")
        plain.compile(sgd(), loss="mse")
    finally:
        tf.config.list_physical_devices = real
    assert plain.jit_compile
    assert not model.jit_compile


def test_a_step_under_xla_says_what_to_do() -> None:
    variable, optimizer = tf.Variable(1.0), hvd.DistributedOptimizer(sgd())
    optimizer.build([variable])
    step = tf.function(lambda: optimizer.apply([tf.constant(1.0)], [variable]), jit_compile=True)
    assert "compile(jit_compile=False)" in raises(ValueError, step)


def test_overflow_on_one_rank_is_everybodys() -> None:
    variable = tf.Variable(1.0)
    inner = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    scaled = keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)
    scaled.build([variable])

    @tf.function
    def step(gradient: Any) -> None:
        scaled.apply([gradient], [variable])

    step(tf.constant(float("inf") if RANK == 1 else 4.0))
    assert float(variable) == 1.0
    assert value(scaled.dynamic_scale) == 2.0
    step(tf.constant(2.0 * (RANK + 1)))
    assert float(variable) == 1.0 - 1.5
    outside = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0)))
    outside.build([variable])
    outside.apply([tf.constant(float("inf") if RANK == 0 else 1.0)], [variable])
    assert float(variable) == -0.5


def test_overflow_of_a_local_variable_skips_the_step_on_every_rank() -> None:
    own, table, variable = tf.Variable([1.0, 1.0]), tf.Variable([[1.0], [1.0]]), tf.Variable(1.0)
    inner = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    scaled = keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)
    outside = hvd.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)
    )
    for distributed, optimizer in ((inner, scaled), (outside, outside)):
        distributed.register_local_var(own)
        optimizer.build([own, table, variable])

        @tf.function
        def step(gradient: Any, optimizer: Any = optimizer) -> None:
            slices = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([1]), tf.constant([2, 1]))
            optimizer.apply([gradient, slices, tf.constant(1.0)], [own, table, variable])

        step(tf.constant([1.0, float("nan") if RANK == 1 else 1.0]))
        assert (own.numpy().tolist(), table.numpy().tolist()) == ([1.0, 1.0], [[1.0], [1.0]])
        assert float(variable) == 1.0
        assert value(optimizer.dynamic_scale) == 2.0


def test_mixed_precision_trains_alike() -> None:
    model = make_model(dtype="mixed_float16")
    model.compile(hvd.DistributedOptimizer(sgd()), loss="mse", auto_scale_loss=True)
    train_together(model)
    assert_same_on_all_ranks(model.get_weights())


def test_callbacks_start_all_ranks_alike_and_average_metrics() -> None:
    model = make_model(seed=1 + RANK)
    optimizer = hvd.DistributedOptimizer(sgd())
    optimizer.learning_rate = 0.05 if RANK == 0 else 0.5
    model.compile(optimizer, loss="mse", metrics=["mae"])
    send = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    history = train_together(model, [send, hvd.callbacks.MetricAverageCallback()])
    assert send.broadcast_done
    assert_same_on_all_ranks([*model.get_weights(), *(v.numpy() for v in optimizer.variables)])
    assert_close(model.get_weights(), train_alone())
    everybody = hvd.allgather_object(history.history)
    assert everybody[0] == everybody[1]
    assert isinstance(history.history["loss"][0], float)


def test_metrics_are_paired_by_name() -> None:
    keras.backend.clear_session()
    if RANK == 1:  # Keras numbers the layers of each process
        keras.layers.Dense(1)

    def fitted(*names: str | None) -> Any:
        inputs = keras.Input((2,))
        model = keras.Model(inputs, [keras.layers.Dense(1, name=name)(inputs) for name in names])
        model.compile(sgd(), loss="mse")
        x, y = np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)
        average = hvd.callbacks.MetricAverageCallback()
        return model.fit(x, [y, 100 * y], batch_size=4, verbose=0, callbacks=[average]).history

    with pytest.raises(
        polyhvd.RankMismatchError, match=r"MetricAverageCallback: .*rank 1 has 'dense.*name the"
    ):
        fitted(None, None)
    history = fitted("near", "far")
    assert history["far_loss"][0] > 100 * history["near_loss"][0]


@pytest.mark.parametrize("built_by", [(), (0,), (1,)], ids=["none", "the root", "another rank"])
def test_a_model_that_some_ranks_build_by_their_first_batch_is_broadcast_too(built_by: tuple[int]) -> None:
    keras.utils.set_random_seed(10 + RANK)
    model = keras.Sequential([keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)])
    if RANK in built_by:
        model.build((None, FEATURES))
    model.compile(hvd.DistributedOptimizer(sgd()), loss="mse")
    train_together(model, [hvd_tf_keras.callbacks.BroadcastGlobalVariablesCallback(1)])
    assert_same_on_all_ranks(model.get_weights())


def test_a_model_that_says_that_it_is_built_while_a_layer_is_not_is_broadcast_too() -> None:
    class Premature(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = keras.layers.Dense(3), keras.layers.Dense(1)
            self.first.build((None, FEATURES))
            self.built = True

        def call(self, inputs: Any) -> Any:
            return self.last(self.first(inputs))

    keras.utils.set_random_seed(10 + RANK)
    model = Premature()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
    train_together(model, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert len(model.get_weights()) == 4
    assert_same_on_all_ranks([*model.get_weights(), *(v.numpy() for v in model.optimizer.variables)])


def test_local_variables_stay() -> None:
    model = make_model(seed=1 + RANK)
    model.compile(hvd.DistributedOptimizer(sgd()), loss="mse")
    send = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=model.layers[0].weights)
    send.set_model(model)
    before = model.get_weights()
    send.on_train_begin()
    after = model.get_weights()
    np.testing.assert_array_equal(before[0], after[0])
    everybody = hvd.allgather_object([w.tobytes() for w in after])
    assert everybody[0][0] != everybody[1][0]
    assert everybody[0][2] == everybody[1][2]


def test_two_optimizers_in_one_graph_do_not_mix() -> None:
    first, second = tf.Variable(tf.zeros([2])), tf.Variable(tf.zeros([2]))
    a, b = (hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)) for _ in range(2))
    a.build([first])
    b.build([second])

    @tf.function
    def step() -> None:
        a.apply([tf.ones([2]) * (RANK + 1.0)], [first])
        b.apply([tf.ones([2]) * 10.0 * (RANK + 1.0)], [second])

    for k in range(1, 4):
        step()
        np.testing.assert_array_equal(first.numpy(), [-1.5 * k] * 2)
        np.testing.assert_array_equal(second.numpy(), [-15.0 * k] * 2)


def test_steps_per_execution_and_evaluate_work() -> None:
    model = make_model()
    model.compile(hvd.DistributedOptimizer(sgd()), loss="mse", steps_per_execution=3)
    train_together(model)
    assert_close(model.get_weights(), train_alone())
    inputs, targets = dataset()
    assert model.evaluate(inputs, targets, verbose=0) > 0
    assert model.predict(inputs[:4], verbose=0).shape == (4, 1)


def test_elastic_callbacks_count_the_batches_of_several_executions() -> None:
    model = make_model()
    model.compile(hvd.DistributedOptimizer(sgd()), loss="mse", steps_per_execution=4)
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    found: list[tuple[int, int]] = []
    see = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: found.append((state.batch, state._commits))
    )
    update, commit = hvd.elastic.UpdateBatchStateCallback, hvd.elastic.CommitStateCallback
    x = np.ones((10 * BATCH, FEATURES), np.float32)
    model.fit(x, x[:, :1], batch_size=BATCH, verbose=0, callbacks=[update(state), commit(state, 5), see])
    assert found == [(4, -1), (8, 0), (10, 0)], "the last batch is committed with the end of the epoch"
    assert (state.batch, state._commits) == (0, 1)


def test_elastic_callbacks_commit_when_no_gradients_wait_for_an_update() -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(), backward_passes_per_step=2)
    model.compile(optimizer, loss="mse")
    held: list[tuple[int, int]] = []

    class State(hvd.elastic.KerasState):  # type: ignore[misc]
        def save(self) -> None:
            held.append((passes_held(), int(optimizer.iterations)))
            super().save()

    state = State(model, batch=0, epoch=0)
    held.clear()
    x = np.ones((3 * BATCH, FEATURES), np.float32)
    commit = hvd.elastic.CommitStateCallback(state)
    model.fit(x, x[:, :1], batch_size=BATCH, epochs=2, verbose=0, callbacks=[commit])
    # After batch 2; after the first batch of the next epoch, with the end of the first one; at the end.
    assert held == [(0, 1), (0, 2), (0, 3)]


def test_state_that_lacks_the_optimizer_of_its_model_is_reported_once() -> None:
    for is_first in (True, False):
        model = make_model()
        state = hvd.elastic.KerasState(model, epoch=0) if is_first else None
        model.compile(hvd.DistributedOptimizer(sgd()), loss="mse")
        state = state or hvd.elastic.KerasState(model, epoch=0)
        with drift_reports() as reports:
            for _ in range(2):
                state.save()
        assert len(reports) == is_first
        assert all("the model was compiled after the state was created" in report for report in reports)


def test_callback_that_has_broadcast_in_an_earlier_world_broadcasts_with_ranks_that_are_new() -> None:
    model = make_model()
    model.compile(hvd.DistributedOptimizer(sgd()), loss="mse")
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    x = np.ones((BATCH, FEATURES), np.float32)
    model.fit(x, x[:, :1], batch_size=BATCH, verbose=0, callbacks=[callback])
    polyhvd.shutdown()
    hvd.init()
    if hvd.rank() == 1:  # as a process that is new
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(x, x[:, :1], batch_size=BATCH, verbose=0, callbacks=[callback])
    assert_same_on_all_ranks(model.get_weights())


def test_metrics_are_logged_on_rank_0() -> None:
    logged: list[tuple[int, dict[str, float]]] = []
    callback = hvd.callbacks.LogMetricsCallback(lambda values, step: logged.append((step, values)), 2)
    model = make_model()
    model.compile(hvd.DistributedOptimizer(sgd()), loss="mse")
    train_together(model, callbacks=[callback])
    assert [step for step, _ in logged] == ([*range(2, 2 * STEPS + 1, 2)] if RANK == 0 else [])
    for _, values in logged:
        assert values.keys() == {f"polyhvd/{name}" for name in hvd.metrics()}
    message = raises(ValueError, lambda: hvd.callbacks.LogMetricsCallback(5))
    assert "expected a SummaryWriter" in message
    raises(ValueError, lambda: hvd.callbacks.LogMetricsCallback(print, every_n_steps=0))


def test_an_optimizer_of_version_1_reduces() -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("v", initializer=2.0)
        optimizer = hvd_tf.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0))
        assert isinstance(optimizer, tf.compat.v1.train.GradientDescentOptimizer)
        step = optimizer.minimize(variable * (RANK + 1.0))
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(step)
        assert session.run(variable) == 0.5
        assert "eager" not in str(session.run(hvd.broadcast_global_variables(1)))


def test_values_are_reduced() -> None:
    assert float(hvd.allreduce(1.0 + RANK)) == 1.5
    assert float(hvd.allreduce(np.float32(1.0 + RANK), average=False)) == 3.0
    np.testing.assert_array_equal(hvd_tf_keras.allgather(np.array([RANK])).numpy(), [0, 1])
    assert int(hvd.broadcast(RANK, 1)) == 1
    raises(RuntimeError, hvd.broadcast_global_variables, 0)


def test_what_is_not_supported_yet_says_so() -> None:
    for arguments in ({"device_dense": "/gpu:0"}, {"device_sparse": "/gpu:0"}):
        message = raises(ValueError, lambda a=arguments: hvd.DistributedOptimizer(sgd(), **a))
        assert next(iter(arguments)) in message
    raises(ValueError, lambda: hvd.DistributedOptimizer(sgd(), op=hvd.Max))
    hvd.DistributedOptimizer(sgd(), device_dense="/cpu:0", device_sparse="")
