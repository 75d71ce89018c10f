"""Collectives, eager and in graphs, against NumPy."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import numpy as np
import polyhvd.tensorflow as hvd
import pytest
import tensorflow as tf
from memory import resident_bytes
from tensorflow_common import data, raises

import polyhvd

pytestmark = pytest.mark.ranks(3, framework="tensorflow", timeout_s=400, env={"TF_NUM_INTEROP_THREADS": "4"})


tf.get_logger().setLevel("ERROR")
INTER_OP_THREADS = 4

NUMBERS = ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
NUMBERS += ("uint16", "uint32", "uint64")
SHAPES = ((), (0,), (1,), (7,), (3, 5), (2, 0, 3), (4, 3, 2))
RANK, SIZE = hvd.rank(), hvd.size()
OUTER = hvd.ProcessSet([0, SIZE - 1])


def set_up_on_rank() -> None:
    hvd.add_process_set(OUTER)


def every(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> list[Any]:
    return [data(rank, shape, dtype, seed) for rank in range(SIZE)]


def eager(function: Any) -> Any:
    return function


def recorded(function: Any) -> Any:
    """Under a tape, eager calls go through the op library."""

    def call(*arguments: Any) -> Any:
        with tf.GradientTape():
            return function(*arguments)

    return call


MODES = (eager, recorded, tf.function)


def equal(found: Any, expected: Any, **tolerance: float) -> None:
    array = found.numpy()
    assert tuple(array.shape) == tuple(np.shape(expected)), (array.shape, np.shape(expected))
    np.testing.assert_allclose(
        array.astype(np.float64), np.asarray(expected).astype(np.float64), **(tolerance or {"rtol": 1e-7})
    )


@pytest.mark.ranks(initialized=False)
def test_a_call_before_init_says_so() -> None:
    message = raises(hvd.NotInitializedError, hvd.allreduce, tf.ones([2]))
    assert "hvd.init()" in message
    hvd.init(process_sets=[OUTER])
    assert (hvd.rank(), hvd.size()) == (RANK, SIZE)


def test_sums_match_numpy_for_every_dtype_and_shape() -> None:
    for mode in MODES:
        add = mode(lambda x: hvd.allreduce(x, op=hvd.Sum, name="sum"))
        for dtype in NUMBERS:
            for shape in SHAPES:
                parts = every(shape, dtype)
                total = np.sum(np.stack([np.asarray(p, np.float64) for p in parts]), axis=0)
                result = add(tf.constant(parts[RANK]))
                assert result.dtype.name == dtype
                equal(result, total)  # values are small: nothing wraps around


def test_averages_and_other_reductions_match_numpy() -> None:
    oracles = {hvd.Average: np.mean, hvd.Min: np.min, hvd.Max: np.max, hvd.Product: np.prod}
    for mode in MODES:
        for op, oracle in oracles.items():
            reduce = mode(lambda x, op=op: hvd.allreduce(x, op=op, name=f"op{int(op)}"))
            for dtype in ("int32", "float16", "bfloat16", "float32", "float64"):
                parts = every((5, 3), dtype, seed=1)
                expected = oracle(np.stack(parts).astype(np.float64), axis=0)
                if dtype == "int32":
                    expected = np.trunc(expected)
                tolerance = {"float16": 1e-3, "bfloat16": 1e-2}.get(dtype, 1e-6)
                equal(reduce(tf.constant(parts[RANK])), expected, rtol=tolerance, atol=tolerance)


def test_bool_is_reduced_by_min_and_max() -> None:
    parts = every((11,), "bool")
    for mode in MODES:
        low = mode(lambda x: hvd.allreduce(x, op=hvd.Min, name="bool.min"))(tf.constant(parts[RANK]))
        high = mode(lambda x: hvd.allreduce(x, op=hvd.Max, name="bool.max"))(tf.constant(parts[RANK]))
        assert low.dtype == high.dtype == tf.bool
        np.testing.assert_array_equal(low.numpy(), np.logical_and.reduce(parts))
        np.testing.assert_array_equal(high.numpy(), np.logical_or.reduce(parts))


def test_scales_have_double_precision() -> None:
    for mode in MODES:
        scaled = mode(
            lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=1 / 3, postscale_factor=0.1, name="scaled")
        )
        result = scaled(tf.constant([1.0 + RANK], tf.float64))
        equal(result, [sum(1.0 + r for r in range(SIZE)) / 3 * 0.1], rtol=1e-14)


def test_a_group_of_several_dtypes_is_reduced() -> None:
    shapes = [(2, 3), (), (0,), (4,), (70_000,)]
    dtypes = ["float32", "int32", "float32", "float64", "float32"]
    for mode in MODES:
        reduce = mode(lambda xs: hvd.grouped_allreduce(xs, op=hvd.Sum, name="group"))
        mine = [tf.constant(data(RANK, s, d)) for s, d in zip(shapes, dtypes, strict=True)]
        for result, shape, dtype in zip(reduce(mine), shapes, dtypes, strict=True):
            assert result.dtype.name == dtype
            equal(result, np.sum(every(shape, dtype), axis=0))


def test_gathers_uneven_rows_of_every_dtype() -> None:
    for mode in MODES:
        gather = mode(lambda x: hvd.allgather(x, name="gather"))
        for dtype in (*NUMBERS, "bool"):
            for rest in ((), (3,), (2, 0)):
                parts = [data(r, (r, *rest), dtype) for r in range(SIZE)]  # rank 0 has no row
                result = gather(tf.constant(parts[RANK]))
                assert result.dtype.name == dtype
                equal(result, np.concatenate(parts))


def test_the_shape_of_a_gathered_tensor_is_known_but_for_its_rows() -> None:
    function = tf.function(lambda x: hvd.allgather(x)).get_concrete_function(tf.TensorSpec([2, 5]))
    assert function.structured_outputs.shape.as_list() == [None, 5]
    reduced = tf.function(lambda x: hvd.allreduce(x)).get_concrete_function(tf.TensorSpec([None, 5]))
    assert reduced.structured_outputs.shape.as_list() == [None, 5]


def test_every_root_broadcasts_every_dtype() -> None:
    for mode in MODES:
        for root in range(SIZE):
            send = mode(lambda x, root=root: hvd.broadcast(x, root, name=f"from{root}"))
            for number, dtype in enumerate((*NUMBERS, "bool")):
                if root and number % SIZE != root:
                    continue  # rank 0 sends every type, and each other rank some of them
                for shape in SHAPES[: 4 if root else None]:
                    result = send(tf.constant(data(RANK, shape, dtype)))
                    assert result.dtype.name == dtype
                    equal(result, data(root, shape, dtype))


def test_calls_without_names_match_by_their_order() -> None:
    for mode in MODES:

        def three(x: Any) -> Any:
            first, second = hvd.allreduce(x, op=hvd.Sum), hvd.allreduce(x * 2, op=hvd.Sum)
            return first, second, hvd.allgather(tf.reshape(x, [1]))

        first, second, gathered = mode(three)(tf.constant(float(RANK + 1)))
        total = sum(range(1, SIZE + 1))
        assert (float(first), float(second)) == (total, 2 * total)
        equal(gathered, np.arange(1, SIZE + 1))


def test_large_results_do_not_share_memory_with_each_other() -> None:
    elements = 1 << 20  # above the threshold of the block pool
    ones = tf.ones([elements])
    reduce = recorded(lambda x: hvd.allreduce(x, op=hvd.Sum, name="large"))
    results = [reduce(ones * float(i + RANK)) for i in range(4)]
    for i, result in enumerate(results):
        assert float(tf.reduce_min(result)) == float(tf.reduce_max(result)) == sum(i + r for r in range(SIZE))
    del results
    for i in range(4):  # in memory that was used before
        result = reduce(ones * float(i))
        assert float(tf.reduce_max(result)) == i * SIZE
        assert float(tf.reduce_max(ones)) == 1.0


def test_an_input_that_is_used_elsewhere_keeps_its_value() -> None:
    @tf.function
    def both(x: Any) -> Any:
        doubled = x * 2.0
        return doubled, hvd.allreduce(doubled, op=hvd.Sum), hvd.allreduce(x + 1.0, op=hvd.Sum)

    for elements in (5, 1 << 18):
        x = tf.fill([elements], float(RANK))
        for _ in range(3):
            doubled, summed, forwarded = both(x)
            assert np.all(doubled.numpy() == 2.0 * RANK)
            assert np.all(summed.numpy() == sum(2.0 * r for r in range(SIZE)))
            assert np.all(forwarded.numpy() == sum(r + 1.0 for r in range(SIZE)))
            assert np.all(x.numpy() == RANK)


def test_more_operations_than_threads_in_any_order_do_not_deadlock() -> None:
    count = 10 * INTER_OP_THREADS
    order = np.random.default_rng(RANK).permutation(count).tolist()  # another one on each rank

    @tf.function
    def all_at_once(x: Any) -> Any:
        results: list[Any] = [None] * count
        for i in order:
            results[i] = hvd.allreduce(x + float(i), op=hvd.Sum, name=f"many.{i}")
        return results

    for _ in range(5):
        for i, result in enumerate(all_at_once(tf.constant([float(RANK)]))):
            equal(result, [sum(r + i for r in range(SIZE))])


def test_a_chain_of_operations_in_a_graph_keeps_its_order() -> None:
    @tf.function
    def chain(x: Any) -> Any:
        for _ in range(20):
            x = hvd.allreduce(x + 1.0)
        return x

    equal(chain(tf.constant([float(RANK)])), [20 + (SIZE - 1) / 2])


def test_a_result_that_one_rank_does_not_use_is_computed_all_the_same() -> None:
    @tf.function
    def step(x: Any) -> Any:
        total = hvd.allreduce(x, op=hvd.Sum, name="unused")
        return total if RANK == 0 else x

    for _ in range(3):
        assert float(step(tf.constant(1.0 + RANK))) == (sum(range(1, SIZE + 1)) if RANK == 0 else 1.0 + RANK)
    assert float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum)) == SIZE


def late(x: Any, delay_s: Any) -> Any:
    """The same values, later; without state, so that TensorFlow is free to run other things first."""

    def wait(value: Any, seconds: Any) -> Any:
        time.sleep(float(seconds))
        return value

    seconds = tf.cast(delay_s, tf.float64)
    return tf.ensure_shape(tf.numpy_function(wait, [x, seconds], x.dtype, stateful=False), x.shape)


def test_two_calls_of_one_function_in_a_graph_do_not_mix() -> None:
    inner = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))

    @tf.function
    def outer(x: Any) -> Any:
        # Without an order the first call would come second on rank 0.
        first = late(x, 0.03) if RANK == 0 else x
        third = late(x * 100.0, 0.03) if RANK != 1 else x * 100.0
        return inner(first), inner(x * 10.0), inner(third)

    total = sum(range(1, SIZE + 1))
    for _ in range(5):
        results = outer(tf.constant(1.0 + RANK))
        assert [float(r) for r in results] == [total, 10 * total, 100 * total]


def test_iterations_of_a_loop_do_not_mix() -> None:
    @tf.function
    def loop(x: Any) -> Any:
        results = tf.TensorArray(tf.float32, 8)
        for i in tf.range(8):
            scaled = x * tf.cast(i, tf.float32)
            delayed = late(scaled, tf.cast((i + RANK) % 3, tf.float64) / 100.0)
            results = results.write(i, hvd.allreduce(delayed, op=hvd.Sum))
        return results.stack()

    total = sum(range(1, SIZE + 1))
    for _ in range(3):
        equal(loop(tf.constant(1.0 + RANK)), [total * i for i in range(8)])


def test_a_loop_that_depends_on_its_own_result_works() -> None:
    def step(i: Any, x: Any) -> Any:
        return i + 1, hvd.allreduce(x, op=hvd.Average) * 2.0

    def run(x: Any) -> Any:
        return tf.while_loop(lambda i, _: i < 5, step, (0, x))[1]

    for mode in (eager, tf.function):
        assert float(mode(run)(tf.constant(float(RANK)))) == 32 * (SIZE - 1) / 2


def test_both_branches_of_a_condition_may_communicate() -> None:
    @tf.function
    def branch(x: Any, up: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum) if up else -hvd.allreduce(x, op=hvd.Max)

    x = tf.constant(1.0 + RANK)
    for _ in range(2):
        assert float(branch(x, tf.constant(True))) == sum(range(1, SIZE + 1))
        assert float(branch(x, tf.constant(False))) == -SIZE


def test_a_function_that_one_rank_traces_again_still_matches() -> None:
    function = tf.function(lambda x: hvd.allgather(x) * 1.0)
    for rows in (2, 3 if RANK == 0 else 2, 2):
        assert function(tf.ones([rows, 2])).shape[0] >= 2 * SIZE


def test_gradients_go_through_reductions() -> None:
    weights = tf.constant([1.0, 2.0]) * (RANK + 1)

    for op, scale in ((hvd.Sum, 1.0), (hvd.Average, 1.0 / SIZE)):

        def gradient(x: Any, op: Any = op) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(hvd.allreduce(x * x, op=op) * weights)
            return tape.gradient(loss, x)

        x = tf.constant([3.0, RANK + 1.0])
        expected = 2 * x.numpy() * np.array([1.0, 2.0]) * sum(range(1, SIZE + 1)) * scale
        for mode in (eager, tf.function):
            equal(mode(gradient)(x), expected, rtol=1e-6)


def test_gradients_go_through_groups_and_unused_members() -> None:
    def gradients(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            first, _ = hvd.grouped_allreduce([x * 2.0, y], op=hvd.Sum, prescale_factor=0.5)
            loss = tf.reduce_sum(first)
        return tape.gradient(loss, [x, y])

    for mode in (eager, tf.function):
        dx, dy = mode(gradients)(tf.ones([2]), tf.ones([3]))
        equal(dx, np.full(2, float(SIZE)))
        equal(dy, np.zeros(3))


def test_gradients_go_through_gathers_and_broadcasts() -> None:
    def gathered(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            everything = hvd.allgather(x)
            weights = tf.range(1.0, tf.cast(tf.shape(everything)[0], tf.float32) + 1.0)[:, None]
            loss = tf.reduce_sum(everything * weights) * (RANK + 1.0)
        return tape.gradient(loss, x)

    def sent(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = hvd.broadcast(x, 1) * (RANK + 1.0)
        return tape.gradient(loss, x)

    total = float(sum(range(1, SIZE + 1)))
    before = sum(r + 1 for r in range(RANK))
    expected = np.arange(before + 1.0, before + RANK + 2.0)[:, None] * np.ones([1, 2]) * total / SIZE
    for mode in (eager, tf.function):
        equal(mode(gathered)(tf.ones([RANK + 1, 2])), expected)
        equal(mode(sent)(tf.constant(5.0)), total / SIZE if RANK == 1 else 0.0)


def test_a_maximum_has_no_gradient_and_says_so() -> None:
    x = tf.constant(1.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = hvd.allreduce(x, op=hvd.Max)
    assert "no gradient" in raises(tf.errors.InvalidArgumentError, tape.gradient, y, x)


def test_compression_casts_on_the_wire_only() -> None:
    for mode in MODES:
        for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
            result = mode(lambda x, c=compression: hvd.allreduce(x, compression=c))(tf.constant([1.0 + RANK]))
            assert result.dtype == tf.float32
            equal(result, [(SIZE + 1) / 2])


def test_a_process_set_communicates_by_itself() -> None:
    members = [0, SIZE - 1]

    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(hvd.allgather(x, process_set=OUTER) * [[1.0], [2.0]]) * (RANK + 1.0)
        return tape.gradient(loss, x)

    for mode in MODES:
        average = mode(lambda x: hvd.allreduce(x, process_set=OUTER))
        send = mode(lambda x: hvd.broadcast(x, SIZE - 1, process_set=OUTER))
        if RANK not in members:
            message = raises(tf.errors.InvalidArgumentError, average, tf.ones([1]))
            assert "not in process set" in message
            continue
        equal(average(tf.constant([float(RANK)])), [(SIZE - 1) / 2])
        equal(send(tf.constant([float(RANK)])), [SIZE - 1])
        position = members.index(RANK)
        equal(mode(gradient)(tf.ones([1, 1])), [[(position + 1.0) * (SIZE + 1) / 2]])


def test_names_do_not_depend_on_operations_of_other_process_sets() -> None:
    def some_and_all(x: Any) -> Any:
        if RANK in (0, SIZE - 1):
            x = hvd.allreduce(x, process_set=OUTER) * 0.0 + x
        return hvd.allreduce(x, op=hvd.Sum)

    for mode in MODES:
        assert float(mode(some_and_all)(tf.constant(1.0 + RANK))) == sum(range(1, SIZE + 1))


def test_handles_are_polled_and_synchronized() -> None:
    handles = [hvd.allreduce_async(tf.constant([float(i + RANK)]), op=hvd.Sum) for i in range(20)]
    gather = hvd.allgather_async(tf.fill([RANK + 1], RANK))
    send = hvd.broadcast_async(tf.constant(RANK), 2)
    group = hvd.grouped_allreduce_async([tf.constant(1.0), tf.constant([2.0])], op=hvd.Sum)
    for i, handle in enumerate(handles):
        equal(hvd.synchronize(handle), [sum(i + r for r in range(SIZE))])
        assert hvd.poll(handle)
    equal(hvd.synchronize(gather), np.repeat(np.arange(SIZE), np.arange(SIZE) + 1))
    assert int(hvd.synchronize(send)) == 2
    one, two = hvd.synchronize(group)
    equal(one, SIZE)
    equal(two, [2 * SIZE])


def test_a_name_in_flight_is_refused_at_submit() -> None:
    if RANK == 0:
        first = hvd.allreduce_async(tf.constant(1.0), name="twice")
        message = raises(
            tf.errors.InvalidArgumentError, lambda: hvd.allreduce_async(tf.constant(1.0), name="twice")
        )
        assert "in flight" in message
    hvd.barrier()
    if RANK != 0:
        first = hvd.allreduce_async(tf.constant(1.0), name="twice")
    assert float(hvd.synchronize(first)) == 1.0


def test_a_mismatch_fails_on_every_rank_and_the_job_goes_on() -> None:
    for mode in MODES:
        by_shape = mode(lambda x: hvd.allreduce(x, name="shapes"))
        message = raises(tf.errors.FailedPreconditionError, by_shape, tf.ones([2 + RANK]))
        assert "Mismatched" in message, message
        assert all(f"rank {r}" in message for r in range(SIZE)), message
        by_type = mode(lambda x: hvd.allreduce(x, name="types"))
        raises(tf.errors.FailedPreconditionError, by_type, tf.ones([2], tf.float32 if RANK else tf.int32))
        rows = mode(lambda x: hvd.allgather(x, name="rows"))
        raises(tf.errors.FailedPreconditionError, rows, tf.ones([1, 2 + RANK]))
        root = mode(lambda x: hvd.broadcast(x, RANK % 2, name="root"))
        raises(tf.errors.FailedPreconditionError, root, tf.ones([1]))
        equal(by_shape(tf.ones([3])), np.ones(3))


def test_eager_errors_are_of_tensorflow_and_of_horovod() -> None:
    for call in (eager, recorded):
        mismatched = call(lambda: hvd.allreduce(tf.ones([2 + RANK]), name="both"))
        raises(hvd.RankMismatchError, mismatched)
        outside = call(lambda: hvd.broadcast(tf.ones([2]), SIZE + 3, name="outside"))
        raises(tf.errors.InvalidArgumentError, outside)
        raises(ValueError, outside)


def test_an_error_of_a_graph_that_runs_names_its_class() -> None:
    """TensorFlow raises its own class there; eager code has ours, and no need of the name."""
    mismatched = tf.function(lambda x: hvd.allreduce(x, name="named"))
    message = raises(tf.errors.FailedPreconditionError, mismatched, tf.ones([2 + RANK]))
    assert "RankMismatchError: " in message, message
    for call in (eager, recorded):
        direct = call(lambda: hvd.allreduce(tf.ones([2 + RANK]), name="direct"))
        assert "Error: " not in raises(hvd.RankMismatchError, direct)


def test_an_error_names_the_callers_line() -> None:
    def call() -> Any:
        return hvd.allreduce(tf.ones([2 + RANK]), name="line")

    for mode in MODES:
        message = raises(tf.errors.FailedPreconditionError, mode(call))
        assert "(test_tensorflow_ops.py:" in message, message


def test_bad_calls_are_refused_before_anything_is_sent() -> None:
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([3, 2]))
    assert "tf.convert_to_tensor" in raises(ValueError, hvd.allgather, slices)
    raises((ValueError, tf.errors.InvalidArgumentError), hvd.allgather, tf.constant(1.0))
    raises((ValueError, tf.errors.InvalidArgumentError), tf.function(hvd.allgather), tf.constant(1.0))
    raises(tf.errors.InvalidArgumentError, hvd.allreduce, tf.constant(True))
    raises(ValueError, lambda: hvd.allreduce(tf.ones([1]), device_dense="/gpu:0"))
    message = raises(TypeError, tf.function(lambda x: hvd.allreduce_async(x)), tf.ones([1]))
    assert "tf.function" in message


def test_xla_is_refused_with_advice() -> None:
    compiled = tf.function(lambda x: hvd.allreduce(x), jit_compile=True)
    assert "jit_compile=False" in raises(tf.errors.InvalidArgumentError, compiled, tf.ones([1]))
    equal(hvd.allreduce(tf.constant([float(RANK)])), [(SIZE - 1) / 2])


def test_variables_in_another_order_on_one_rank_are_refused() -> None:
    """Pairs go by position: equal shapes would be mixed up silently."""
    layers = [tf.keras.layers.Dense(2, name=name) for name in ("first", "second")]
    for layer in layers:
        layer.build((1, 2))
    kernels = [layer.kernel for layer in layers]
    before = [kernel.numpy() for kernel in kernels]
    mixed = kernels if RANK != 1 else kernels[::-1]
    error = raises(tf.errors.FailedPreconditionError, hvd.broadcast_variables, mixed, 0)
    assert "broadcast_variables: the ranks have the same names in different orders: at position 0, " in error
    assert "rank 1 has 'second/kernel" in error
    for kernel, values in zip(kernels, before, strict=True):
        equal(kernel, values)


@pytest.mark.parametrize("few", [0, 1])
def test_another_number_of_variables_on_one_rank_is_refused(few: int) -> None:
    variables = [tf.Variable(tf.ones([2])) for _ in range(few if RANK == 1 else 2)]
    error = raises(tf.errors.FailedPreconditionError, hvd.broadcast_variables, variables, 0)
    assert "broadcast_variables: the ranks have different numbers of variables: rank" in error
    assert f"rank 1 has {few}" in error
    assert hvd.broadcast_([], 0) == []
    equal(hvd.allreduce(tf.ones([1])), [1.0])


def test_variables_of_layers_that_keras_has_numbered_otherwise_are_paired_by_position() -> None:
    if RANK == 1:
        tf.keras.layers.Dense(1)
    layers = [tf.keras.layers.Dense(2, kernel_initializer="ones" if RANK else "zeros") for _ in range(2)]
    for layer in layers:
        layer.build((1, 2))
    hvd.broadcast_variables([layer.kernel for layer in layers], root_rank=0)
    for layer in layers:
        equal(layer.kernel, np.zeros((2, 2)))


def test_variables_take_the_roots_values() -> None:
    variables = [tf.Variable(data(RANK, s, d)) for s in ((), (3, 2)) for d in ("float32", "int64")]
    hvd.broadcast_variables(variables, root_rank=1)
    for variable, (shape, dtype) in zip(
        variables, [(s, d) for s in ((), (3, 2)) for d in ("float32", "int64")], strict=True
    ):
        equal(variable, data(1, shape, dtype))
    state = tf.Variable(float(RANK))

    @tf.function
    def in_graph() -> None:
        hvd.broadcast_([state], 2, name="state")

    in_graph()
    assert float(state) == 2.0
    state.assign(-1.0)  # the buffer is the variable's own
    assert float(state) == -1.0


def test_objects_travel() -> None:
    assert hvd.broadcast_object({"rank": RANK}, root_rank=1) == {"rank": 1}
    assert hvd.broadcast_object_fn(root_rank=2)([RANK]) == [2]
    assert hvd.allgather_object("x" * RANK) == ["", "x", "xx"][:SIZE]


def test_a_graph_of_version_1_works() -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("v", initializer=float(RANK))
        send = hvd.broadcast_variables([variable], 1)
        total = hvd.allreduce(variable, op=hvd.Sum)
        session.run(tf.compat.v1.global_variables_initializer())
        assert session.run(total) == sum(range(SIZE))
        session.run(send)
        assert session.run(variable) == 1.0


def test_threads_may_call_at_once() -> None:
    results: dict[int, float] = {}

    def work(i: int) -> None:
        for k in range(20):
            results[i] = float(hvd.allreduce(tf.constant(float(i + k)), op=hvd.Sum, name=f"thread.{i}"))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: float((i + 19) * SIZE) for i in range(4)}


def test_memory_does_not_grow() -> None:
    @tf.function
    def step(x: Any) -> Any:
        parts = [hvd.allreduce(x + float(i), name=f"leak.{i}") for i in range(5)]
        return tf.add_n(hvd.grouped_allreduce(parts)) + tf.reduce_sum(hvd.allgather(x))

    x = tf.ones([4096])
    for _ in range(100):
        step(x)
        recorded(lambda: hvd.allreduce(x))()
        hvd.allreduce(x)
    before = resident_bytes()
    for _ in range(300):
        step(x)
        recorded(lambda: hvd.allreduce(x))()
        hvd.allreduce(x)
    assert resident_bytes() - before < 8 << 20


def test_pending_operations_fail_at_shutdown_and_a_new_engine_works() -> None:
    function = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, name="again"))
    assert float(function(tf.constant(1.0))) == SIZE
    lonely = tf.function(lambda x: hvd.allreduce(x, name=f"lonely.{RANK}"))
    errors: list[Exception] = []

    def wait_for_nobody() -> None:
        try:
            lonely(tf.constant(1.0))
        except Exception as error:
            errors.append(error)

    waiting = threading.Thread(target=wait_for_nobody)
    waiting.start()
    while polyhvd.counters()["pending"] == 0 and not errors:  # another rank may have left already
        time.sleep(0.001)
    hvd.shutdown()
    waiting.join(60)
    assert len(errors) == 1, errors
    assert isinstance(errors[0], tf.errors.AbortedError), errors
    assert re.search("(ShutdownError|PeerDepartedError): ", str(errors[0])), errors
    # A function that was traced before says that there is no engine.
    message = raises(tf.errors.FailedPreconditionError, function, tf.constant(1.0))
    assert "NotInitializedError: " in message, message
    assert "hvd.init()" in message, message
    for _ in range(3):
        hvd.init()
        assert float(function(tf.constant(1.0))) == SIZE
        equal(hvd.allreduce(tf.constant([float(RANK)])), [(SIZE - 1) / 2])
        hvd.shutdown()
