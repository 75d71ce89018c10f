"""Several passes in a step, and gradients that stay local."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import polyhvd.keras as hvd
import polyhvd.tensorflow as hvd_tf
import pytest
import tensorflow as tf
from depth import repeats  # tests/harness, on the path by tests/conftest.py
from keras_common import (
    BATCH,
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
from polyhvd.training.passes import drop_passes

pytestmark = pytest.mark.ranks(2, framework="tensorflow", timeout_s=400, env={"TF_NUM_INTEROP_THREADS": "2"})


MODES: tuple[Callable[[Any], Any], ...] = (lambda f: f, tf.function)
EPOCHS = 3


def operations() -> int:
    return int(polyhvd.counters()["operations"])


def train_alone_in_passes(passes: int, average: bool, optimizer: Any) -> list[Any]:
    """By a plain optimizer, on the gradients of that many batches of the union; the rest is left."""
    model = make_model()
    inputs, targets = dataset()
    gradients: list[Any] = []
    for k in list(range(STEPS)) * EPOCHS:
        x, y = (a[k * BATCH * SIZE : (k + 1) * BATCH * SIZE] for a in (inputs, targets))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        gradients.append(tape.gradient(loss, model.trainable_variables))
        if len(gradients) == passes:
            factor = 1.0 / passes if average else 1.0
            total = [tf.add_n(parts) * factor for parts in zip(*gradients, strict=True)]
            optimizer.apply(total, model.trainable_variables)
            gradients.clear()
    return model.get_weights()


def test_fit_in_passes_equals_training_alone_on_the_union() -> None:
    hvd.init()
    passes = 4
    updates = EPOCHS * STEPS // passes
    assert EPOCHS * STEPS % passes
    assert STEPS % passes  # what is left of an epoch counts for the next one
    clipped = {"clipnorm": 0.05}
    cases: tuple[tuple[bool, dict[str, float]], ...] = (
        (False, clipped),
        (True, {}),
        (True, clipped),
        (False, {}),
    )
    for average, arguments in cases[: repeats(2, len(cases))]:
        model = make_model()
        optimizer = hvd.DistributedOptimizer(
            sgd(**arguments), backward_passes_per_step=passes, average_aggregated_gradients=average
        )
        model.compile(optimizer, loss="mse")
        before = operations()
        train_together(model, epochs=EPOCHS)
        assert operations() - before == updates
        assert value(optimizer.iterations) == updates
        assert_same_on_all_ranks(model.get_weights())
        assert_close(model.get_weights(), train_alone_in_passes(passes, average, sgd(**arguments)))


def test_averaged_passes_equal_keras_accumulation() -> None:
    alone = train_alone(keras.optimizers.Adam(0.01, gradient_accumulation_steps=2))
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.Adam(0.01), backward_passes_per_step=2, average_aggregated_gradients=True
    )
    model.compile(optimizer, loss="mse")
    train_together(model)
    assert_close(model.get_weights(), alone, 1e-4)
    # Keras's own accumulation works, too: it reduces in every pass.
    model = make_model()
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)), loss="mse"
    )
    before = operations()
    train_together(model)
    assert operations() - before == 2 * STEPS
    assert_same_on_all_ranks(model.get_weights())
    assert_close(model.get_weights(), alone, 1e-4)


def test_nothing_changes_before_the_last_pass() -> None:
    for mode in MODES:
        variable, unused = tf.Variable([1.0, 2.0]), tf.Variable(5.0)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.5), backward_passes_per_step=3)

        def step(gradient: Any, o: Any = optimizer, v: Any = variable, u: Any = unused) -> None:
            o.apply_gradients([(gradient, v), (None, u)])

        run = mode(step)
        for k in range(1, 7):
            before = operations(), [v.numpy().tolist() for v in (variable, *optimizer.variables)]
            run(tf.constant([1.0, 2.0]) * (RANK + k))
            after = operations(), [v.numpy().tolist() for v in (variable, *optimizer.variables)]
            if k % 3:
                assert after[0] == before[0]
                assert k < 3 or after == before  # the first call builds the optimizer
            else:
                assert after[0] == before[0] + 1
                assert after[1][0] != before[1][0]
        assert value(optimizer.iterations) == 2
        assert float(unused) == 5.0
        assert_same_on_all_ranks([v.numpy() for v in (variable, *optimizer.variables)])


def test_the_sum_of_passes_is_averaged_over_the_ranks() -> None:
    for mode in MODES:
        for arguments, expected in (
            ({}, 1.5 + 3.0),
            ({"average_aggregated_gradients": True}, 2.25),
            ({"op": hvd.Sum}, 9.0),
            ({"compression": hvd.Compression.fp16}, 4.5),
            ({"groups": 1}, 4.5),
        ):
            variable = tf.Variable(0.0)
            optimizer = hvd.DistributedOptimizer(
                keras.optimizers.SGD(1.0), backward_passes_per_step=2, **arguments
            )
            run = mode(lambda g, o=optimizer, v=variable: o.apply([g], [v]))
            for repeat in range(1, 3):
                run(tf.constant(1.0 + RANK))
                run(tf.constant(2.0 * (1.0 + RANK)))
                assert float(variable) == -expected * repeat


def test_slices_are_added_up_as_slices() -> None:
    passes = [[0, 2, 2], [2, 3, 0]]
    expected = np.zeros((5, 2), np.float32)
    for rank in range(SIZE):
        for k, rows in enumerate(passes):
            for row in rows:
                expected[row + rank * (row == 3)] += (rank + 1.0) * (k + 1.0) / SIZE
    for mode in MODES:
        for sparse_as_dense in (False, True):
            table = tf.Variable(tf.zeros([5, 2]))
            kinds: list[type] = []

            class Watching(keras.optimizers.SGD):
                def update_step(self, gradient: Any, variable: Any, rate: Any, to: Any = kinds) -> None:
                    to.append(type(gradient))
                    super().update_step(gradient, variable, rate)

            optimizer = hvd.DistributedOptimizer(
                Watching(1.0), backward_passes_per_step=2, sparse_as_dense=sparse_as_dense
            )

            def step(rows: Any, factor: Any, t: Any = table, o: Any = optimizer) -> None:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(tf.gather(t, rows)) * factor
                o.apply_gradients([(tape.gradient(loss, t), t)])

            run = mode(step)
            for repeat in range(1, 3):
                for k, rows in enumerate(passes):
                    run(tf.constant([r + RANK * (r == 3) for r in rows]), tf.constant((RANK + 1.0) * (k + 1)))
                np.testing.assert_allclose(table.numpy(), -expected * repeat, rtol=1e-6)
            assert [issubclass(kind, tf.IndexedSlices) for kind in set(kinds)] == [not sparse_as_dense]


def test_a_gradient_of_an_earlier_pass_counts_when_the_last_one_has_none() -> None:
    a, b = tf.Variable(1.0), tf.Variable([[1.0], [1.0]])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    slices = tf.IndexedSlices(tf.constant([[2.0 + RANK]]), tf.constant([1]), tf.constant([2, 1]))
    optimizer.apply([tf.constant(1.0 + RANK), slices], [a, b])
    last = tf.Variable(0.0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    optimizer.apply([tf.constant(1.0 + RANK), slices, tf.constant(1.0)], [a, b, last])
    optimizer.apply([None, None, tf.constant(2.0)], [a, b, last])
    assert float(a) == 1.0 - 1.5
    np.testing.assert_array_equal(b.numpy(), [[1.0], [1.0 - 2.5]])
    assert float(last) == -3.0


def test_a_variable_that_the_last_pass_leaves_out_gets_the_gradients_of_the_others() -> None:
    variables = [tf.Variable(0.0), tf.Variable(0.0)]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    optimizer.build(variables)
    optimizer.apply([tf.constant(1.0)] * 2, variables)
    optimizer.apply([tf.constant(1.0)], variables[:1])
    assert [float(variable) for variable in variables] == [-2.0, -1.0]


def test_a_last_pass_that_fails_leaves_no_gradients_of_earlier_ones() -> None:
    weight = tf.Variable(0.0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def step(x: Any) -> None:
        optimizer.apply([tf.reduce_mean(hvd_tf.allreduce(x, name="x"))], [weight])

    step(tf.ones([1]))
    raises(tf.errors.OpError, step, tf.ones([1 + hvd.rank()]))
    drop_passes()
    step(tf.ones([1]))
    step(tf.ones([1]))
    assert float(weight) == -2.0


def test_a_gradient_that_changes_its_kind_says_what_to_do() -> None:
    table = tf.Variable(tf.zeros([2, 1]))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    optimizer.apply([tf.IndexedSlices(tf.ones([1, 1]), tf.constant([1]), tf.constant([2, 1]))], [table])
    assert "sparse_as_dense" in raises(ValueError, optimizer.apply, [tf.ones([2, 1])], [table])


def test_overflow_in_one_pass_of_one_rank_is_everybodys() -> None:
    for mode in MODES:
        for outside in (True, False):
            variable = tf.Variable(1.0)
            options = {"backward_passes_per_step": 2}
            if outside:
                inner = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
                scaled = optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)
            else:
                scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)
                optimizer = hvd.DistributedOptimizer(scaled, **options)
            run = mode(lambda g, o=optimizer, v=variable: o.apply_gradients([(g, v)]))
            run(tf.constant(float("inf") if RANK == 1 else 4.0))
            run(tf.constant(4.0))
            assert float(variable) == 1.0
            assert value(scaled.dynamic_scale) == 2.0
            run(tf.constant(2.0 * (RANK + 1)))
            assert float(variable) == 1.0
            run(tf.constant(2.0 * (RANK + 1)))
            assert float(variable) == 1.0 - 3.0
            assert value(scaled.iterations) == 1


def test_mixed_precision_trains_in_passes() -> None:
    for policy in ("mixed_float16", "mixed_bfloat16"):
        keras.config.set_dtype_policy(policy)
        try:
            model = make_model()
        finally:
            keras.config.set_dtype_policy("float32")
        optimizer = hvd.DistributedOptimizer(sgd(), backward_passes_per_step=2)
        model.compile(optimizer, loss="mse")
        train_together(model)
        assert_same_on_all_ranks(model.get_weights())
        assert not np.array_equal(model.get_weights()[0], make_model().get_weights()[0])
        if policy == "mixed_float16":
            assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
            assert 0 < value(optimizer.iterations) <= STEPS  # the first scale may be too large
        else:
            assert value(optimizer.iterations) == STEPS


def test_two_optimizers_in_one_graph_do_not_mix() -> None:
    first, second = tf.Variable(tf.zeros([2])), tf.Variable(tf.zeros([2]))
    a, b = (hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2) for _ in range(2))

    @tf.function
    def step() -> None:
        a.apply([tf.ones([2]) * (RANK + 1.0)], [first])
        b.apply([tf.ones([2]) * 10.0 * (RANK + 1.0)], [second])

    for k in range(1, 5):
        step()
        np.testing.assert_array_equal(first.numpy(), [-3.0 * (k // 2)] * 2)
        np.testing.assert_array_equal(second.numpy(), [-30.0 * (k // 2)] * 2)


def test_steps_per_execution_and_retracing_work() -> None:
    passes = 4
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(), backward_passes_per_step=passes)
    model.compile(optimizer, loss="mse", steps_per_execution=3)
    train_together(model)
    model.compile(optimizer, loss="mse")  # the passes that are left count
    train_together(model, epochs=EPOCHS - 2)
    assert_close(model.get_weights(), train_alone_in_passes(passes, False, sgd()))


def test_a_step_under_xla_says_what_to_do() -> None:
    variable = tf.Variable(1.0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    step = tf.function(lambda: optimizer.apply([tf.constant(1.0)], [variable]), jit_compile=True)
    assert "compile(jit_compile=False)" in raises(ValueError, step)


def test_a_copy_counts_its_own_passes() -> None:
    first = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    second = type(first).from_config(first.get_config())
    pairs = [(first, tf.Variable(0.0)), (second, tf.Variable(0.0))]
    for optimizer, variable in pairs * 2:
        optimizer.apply([tf.constant(1.0 + RANK)], [variable])
    for optimizer, variable in pairs:
        assert value(optimizer.iterations) == 1
        assert float(variable) == -3.0


def test_a_number_of_passes_is_checked() -> None:
    for bad in (0, -1, 1.5, True, None):
        message = raises(
            ValueError, lambda n=bad: hvd.DistributedOptimizer(sgd(), backward_passes_per_step=n)
        )
        assert "backward_passes_per_step" in message


def test_passes_of_version_1() -> None:
    for clip in (False, True):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            variable = tf.compat.v1.get_variable("v", initializer=2.0)
            table = tf.compat.v1.get_variable("t", initializer=tf.zeros([3, 1]))
            unused = tf.compat.v1.get_variable("u", initializer=1.0)
            steps = tf.compat.v1.train.get_or_create_global_step()
            optimizer = hvd_tf.DistributedOptimizer(
                tf.compat.v1.train.MomentumOptimizer(1.0, 0.0), backward_passes_per_step=2
            )
            loss = variable * (RANK + 1.0) + tf.reduce_sum(tf.gather(table, [RANK, 2]))
            pairs = optimizer.compute_gradients(loss, [variable, table, unused])
            if clip:
                pairs = [
                    (g if g is None or v is table else tf.clip_by_value(g, -1.0, 1.0), v) for g, v in pairs
                ]
            train = optimizer.apply_gradients(pairs, global_step=steps)
            session.run(
                [tf.compat.v1.global_variables_initializer(), tf.compat.v1.local_variables_initializer()]
            )
            before = operations()
            for k in range(1, 5):
                session.run(train)
                expected = 2.0 - (1.0 if clip else 3.0) * (k // 2)
                assert session.run(variable) == expected, (k, session.run(variable))
                np.testing.assert_array_equal(
                    session.run(table)[:, 0], np.array([-1.0, -1.0, -2.0]) * (k // 2)
                )
                assert session.run(steps) == k
            assert operations() - before == 4
            names = {v.op.name for v in tf.compat.v1.global_variables()}
            assert names == {"v", "t", "u", "global_step", "v/Momentum", "t/Momentum"}, names


def test_local_variables_keep_their_own_gradients() -> None:
    for mode in MODES:
        for passes in (1, 2):
            for scale in (True, False):
                shared, local = tf.Variable(0.0), tf.Variable(0.0)
                optimizer = hvd.DistributedOptimizer(
                    keras.optimizers.SGD(1.0), backward_passes_per_step=passes, scale_local_gradients=scale
                )
                optimizer.register_local_var(local)
                run = mode(lambda g, o=optimizer, a=shared, b=local: o.apply([g, g], [a, b]))
                for _ in range(passes):
                    run(tf.constant(1.0 + RANK))
                assert float(shared) == -1.5 * passes
                assert float(local) == -(1.0 + RANK) * passes / (SIZE if scale else 1)


def train_partially(layers: Callable[[Any], Any], scale: bool = True) -> tuple[Any, Any]:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Dense(7, activation="tanh"), keras.layers.Dense(1)])
    optimizer = hvd.PartialDistributedOptimizer(
        sgd(), local_layers=layers(model), scale_local_gradients=scale
    )
    model.compile(optimizer, loss="mse")
    train_together(model)  # which builds the layers
    return model, optimizer


def test_local_layers_train_apart() -> None:
    for layers in (lambda m: m.layers[0], lambda m: [m.layers[0]]):
        model, optimizer = train_partially(layers)
        assert isinstance(optimizer, keras.optimizers.SGD)
        everybody = hvd.allgather_object([w.tobytes() for w in model.get_weights()])
        assert [a != b for a, b in zip(*everybody, strict=True)] == [True, True, False, False]
    together, _ = train_partially(lambda m: None)
    assert_close(together.get_weights(), train_alone())
    message = raises(
        ValueError, lambda: hvd.PartialDistributedOptimizer(sgd(), local_layers=[tf.Variable(1.0)])
    )
    assert "register_local_var" in message


def test_local_layers_of_a_tape_keep_their_gradients() -> None:
    model = make_model()
    inputs, targets = (mine(a)[:BATCH] for a in dataset())

    def gradients(make: Callable[[Any], Any]) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(inputs) - targets))
        return [np.asarray(g) for g in make(tape).gradient(loss, model.trainable_variables)]

    own = gradients(lambda tape: tape)
    for scale in (True, False):
        found = gradients(
            lambda tape, s=scale: hvd_tf.PartialDistributedGradientTape(
                tape, local_layers=model.layers[0], scale_local_gradients=s
            )
        )
        averaged = gradients(hvd_tf.DistributedGradientTape)
        divisor = SIZE if scale else 1
        assert_close(found, [own[0] / divisor, own[1] / divisor, *averaged[2:]])
        assert not np.allclose(own[2], averaged[2])


def test_gradients_of_local_and_of_global_sources_come_apart() -> None:
    dense, own, unused = (tf.Variable(tf.ones([2])) for _ in range(3))
    table, rows = (tf.Variable(tf.ones([3, 2])) for _ in range(2))
    sources = [rows, dense, own, table, unused]

    def both(scale: bool, nest: Callable[[list[Any]], Any] = list) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = (1.0 + RANK) * tf.reduce_sum(dense + own)
            loss += (1.0 + RANK) * tf.reduce_sum(tf.gather(table, [RANK]) + tf.gather(rows, [RANK]))
        tape = hvd_tf.DistributedGradientTape(tape, scale_local_gradients=scale)
        for variable in (own, rows):
            tape.register_local_source(variable)
        local, others = tape.get_local_and_global_gradients(loss, nest(sources), None, True)
        assert [id(v) for v, _ in local] == [id(rows), id(own)]
        assert [id(v) for v, _ in others] == [id(dense), id(table), id(unused)]
        return [gradient for _, gradient in local + others]

    nests: list[Callable[[list[Any]], Any]] = [
        list,
        lambda v: {"a": v[0], "b": tuple(v[1:3]), "c": {"d": v[3:]}},
        lambda v: {"c": v[3:], "b": [(v[1],), v[2]], "a": v[0]},  # in order of keys
    ]
    for mode in MODES:
        for scale in (True, False):
            for nest in nests:
                of_rows, of_own, of_dense, of_table, of_unused = mode(both)(scale, nest)
                weight = (1.0 + RANK) / (SIZE if scale else 1)
                assert isinstance(of_rows, tf.IndexedSlices)
                assert_close([of_rows.values, of_own], [[[weight, weight]], [weight, weight]])
                assert of_rows.indices.numpy().tolist() == [RANK]
                assert_close(
                    [of_dense, tf.convert_to_tensor(of_table)], [[1.5] * 2, [[0.5] * 2, [1.0] * 2, [0.0] * 2]]
                )
                assert isinstance(of_table, tf.IndexedSlices)
                assert of_unused is None


def test_a_tape_gives_the_gradients_of_local_layers_apart() -> None:
    model = make_model()
    inputs, targets = (mine(a)[:BATCH] for a in dataset())

    def both(local_layers: Any) -> tuple[Any, Any, Any]:
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(tf.square(model(inputs) - targets))
        tape = hvd_tf.PartialDistributedGradientTape(tape, local_layers=local_layers)
        gradients = tape.gradient(loss, model.trainable_variables, None, False)
        return gradients, *tape.get_local_and_global_gradients(loss, model.trainable_variables)

    for layers, count in (
        (model.layers[0], 2),
        (list(model.layers), len(model.trainable_variables)),
        (None, 0),
    ):
        gradients, local, others = both(layers)
        assert len(local) == count
        pairs = zip(local + others, model.trainable_variables, gradients, strict=True)
        for (source, found), variable, expected in pairs:
            assert source is variable
            assert_close([found], [np.asarray(expected)])


def test_one_source_and_no_source_are_a_list_of_one_and_of_none() -> None:
    variable, output = tf.Variable(2.0), tf.constant(3.0)
    with hvd_tf.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        loss = variable * (RANK + 1.0)
    ((source, gradient),) = tape.get_local_and_global_gradients(loss, variable, output_gradients=output)[1]
    assert source is variable
    assert float(gradient) == 3.0 * 1.5
    assert tape.get_local_and_global_gradients(loss, []) == ([], [])
