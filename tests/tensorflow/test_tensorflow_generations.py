"""What was begun in a world that has ended, run as three ranks.

Between shutdown() and the next init() something of the old world is left: it must fail as lost, and not reach
the new one, where other ranks do not expect it.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import polyhvd.tensorflow as hvd
import pytest
import tensorflow as tf
from polyhvd.tensorflow.errors import as_polyhvd
from tensorflow_common import raises

import polyhvd

#: One thread for ops that may wait: what is asked for after such an op is asked for when it has ended.
pytestmark = pytest.mark.ranks(3, framework="tensorflow", timeout_s=400, env={"TF_NUM_INTEROP_THREADS": "1"})


tf.get_logger().setLevel("ERROR")

RANK, SIZE = hvd.rank(), hvd.size()
#: What this rank contributes, and the sum over the ranks.
MINE = RANK + 1.0
TOTAL = sum(range(1, SIZE + 1))


class Gate:
    """Holds up a graph that has come to it, until it is opened."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def _pass(self, value: Any) -> Any:
        self.entered.set()
        assert self.opened.wait(60)
        return value

    def __call__(self, tensor: Any) -> Any:
        result = tf.numpy_function(self._pass, [tensor], tensor.dtype)
        result.set_shape(tensor.shape)
        return result


def test_averages_in_a_function_are_those_of_the_world_in_which_it_runs() -> None:
    table, own = tf.Variable(tf.zeros([3, 1])), tf.Variable(0.0)
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(1.0))
    optimizer.build([table, own])
    optimizer.register_local_var(own)

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [0])) + own
        optimizer.apply(tape.gradient(loss, [table, own]), [table, own])

    hvd.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYHVD_ALONE", "1")
        hvd.init()
        step()
        assert [float(table[0, 0]), float(own)] == [-1.0, -1.0]
        hvd.shutdown()
    hvd.init()
    step()
    assert [float(table[0, 0]), float(own)] == [-2.0, pytest.approx(-1.0 - 1.0 / SIZE)]


@pytest.mark.parametrize("kind", ["allgather", "alltoall", "broadcast", "reducescatter"])
def test_gradients_in_a_function_are_those_of_the_world_in_which_it_runs(kind: str) -> None:
    def size() -> Any:
        return tf.cast(hvd.size_op(), tf.float64)

    collectives = {
        "allgather": lambda x: hvd.allgather(x, name="x") * size(),
        "alltoall": lambda x: hvd.alltoall(x, name="x"),
        "broadcast": lambda x: hvd.broadcast(x, 0, name="x") * size(),
        "reducescatter": lambda x: hvd.reducescatter(x, op=hvd.Sum, name="x") / size(),
    }

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float64)])
    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            result = collectives[kind](x)
            factors = MINE * tf.cast(tf.range(1, tf.size(result) + 1), tf.float64)
            loss = tf.reduce_sum(result * factors)
        return tape.gradient(loss, x)

    rows = [1.0, 2.0]
    alone = [MINE * row for row in rows]
    hvd.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYHVD_ALONE", "1")
        hvd.init()
        assert gradient(tf.ones([2], tf.float64)).numpy().tolist() == alone
        hvd.shutdown()
    hvd.init()
    found = gradient(tf.ones([2 * SIZE], tf.float64)).numpy().tolist()
    pieces = {
        "allgather": [TOTAL * (2.0 * SIZE * RANK + row) for row in range(1, 2 * SIZE + 1)],
        "alltoall": [(rank + 1.0) * (2 * RANK + row) for rank in range(SIZE) for row in rows],
        "broadcast": [TOTAL * row * (RANK == 0) for row in range(1, 2 * SIZE + 1)],
        "reducescatter": [(rank + 1.0) * row for rank in range(SIZE) for row in rows],
    }
    assert found == pieces[kind]


def rewire() -> None:
    hvd.shutdown()
    hvd.init()


def error_across_a_rewiring(gate: Gate, call: Callable[[], Any]) -> BaseException:
    """What a call raises that is at its gate while the world ends and another one begins."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            print("no error:", call(), flush=True)
        except Exception as error:
            errors.append(error)

    running = threading.Thread(target=run)
    running.start()
    assert gate.entered.wait(60), errors
    hvd.barrier()  # a rank that left now would end the calls of others before their gates
    rewire()
    before = polyhvd.counters()["operations"]
    hvd.barrier()
    gate.opened.set()
    running.join(60)
    assert not running.is_alive()
    hvd.barrier()
    assert polyhvd.counters()["operations"] == before + 2, "something has reached the new world"
    (error,) = errors
    return error


def check_lost(error: BaseException) -> None:
    assert isinstance(error, tf.errors.AbortedError), repr(error)
    translated = as_polyhvd(error)
    assert isinstance(translated, hvd.PeerLostError), repr(translated)
    assert "which has ended" in str(translated), translated
    assert "[[" not in str(translated), translated


def value() -> Any:
    return tf.constant(MINE)


def test_a_call_is_lost_after_a_rewiring() -> None:
    hvd.init()
    gate = Gate()
    step = tf.function(lambda x: hvd.allreduce(gate(x), op=hvd.Sum, name="late"))
    check_lost(error_across_a_rewiring(gate, lambda: step(value())))
    assert float(step(value())) == TOTAL  # the next call belongs to the new world


def test_a_call_in_a_branch_or_a_loop_is_lost_after_a_rewiring() -> None:
    for kind in ("branch", "loop", "both"):
        gate = Gate()

        def body(x: Any, gate: Gate = gate, kind: str = kind) -> Any:
            def reduced(x: Any) -> Any:
                return hvd.allreduce(gate(x), op=hvd.Sum, name="inner")

            def chosen(x: Any) -> Any:
                return tf.cond(x > 0.0, lambda: reduced(x), lambda: x)

            if kind == "branch":
                return chosen(x)
            each = reduced if kind == "loop" else chosen
            return tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, each(x)), (0, x))[1]

        step = tf.function(body)
        check_lost(error_across_a_rewiring(gate, lambda step=step: step(value())))
        assert float(step(value())) == TOTAL * (1 if kind == "branch" else SIZE)


def test_a_call_of_a_nested_function_is_lost_after_a_rewiring() -> None:
    gate = Gate()
    inner = tf.function(lambda x: hvd.allreduce(gate(x), op=hvd.Sum, name="nested"))
    outer = tf.function(lambda x: inner(x) + 1.0)
    check_lost(error_across_a_rewiring(gate, lambda: outer(value())))
    assert float(outer(value())) == TOTAL + 1


def test_a_call_beside_a_switch_or_a_branch_or_of_a_function_in_a_loop_is_lost_after_a_rewiring() -> None:
    def reduced(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum, name="one")

    for kind in ("switch", "behind a branch", "function in a loop"):
        gate = Gate()
        gated = tf.function(lambda x, gate=gate: reduced(gate(x)))

        def body(x: Any, gate: Gate = gate, kind: str = kind, gated: Any = gated) -> Any:
            if kind == "switch":
                return tf.switch_case(tf.cast(0 * x, tf.int32), [lambda: reduced(gate(x)), lambda: x])
            if kind == "behind a branch":
                return reduced(tf.cond(x > 0.0, lambda: gate(x), lambda: x))
            return tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, gated(x)), (0, x))[1]

        step = tf.function(body)
        check_lost(error_across_a_rewiring(gate, lambda step=step: step(value())))
        assert float(step(value())) == TOTAL * (SIZE if kind == "function in a loop" else 1)


def test_a_gradient_within_a_call_is_lost_after_a_rewiring() -> None:
    gate = Gate()

    @tf.custom_gradient
    def gated(x: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            with tf.control_dependencies([x]):  # after the forward pass
                return gate(upstream)

        return tf.identity(x), gradient

    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = gated(hvd.allreduce(x, op=hvd.Sum, name="forward"))
        return tape.gradient(y, x)

    check_lost(error_across_a_rewiring(gate, lambda: step(value())))
    assert float(step(value())) == SIZE


def test_a_tape_of_the_old_world_is_lost() -> None:
    gathered = tf.function(lambda x: hvd.allgather(x, name="g"))
    calls: dict[str, Callable[[Any], Any]] = {
        "allreduce": lambda x: hvd.allreduce(x, op=hvd.Sum, name="e"),
        "without a name": lambda x: hvd.allreduce(x, op=hvd.Sum),
        "allgather": lambda x: hvd.allgather(x, name="e"),
        "broadcast": lambda x: hvd.broadcast(x, 0, name="e"),
        "alltoall": lambda x: hvd.alltoall(x, name="e"),
        "reducescatter": lambda x: hvd.reducescatter(x, op=hvd.Sum, name="e"),
        "in a function": gathered,
    }
    for kind, call in calls.items():
        x = tf.Variable(tf.fill([SIZE], MINE))
        with tf.GradientTape(persistent=True) as tape:
            y = call(tf.convert_to_tensor(x))
        assert tape.gradient(y, x) is not None
        hvd.barrier()
        rewire()
        before = polyhvd.counters()["operations"]
        try:
            tape.gradient(y, x)
        except tf.errors.AbortedError as error:
            check_lost(error)
        else:
            raise AssertionError(f"{kind}: the gradient was computed in another world")
        assert polyhvd.counters()["operations"] == before, kind
        with tf.GradientTape() as tape:
            y = call(tf.convert_to_tensor(x))
        assert tape.gradient(y, x) is not None, kind


def test_a_loaded_function_is_lost_after_a_rewiring() -> None:
    module = tf.Module()
    module.step = tf.function(
        lambda x: hvd.allreduce(x, op=hvd.Sum, name="saved"), input_signature=[tf.TensorSpec([], tf.float32)]
    )
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(module, folder)
        loaded = tf.saved_model.load(folder)
    assert float(loaded.step(value())) == TOTAL
    rewire()
    assert float(loaded.step(value())) == TOTAL  # each call has a generation of its own


def test_a_session_runs_in_the_world_that_there_is() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [])
        total = hvd.allreduce(x, op=hvd.Sum, name="session")
        _, looped = tf.while_loop(
            lambda i, _: i < 2, lambda i, x: (i + 1, hvd.allreduce(x, op=hvd.Sum, name="looped")), (0, x)
        )
    with tf.compat.v1.Session(graph=graph) as session:
        for _ in range(2):
            assert session.run(total, {x: MINE}) == TOTAL
            assert session.run(looped, {x: MINE}) == TOTAL * SIZE
            hvd.barrier()
            rewire()


def test_vectorized_calls_have_one_generation() -> None:
    rows = tf.reshape(tf.range(6, dtype=tf.float32), [3, 2]) * MINE

    def each(row: Any) -> Any:
        return hvd.allreduce(row, op=hvd.Sum, name="row")

    step = tf.function(lambda rows: tf.vectorized_map(each, rows))
    after = tf.function(lambda rows: tf.vectorized_map(each, hvd.allreduce(rows, op=hvd.Sum, name="before")))
    expected = np.arange(6).reshape(3, 2) * TOTAL
    for _ in range(2):
        np.testing.assert_array_equal(step(rows), expected)
        np.testing.assert_array_equal(after(rows), expected * SIZE)
        np.testing.assert_array_equal(tf.vectorized_map(each, rows), expected)
        hvd.barrier()
        rewire()


def test_a_call_that_ends_without_a_world_is_told_of_the_shutdown() -> None:
    gate = Gate()
    step = tf.function(lambda x: hvd.allreduce(gate(x), op=hvd.Sum, name="late"))
    errors: list[BaseException] = []

    def run() -> None:
        try:
            step(value())
        except Exception as error:
            errors.append(error)

    running = threading.Thread(target=run)
    running.start()
    assert gate.entered.wait(60)
    hvd.barrier()
    hvd.shutdown()
    gate.opened.set()
    running.join(60)
    (error,) = errors
    assert isinstance(as_polyhvd(error), hvd.ShutdownError), error
    message = raises(tf.errors.FailedPreconditionError, step, value())
    assert "NotInitializedError: " in message, message
    hvd.init()
