"""Several calls of traced functions in one graph.

Each rank is late at another place: without an order that all ranks share, calls that have their names in
common meet the wrong ones of the other ranks, or fail.
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

import keras
import numpy as np
import polyhvd.tensorflow as hvd
import pytest
import tensorflow as tf
from depth import repeats  # tests/harness, on the path by tests/conftest.py
from tensorflow_common import raises

pytestmark = pytest.mark.ranks(3, framework="tensorflow", timeout_s=400, env={"TF_NUM_INTEROP_THREADS": "4"})


tf.get_logger().setLevel("ERROR")

RANK, SIZE = hvd.rank(), hvd.size()
STEPS = int(os.environ.get("CALL_STEPS", "10"))
#: Sums and averages of rank + 1 over the ranks.
TOTAL = sum(range(1, SIZE + 1))
MEAN = TOTAL / SIZE
#: What this rank contributes.
MINE = RANK + 1.0


def late(tensor: Any, place: Any) -> Any:
    """The tensor; another rank is late at every place, and in the gradient at another one again."""

    def wait(value: Any, place: Any) -> Any:
        if place % SIZE == RANK:
            time.sleep(0.02)
        return value

    def delayed(value: Any, place: Any) -> Any:
        result = tf.numpy_function(wait, [value, place], value.dtype)
        result.set_shape(value.shape)
        return result

    @tf.custom_gradient
    def identity(value: Any, place: Any) -> Any:
        return delayed(value, place), lambda upstream: (delayed(upstream, place + 1), None)

    return identity(tensor, tf.convert_to_tensor(place))


def equal(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-6)


def test_two_optimizers_in_functions_of_their_own_step_apart() -> None:
    hvd.init()

    def stepper(place: int) -> tuple[tf.Variable, Any]:
        variable = tf.Variable(0.0)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        optimizer.build([variable])

        @tf.function
        def step(gradient: Any) -> None:
            optimizer.apply([late(gradient, place)], [variable])

        return variable, step

    (first, step_first), (second, step_second) = stepper(0), stepper(1)

    @tf.function
    def outer(gradient: Any) -> None:
        step_first(gradient)
        step_second(100.0 * gradient)

    for k in range(1, STEPS + 1):
        outer(tf.constant(MINE))
        equal(first, -MEAN * k)
        equal(second, -100.0 * MEAN * k)


def test_an_encoder_that_gathers_may_be_called_twice() -> None:
    weight = tf.Variable(2.0)

    @tf.function
    def encode(x: Any) -> Any:
        return hvd.allgather(late(x * weight, int(x.shape[0])))

    def both(a: Any, b: Any) -> tuple[Any, Any]:
        return encode(a), encode(b)

    expected_a = np.repeat(np.arange(1.0, SIZE + 1), 1) * 2
    expected_b = np.repeat(np.arange(1.0, SIZE + 1), 2) * 200
    for run in (both, tf.function(both), tf.function(tf.function(both))):
        for _ in range(STEPS):
            a, b = run(tf.fill([1], MINE), tf.fill([2], 100 * MINE))
            equal(a, expected_a)
            equal(b, expected_b)


def test_one_trace_called_twice_keeps_its_calls_apart() -> None:
    weight = tf.Variable(1.0)

    @tf.function
    def encode(x: Any, place: Any) -> Any:
        return hvd.allreduce(late(x * weight, place), op=hvd.Sum)

    places = [tf.constant(i) for i in range(4)]

    @tf.function
    def outer(x: Any) -> Any:
        return [encode(10.0**i * x, place) for i, place in enumerate(places)]

    for _ in range(STEPS):
        for i, found in enumerate(outer(tf.fill([2], MINE))):
            equal(found, np.full(2, 10.0**i * TOTAL))


def test_gradients_of_two_calls_are_kept_apart() -> None:
    """Inside the outer function, and of the outer function as a whole."""
    weight = tf.Variable([1.0, 1.0])

    @tf.function
    def encode(x: Any, place: Any) -> Any:
        return late(hvd.allreduce(late(x * weight, place), op=hvd.Sum), place)

    def loss(x: Any) -> Any:
        a, b = encode(x, tf.constant(0)), encode(x, tf.constant(1))
        return tf.reduce_sum(MINE * a) + tf.reduce_sum(MINE * 100.0 * b)

    whole = tf.function(loss)

    def inside(x: Any) -> Any:
        with tf.GradientTape() as tape:
            total = loss(x)
        return tape.gradient(total, weight)

    def outside(x: Any) -> Any:
        with tf.GradientTape() as tape:
            total = whole(x)
        return tape.gradient(total, weight)

    x = tf.fill([2], MINE)
    # The adjoint of a sum of all ranks' tensors is the sum of all ranks' gradients.
    expected = np.full(2, MINE * TOTAL * 101.0)
    for run in (tf.function(inside), outside, tf.function(outside), tf.function(tf.function(outside))):
        for _ in range(STEPS):
            equal(tf.convert_to_tensor(run(x)), expected)


def test_a_persistent_tape_may_be_asked_twice_for_the_gradient_of_a_call() -> None:
    weight = tf.Variable([1.0, 1.0])

    @tf.function
    def encode(x: Any) -> Any:
        return hvd.allreduce(x * weight, op=hvd.Sum)

    @tf.function
    def outer(x: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            y = encode(x)
            first, second = tf.reduce_sum(late(y, 0)), tf.reduce_sum(100.0 * y)
        return tape.gradient(second, weight), tape.gradient(first, y), tape.gradient(second, weight)

    for _ in range(STEPS):
        a, _, b = outer(tf.fill([2], MINE))
        equal(a, np.full(2, MINE * SIZE * 100.0))
        equal(b, np.full(2, MINE * SIZE * 100.0))


def test_a_distributed_tape_in_a_function_may_be_called_twice() -> None:
    first, second = tf.Variable(1.0), tf.Variable(1.0)

    @tf.function
    def gradient(x: Any, variable: Any, place: int) -> Any:
        with tf.GradientTape() as tape:
            y = late(x, place) * variable
        return hvd.DistributedGradientTape(tape).gradient(y, variable)

    @tf.function
    def outer(x: Any) -> Any:
        return gradient(x, first, 0), gradient(100.0 * x, second, 1), gradient(10.0 * x, first, 0)

    for _ in range(STEPS):
        a, b, c = outer(tf.constant(MINE))
        equal(a, MEAN)
        equal(b, 100.0 * MEAN)
        equal(c, 10.0 * MEAN)


def test_branches_of_two_conditions_are_kept_apart() -> None:
    weight = tf.Variable(1.0)

    def reduced(x: Any, place: int) -> Any:
        return hvd.allreduce(late(x * weight, place), op=hvd.Sum, name="in_a_branch")

    @tf.function
    def outer(x: Any, yes: Any) -> Any:
        a = tf.cond(yes, lambda: reduced(x, 0), lambda: reduced(-x, 1))
        b = tf.cond(yes, lambda: reduced(100.0 * x, 1), lambda: -x)
        return a, b, reduced(10.0 * x, 2)

    for _ in range(STEPS):
        a, b, c = outer(tf.constant(MINE), tf.constant(True))
        equal([a, b, c], [TOTAL, 100.0 * TOTAL, 10.0 * TOTAL])
    # Either branch has the same names: what matters is what ranks do, not where.
    a, _, _ = outer(tf.constant(MINE), tf.constant(True))
    equal(a, TOTAL)


def test_iterations_of_loops_are_kept_apart() -> None:
    weight = tf.Variable(1.0)
    x = MINE * tf.constant([1.0, 10.0, 100.0, 1000.0])

    def direct(value: Any) -> Any:
        place = tf.cast(tf.round(tf.math.log(value / MINE) / np.log(10.0)), tf.int32)
        return hvd.allreduce(late(value * weight, place), op=hvd.Sum)

    reduce = tf.function(direct)

    def mapped(value: Any, function: Any) -> Any:
        return tf.map_fn(function, value, parallel_iterations=4)

    def looped(value: Any, function: Any) -> Any:
        results = tf.TensorArray(tf.float32, 4)
        _, results = tf.while_loop(
            lambda i, _: i < 4,
            lambda i, results: (i + 1, results.write(i, function(value[i]))),
            (0, results),
            parallel_iterations=4,
        )
        return results.stack()

    def gradient(value: Any, function: Any, way: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(value)
            total = tf.reduce_sum(value * way(value, function))
        return tape.gradient(total, value)

    expected = np.array([1.0, 10.0, 100.0, 1000.0])
    cases = ((mapped, direct), (looped, reduce), (mapped, reduce), (looped, direct))
    for way, function in cases[: repeats(2, len(cases))]:
        run = tf.function(lambda value, way=way, function=function: way(value, function))
        both = tf.function(lambda v, way=way, f=function: (way(v, f), 2.0 * way(v, f)))
        slope = tf.function(lambda value, way=way, function=function: gradient(value, function, way))
        for _ in range(3):
            equal(run(x), TOTAL * expected)
            equal(both(x)[0], TOTAL * expected)
            equal(both(x)[1], 2 * TOTAL * expected)
            # d/dx of x * sum(x): the rank's own result, and all ranks' x.
            equal(slope(x), 2 * TOTAL * expected)


def test_a_rank_may_trace_anew_when_the_others_do_not() -> None:
    weight = tf.Variable(1.0)

    @tf.function(reduce_retracing=False)
    def encode(x: Any, place: int, _: Any) -> Any:
        return hvd.allreduce(late(x * weight, place), op=hvd.Sum)

    @tf.function
    def outer(x: Any, other: Any) -> Any:
        return encode(x, 0, other), encode(100.0 * x, 1, other), encode(10.0 * x, 0, other)

    for step in range(STEPS):
        found = outer(tf.constant(MINE), step if step % SIZE == RANK else 0)
        equal(found, [TOTAL, 100.0 * TOTAL, 10.0 * TOTAL])


def test_recursive_and_nested_functions_are_kept_apart() -> None:
    weight = tf.Variable(1.0)

    @tf.function
    def recursive(x: Any, depth: int) -> Any:
        y = hvd.allreduce(late(x * weight, depth), op=hvd.Sum)
        if depth == 0:
            return [y]
        return [y, *recursive(10.0 * x, depth - 1), *recursive(100.0 * x, depth - 1)]

    for _ in range(STEPS):
        found = recursive(tf.constant(MINE), 2)
        equal(found, np.array([1, 10, 100, 1000, 100, 1000, 10000]) * TOTAL)


def test_functions_of_a_saved_model_are_kept_apart() -> None:
    class Encoder(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = tf.Variable(1.0)

        @tf.function(input_signature=[tf.TensorSpec([]), tf.TensorSpec([], tf.int32)])
        def encode(self, x: Any, place: Any) -> Any:
            return hvd.allreduce(x * self.weight, op=hvd.Sum)

        @tf.function(input_signature=[tf.TensorSpec([])])
        def twice(self, x: Any) -> Any:
            return self.encode(x, 0), self.encode(100.0 * x, 1)

    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(Encoder(), folder)
        loaded = tf.saved_model.load(folder)

    @tf.function
    def outer(x: Any) -> Any:
        a, b = loaded.encode(late(x, 0), 0), loaded.encode(late(100.0 * x, 1), 1)
        return a, b, *loaded.twice(10.0 * x)

    for _ in range(STEPS):
        found = outer(tf.constant(MINE))
        equal(found, np.array([1.0, 100.0, 10.0, 1000.0]) * TOTAL)


def test_a_vectorized_map_over_a_collective_gives_its_results() -> None:
    factors = np.array([1.0, 10.0, 100.0, 1000.0])
    x = MINE * tf.constant(factors, tf.float32)

    def reduce_twice(value: Any) -> Any:
        return hvd.allreduce(value, op=hvd.Sum), hvd.allreduce(2.0 * value, op=hvd.Sum)

    for function in (reduce_twice, tf.function(reduce_twice)):
        for run in (tf.vectorized_map, tf.function(tf.vectorized_map)):
            for _ in range(3):
                a, b = run(function, x)
                equal(a, TOTAL * factors)
                equal(b, 2 * TOTAL * factors)


def test_a_vectorized_map_moves_the_rows_of_each_iteration() -> None:
    def table(rank: int) -> Any:
        """Of 3 iterations with two rows for each rank."""
        return 100.0 * rank + np.arange(3 * 2 * SIZE * 2).reshape(3, 2 * SIZE, 2)

    tables = [table(rank) for rank in range(SIZE)]
    mine = tf.constant(tables[RANK], tf.float32)
    rows = slice(2 * RANK, 2 * RANK + 2)
    cases: list[tuple[Any, Any]] = [
        (hvd.allgather, np.concatenate(tables, axis=1)),
        (lambda t: hvd.broadcast(t, SIZE - 1), tables[-1]),
        (lambda t: hvd.reducescatter(t, op=hvd.Sum), sum(t[:, rows] for t in tables)),
        (hvd.alltoall, np.concatenate([t[:, rows] for t in tables], axis=1)),
    ]
    for function, expected in cases:
        for run in (tf.vectorized_map, tf.function(tf.vectorized_map)):
            equal(run(function, mine), expected)
    message = raises(
        tf.errors.InvalidArgumentError, tf.vectorized_map, lambda t: hvd.allreduce(t, op=hvd.Adasum), mine
    )
    assert "tf.map_fn()" in message, message


def test_a_vectorized_map_over_a_collective_has_gradients() -> None:
    x = MINE * tf.constant([[1.0, 10.0], [100.0, 1000.0]])

    def slope(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.vectorized_map(lambda row: row * hvd.allreduce(row, op=hvd.Sum), x)
        return tape.gradient(y, x)

    for run in (slope, tf.function(slope)):
        equal(run(x), 2 * TOTAL / MINE * x.numpy())


def test_fused_gradients_of_one_function_still_overlap() -> None:
    """Collectives of one graph may start in any order, here in opposite ones."""
    names = [f"overlap_{i}" for i in range(3)]

    @tf.function
    def step(x: Any) -> Any:
        order = names if RANK % 2 else names[::-1]
        results = {n: hvd.allreduce(x * (1.0 + names.index(n)), op=hvd.Sum, name=n) for n in order}
        return [results[name] for name in names]

    for _ in range(STEPS):
        equal(step(tf.constant(MINE)), TOTAL * np.array([1.0, 2.0, 3.0]))
