"""Optimizers and tapes of a process set, on members and on others. Run by test_tf_process_sets.py."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import polyhvd.tensorflow as hvd
import pytest
import tensorflow as tf
from tensorflow_common import raises

pytestmark = pytest.mark.ranks(3, framework="tensorflow", timeout_s=400, env={"TF_NUM_INTEROP_THREADS": "4"})


tf.get_logger().setLevel("ERROR")

RANK, SIZE = hvd.rank(), hvd.size()
PAIR = hvd.ProcessSet([0, SIZE - 1])


def set_up_on_rank() -> None:
    hvd.add_process_set(PAIR)


IS_MEMBER = RANK in (0, SIZE - 1)
#: What a rank contributes, and what it gets.
MINE = RANK + 1.0
AVERAGE = (1.0 + SIZE) / 2 if IS_MEMBER else MINE
MODES: tuple[Any, ...] = (lambda f: f, tf.function)


def equal(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-6)


def test_a_tape_of_a_set_leaves_the_gradients_of_others_alone() -> None:
    dense, table, own, unused = (tf.Variable(tf.ones(shape)) for shape in ([2], [4, 2], [2], [2]))
    variables = [dense, table, own, unused]
    for mode in MODES:
        for sparse_as_dense in (False, True):

            def gradients(sparse_as_dense: bool = sparse_as_dense) -> Any:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(MINE * dense) + tf.reduce_sum(MINE * own)
                    loss += tf.reduce_sum(MINE * tf.gather(table, [0, RANK]))
                tape = hvd.DistributedGradientTape(tape, process_set=PAIR, sparse_as_dense=sparse_as_dense)
                tape.register_local_source(own)
                found = tape.gradient(loss, variables)
                assert found[3] is None
                return found[0], tf.convert_to_tensor(found[1]), found[2]

            first, rows, local = mode(gradients)()
            equal(first, np.full(2, AVERAGE))
            equal(local, np.full(2, MINE / 2 if IS_MEMBER else MINE))
            expected = np.zeros((4, 2))
            for rank in (0, SIZE - 1) if IS_MEMBER else (RANK,):
                weight = (rank + 1.0) / (2 if IS_MEMBER else 1)
                expected[0] += weight
                expected[rank] += weight
            equal(rows, expected)


def test_a_tape_of_a_set_tells_local_sources_from_others_on_members_and_on_others() -> None:
    dense, table, own, unused = (tf.Variable(tf.ones(shape)) for shape in ([2], [4, 2], [2], [2]))

    def apart() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(MINE * dense) + tf.reduce_sum(MINE * own)
            loss += tf.reduce_sum(MINE * tf.gather(table, [0]))
        tape = hvd.DistributedGradientTape(tape, process_set=PAIR)
        tape.register_local_source(own)
        local, others = tape.get_local_and_global_gradients(
            loss, {"dense": dense, "rest": [unused, own, table]}
        )
        assert [id(source) for source, _ in local] == [id(own)]
        assert [id(source) for source, _ in others] == [id(dense), id(unused), id(table)]
        assert others[1][1] is None
        return local[0][1], others[0][1], tf.convert_to_tensor(others[2][1])

    for mode in MODES:
        of_own, of_dense, rows = mode(apart)()
        equal(of_own, np.full(2, MINE / 2 if IS_MEMBER else MINE))
        equal(of_dense, np.full(2, AVERAGE))
        equal(rows, np.outer([1, 0, 0, 0], [AVERAGE, AVERAGE]))


def test_an_optimizer_of_a_set_steps_by_itself_on_others() -> None:
    for mode in MODES:
        for passes in (1, 2):
            variable, table = tf.Variable([10.0, 10.0]), tf.Variable([[10.0], [10.0]])
            optimizer = hvd.DistributedOptimizer(
                keras.optimizers.SGD(1.0), process_set=PAIR, backward_passes_per_step=passes
            )
            optimizer.build([variable, table])

            def step(v: Any = variable, t: Any = table, o: Any = optimizer) -> None:
                slices = tf.IndexedSlices(tf.fill([1, 1], MINE), tf.constant([1]), tf.constant([2, 1]))
                o.apply([tf.fill([2], MINE), slices], [v, t])

            run = mode(step)
            for _ in range(2 * passes):
                run()
            equal(variable, np.full(2, 10.0 - 2 * passes * AVERAGE))
            equal(table, [[10.0], [10.0 - 2 * passes * AVERAGE]])


def test_a_model_of_a_set_trains_by_itself_on_others() -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.zeros((1, 1))])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.5), process_set=PAIR), loss="mse")
    model.fit(np.ones((1, 1)), np.full((1, 1), MINE), epochs=1, verbose=0)
    equal(model.get_weights()[0], [[AVERAGE]])  # the gradient of (w - y)^2 at 0 is -2 y


def test_an_optimizer_of_version_1_of_a_set_leaves_others_alone() -> None:
    with tf.Graph().as_default():
        variable = tf.compat.v1.get_variable("v", initializer=0.0)
        optimizer = hvd.DistributedOptimizer(
            tf.compat.v1.train.GradientDescentOptimizer(1.0), process_set=PAIR
        )
        step = optimizer.minimize(MINE * variable)
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(step)
            equal(session.run(variable), -AVERAGE)


def test_a_collective_of_a_set_still_raises_on_others() -> None:
    for mode in MODES:
        run = mode(lambda: hvd.allreduce(tf.constant(MINE), process_set=PAIR))
        if IS_MEMBER:
            equal(run(), AVERAGE)
        else:
            assert "is not in process set" in raises(tf.errors.InvalidArgumentError, run)


def test_an_unknown_set_raises_a_value_error_when_a_graph_is_made() -> None:
    unregistered, unknown = hvd.ProcessSet([0]), hvd.ProcessSet([0])
    unknown.process_set_id = 77
    variable = tf.Variable(1.0)

    def gradient(members: Any) -> Any:
        with tf.GradientTape() as tape:
            y = 2.0 * variable
        return hvd.DistributedGradientTape(tape, process_set=members).gradient(y, variable)

    for members in (unregistered, unknown):
        number = members.process_set_id or 77
        calls: list[Any] = [
            lambda m=members: hvd.allreduce(tf.ones([2]), process_set=m),
            lambda m=members: hvd.broadcast(tf.ones([2]), 0, process_set=m),
            lambda m=members: hvd.barrier(m),
            lambda n=number: hvd.size_op(n),
            lambda n=number: hvd.process_set_included_op(n),
        ]
        if members is unregistered or RANK == 0:  # others are not among the ranks that the second one lists
            calls.append(lambda m=members: gradient(m))
        for call in calls:
            for run in (call, tf.function(call), lambda c=call: tf.function(c).get_concrete_function()):
                assert "process_set" in raises(ValueError, run).replace("process set", "process_set")
