"""Exchanges, scatters, groups, slices, joins against NumPy."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polyhvd.tensorflow as hvd
import pytest
import tensorflow as tf
from tensorflow_common import data, raises

import polyhvd

pytestmark = pytest.mark.ranks(3, framework="tensorflow", timeout_s=400, env={"TF_NUM_INTEROP_THREADS": "4"})


tf.get_logger().setLevel("ERROR")

DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
DTYPES += ("uint16", "uint32", "uint64")
RANK, SIZE = hvd.rank(), hvd.size()
OUTER = hvd.ProcessSet([0, SIZE - 1])


def set_up_on_rank() -> None:
    hvd.add_process_set(OUTER)


#: Rows that rank r sends to rank k; rank 0 sends nothing to itself, and keeps a row back.
SPLITS = [[(r + k) % SIZE for k in range(SIZE)] for r in range(SIZE)]
ROWS = [sum(row) + (r == 0) for r, row in enumerate(SPLITS)]


def eager(function: Any) -> Any:
    return function


def recorded(function: Any) -> Any:
    """Under a tape, eager calls go through the op library."""

    def call(*arguments: Any) -> Any:
        with tf.GradientTape():
            return function(*arguments)

    return call


MODES = (eager, recorded, tf.function)
DIFFERENTIABLE = (eager, tf.function)


def equal(found: Any, expected: Any, **tolerance: float) -> None:
    array = found.numpy()
    assert tuple(array.shape) == tuple(np.shape(expected)), (array.shape, np.shape(expected))
    np.testing.assert_allclose(
        array.astype(np.float64), np.asarray(expected).astype(np.float64), **(tolerance or {"rtol": 1e-7})
    )


def rows_of(rank: int, rows: int, size: int = SIZE) -> slice:
    """What a rank keeps of a reducescatter: the first ranks have one more."""
    counts = [rows // size + (r < rows % size) for r in range(size)]
    return slice(sum(counts[:rank]), sum(counts[: rank + 1]))


def sent_to(rank: int, sources: list[Any]) -> list[Any]:
    """What each rank sends to one, by SPLITS."""
    begins = [np.cumsum([0, *row]) for row in SPLITS]
    return [part[begins[r][rank] : begins[r][rank + 1]] for r, part in enumerate(sources)]


def operations() -> int:
    return polyhvd.counters()["operations"]


def test_equal_parts_of_every_dtype_are_exchanged() -> None:
    for mode in MODES:
        exchange = mode(lambda x: hvd.alltoall(x, name="parts"))
        for dtype in (*DTYPES, "bool"):
            for rest in ((), (2,), (0, 2)):
                parts = [data(r, ((r + 1) * SIZE, *rest), dtype) for r in range(SIZE)]
                result = exchange(tf.constant(parts[RANK]))
                assert result.dtype.name == dtype
                mine = [p[RANK * (r + 1) : (RANK + 1) * (r + 1)] for r, p in enumerate(parts)]
                equal(result, np.concatenate(mine))


def test_splits_say_how_many_rows_go_where() -> None:
    parts = [data(r, (rows, 2), "int32") for r, rows in enumerate(ROWS)]
    mine = SPLITS[RANK]
    forms: list[Callable[[], Any]] = [
        lambda: mine,
        lambda: tuple(mine),
        lambda: np.array(mine),
        lambda: tf.constant(mine),
        lambda: tf.constant(mine, tf.int64),
        lambda: tf.Variable(mine, trainable=False),
    ]
    for mode in (eager, recorded):
        for form in forms:
            result, received = mode(lambda x, f=form: hvd.alltoall(x, f()))(tf.constant(parts[RANK]))
            equal(result, np.concatenate(sent_to(RANK, parts)))
            assert received.dtype == tf.int32
            equal(received, [SPLITS[r][RANK] for r in range(SIZE)])
    for form in forms[:-1]:
        result, received = tf.function(lambda x, f=form: hvd.alltoall(x, splits=f()))(
            tf.constant(parts[RANK])
        )
        equal(result, np.concatenate(sent_to(RANK, parts)))
        equal(received, [SPLITS[r][RANK] for r in range(SIZE)])


def test_splits_may_be_known_only_when_the_graph_runs() -> None:
    for dtype in (tf.int32, tf.int64):
        spec = [tf.TensorSpec([None, 2], tf.int32), tf.TensorSpec(None, dtype)]
        label = f"later.{dtype.name}"
        exchange = tf.function(lambda x, s: hvd.alltoall(x, splits=s, name=label), input_signature=spec)  # noqa: B023
        hits = polyhvd.counters()["cache_hits"]
        for turn in range(3):
            parts = [data(r, (rows, 2), "int32", turn) for r, rows in enumerate(ROWS)]
            mine = tf.constant(SPLITS[RANK] if turn else [0] * SIZE, dtype)
            result, received = exchange(tf.constant(parts[RANK]), mine)
            equal(received, [SPLITS[r][RANK] if turn else 0 for r in range(SIZE)])
            equal(result, np.concatenate(sent_to(RANK, parts)) if turn else np.zeros((0, 2)))
        # Other numbers of rows are the same agreement.
        assert polyhvd.counters()["cache_hits"] - hits == 2
        function = exchange.get_concrete_function()
        assert [t.shape.as_list() for t in function.structured_outputs] == [[None, 2], [None]]
        message = raises(
            tf.errors.InvalidArgumentError, exchange, tf.ones([4, 2], tf.int32), tf.constant(2, dtype)
        )
        assert "splits" in message


def test_scattered_sums_match_numpy() -> None:
    for mode in MODES:
        scatter = mode(lambda x: hvd.reducescatter(x, op=hvd.Sum, name="scatter"))
        for dtype in DTYPES:
            for shape in ((SIZE,), (7, 2), (2,), (0, 3), (4, 3, 2)):
                parts = [data(r, shape, dtype) for r in range(SIZE)]
                total = np.sum(np.stack([np.asarray(p, np.float64) for p in parts]), axis=0)
                result = scatter(tf.constant(parts[RANK]))
                assert result.dtype.name == dtype
                equal(result, total[rows_of(RANK, shape[0])])


def test_scattered_averages_and_scales_match_numpy() -> None:
    parts = [data(r, (5, 2), "float64", 1) for r in range(SIZE)]
    oracles = {hvd.Average: np.mean, hvd.Min: np.min, hvd.Max: np.max, hvd.Product: np.prod}
    for mode in MODES:
        for op, oracle in oracles.items():
            result = mode(lambda x, op=op: hvd.reducescatter(x, op=op))(tf.constant(parts[RANK]))
            equal(result, oracle(np.stack(parts), axis=0)[rows_of(RANK, 5)])
        scaled = mode(lambda x: hvd.reducescatter(x, prescale_factor=1 / 3, postscale_factor=0.1))
        equal(scaled(tf.constant(parts[RANK])), np.mean(parts, axis=0)[rows_of(RANK, 5)] / 30, rtol=1e-14)
        halved = mode(lambda x: hvd.reducescatter(x, compression=hvd.Compression.fp16))
        assert halved(tf.constant(parts[RANK])).dtype == tf.float64


def test_the_shape_of_a_part_is_known_but_for_its_rows() -> None:
    for call in (hvd.reducescatter, hvd.alltoall):
        function = tf.function(lambda x, call=call: call(x)).get_concrete_function(tf.TensorSpec([6, 5]))
        assert function.structured_outputs.shape.as_list() == [None, 5]


def test_a_group_of_any_kind_and_of_several_dtypes_is_one_operation() -> None:
    dtypes = ("float32", "int64", "float16", "float32", "uint8")
    parts = [[data(r, (2 + i, 3), d) for i, d in enumerate(dtypes)] for r in range(SIZE)]
    total = [np.sum(np.stack([p[i] for p in parts]), axis=0) for i in range(len(dtypes))]
    cases: list[tuple[Any, list[Any]]] = [
        (lambda xs: hvd.grouped_allreduce(xs, op=hvd.Sum, name="g"), total),
        (
            lambda xs: hvd.grouped_reducescatter(xs, op=hvd.Sum, name="g"),
            [t[rows_of(RANK, len(t))] for t in total],
        ),
        (
            lambda xs: hvd.grouped_allgather(xs, name="g"),
            [np.concatenate([p[i] for p in parts]) for i in range(len(dtypes))],
        ),
    ]
    for mode in MODES:
        for call, expected in cases:
            before = operations()
            results = mode(call)([tf.constant(p) for p in parts[RANK]])
            assert operations() - before == 1
            assert [r.dtype.name for r in results] == list(dtypes)
            for result, wanted in zip(results, expected, strict=True):
                equal(result, wanted)


def adaptive_sum(a: Any, b: Any) -> Any:
    dot, aa, bb = np.vdot(a, b), np.vdot(a, a), np.vdot(b, b)
    return (1 - dot / (2 * aa)) * a + (1 - dot / (2 * bb)) * b


def test_adasum_adds_adaptively_tensor_by_tensor() -> None:
    parts = [[1.0 + data(r, (7,), "float64", s) ** 2 for s in range(2)] for r in range(SIZE)]
    expected = []
    for tensor in range(2):
        first, second, third = (parts[r][tensor] for r in range(SIZE))
        expected.append(adaptive_sum(adaptive_sum(first, second), third))
    for mode in MODES:
        results = mode(lambda xs: hvd.grouped_allreduce(xs, op=hvd.Adasum))(
            [tf.constant(p) for p in parts[RANK]]
        )
        for result, wanted in zip(results, expected, strict=True):
            equal(result, wanted, rtol=1e-12)


def test_process_sets_exchange_and_scatter_by_themselves() -> None:
    members = [0, SIZE - 1]
    if RANK not in members:
        raises(tf.errors.InvalidArgumentError, lambda: hvd.alltoall(tf.ones([2]), process_set=OUTER))
        return
    position = members.index(RANK)
    for mode in MODES:
        exchanged = mode(lambda x: hvd.alltoall(x, splits=[1, 2], process_set=OUTER))
        result, received = exchanged(tf.range(3) + 10 * RANK)
        equal(received, [position + 1] * 2)
        own = np.arange(3)[slice(0, 1) if position == 0 else slice(1, 3)]
        equal(result, np.concatenate([own, own + 10 * (SIZE - 1)]))
        part = mode(lambda x: hvd.reducescatter(x, process_set=OUTER))(tf.range(3.0) * (RANK + 1))
        equal(part, (np.arange(3) * (SIZE + 1) / 2)[rows_of(position, 3, 2)])
        (gathered,) = mode(lambda x: hvd.grouped_allgather([x], process_set=OUTER))(tf.fill([1], RANK))
        equal(gathered, members)


def test_a_process_set_may_come_and_go() -> None:
    pair = hvd.add_process_set([1, 2])
    number = pair.process_set_id
    included = tf.function(lambda: hvd.process_set_included_op(number))
    size = tf.function(lambda: hvd.size_op(number))
    assert (int(included()), int(size())) == (int(RANK > 0), 2)
    if RANK > 0:
        assert (
            float(tf.function(lambda x: hvd.allreduce(x, process_set=pair))(tf.constant(float(RANK)))) == 1.5
        )
        tf.function(lambda: hvd.barrier(pair))()
    assert hvd.remove_process_set(pair)
    assert "no such process set" in raises(tf.errors.InvalidArgumentError, size)
    assert "no such process set" in raises(ValueError, hvd.size_op, number)


def test_ranks_and_sizes_are_tensors() -> None:
    for mode in DIFFERENTIABLE:
        numbers = mode(lambda: [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()])()
        assert [int(n) for n in numbers] == [RANK, SIZE, hvd.local_rank(), hvd.local_size()]
        assert {n.dtype for n in numbers} == {tf.int32}
        included = mode(lambda: hvd.process_set_included_op(OUTER.process_set_id))()
        assert int(included) == int(RANK in (0, SIZE - 1))


def late(x: Any, delay_s: float) -> Any:
    """The same values, later; without state, so that TensorFlow is free to run other things first."""

    def wait(value: Any) -> Any:
        time.sleep(delay_s)
        return value

    return tf.ensure_shape(tf.numpy_function(wait, [x], x.dtype, stateful=False), x.shape)


def test_ranks_that_have_joined_add_nothing() -> None:
    def total(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum, name="uneven")

    for mode in MODES:
        run = mode(total)
        for step in range(RANK + 1):  # the last rank has the most data
            going_on = [r for r in range(SIZE) if r >= step]
            assert float(run(tf.constant(1.0 + RANK))) == sum(r + 1 for r in going_on)
        last = mode(hvd.join)()
        assert int(last) == SIZE - 1
        assert mode is not tf.function or last.dtype == tf.int32
        assert float(run(tf.constant(1.0))) == SIZE


def test_joins_and_barriers_keep_their_place_in_a_graph() -> None:
    @tf.function
    def step(x: Any) -> Any:
        first = hvd.allreduce(late(x, 0.05 if RANK == 1 else 0.0), op=hvd.Sum)
        hvd.barrier()
        second = hvd.allreduce(late(x * 2.0, 0.05 if RANK == 2 else 0.0), op=hvd.Sum)
        last = hvd.join()  # refuses what this rank starts after it, until all have joined
        return first, second, last, hvd.allreduce(x * 3.0, op=hvd.Sum)

    total = sum(range(1, SIZE + 1))
    for _ in range(5):
        first, second, last, third = step(tf.constant(1.0 + RANK))
        assert [float(first), float(second), float(third)] == [total, 2 * total, 3 * total]
        assert 0 <= int(last) < SIZE


def test_a_barrier_in_a_graph_waits_for_all_ranks() -> None:
    wait = tf.function(lambda: hvd.barrier())
    wait()  # traced
    with tempfile.TemporaryDirectory() as folder:
        sign = Path(hvd.broadcast_object(folder, root_rank=0)) / "rank 0 was here"
        if RANK == 0:
            time.sleep(0.1)  # so that the others would be through, if the barrier let them
            sign.touch()
        wait()
        assert sign.exists()
        wait()


def test_gradients_go_through_exchanges() -> None:
    weights = tf.reshape(tf.range(1.0, 1.0 + 2 * SIZE * SIZE), [-1, 1]) * (RANK + 1.0)

    def gradient(x: Any, splits: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            result, _ = hvd.alltoall(x * x, splits)
            loss = tf.reduce_sum(result * weights[: tf.shape(result)[0]])
        return tape.gradient(loss, x)

    # Row i that rank k received has weight (i + 1) * (k + 1).
    expected = []
    for k in range(SIZE):
        before = sum(SPLITS[r][k] for r in range(RANK))
        expected += [(before + i + 1) * (k + 1) for i in range(SPLITS[RANK][k])]
    expected += [0] * (ROWS[RANK] - len(expected))
    x = tf.fill([ROWS[RANK], 2], RANK + 2.0)
    for mode in DIFFERENTIABLE:
        found = mode(gradient)(x, tf.constant(SPLITS[RANK]))
        equal(found, 2 * (RANK + 2.0) * np.array(expected)[:, None] * np.ones([1, 2]))

    def of_equal_parts(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(hvd.alltoall(x)) * (RANK + 1.0)
        return tape.gradient(loss, x)

    for mode in DIFFERENTIABLE:
        equal(mode(of_equal_parts)(tf.ones([SIZE])), np.arange(1, SIZE + 1))


def test_gradients_go_through_scattered_sums() -> None:
    for op, scale in ((hvd.Sum, 1.0), (hvd.Average, 1 / SIZE)):

        def gradients(x: Any, y: Any, op: Any = op) -> Any:
            with tf.GradientTape() as tape:
                tape.watch([x, y])
                first, _ = hvd.grouped_reducescatter(
                    [x * x, y], op=op, prescale_factor=0.5, postscale_factor=3.0
                )
                loss = tf.reduce_sum(first) * (RANK + 1.0)
            return tape.gradient(loss, [x, y])

        rows = 2 * SIZE + 1
        weights = np.concatenate(
            [np.full(rows_of(r, rows).stop - rows_of(r, rows).start, r + 1) for r in range(SIZE)]
        )
        for mode in DIFFERENTIABLE:
            dx, dy = mode(gradients)(tf.range(float(rows)), tf.ones([4, 2]))
            equal(dx, 2 * np.arange(rows) * weights * 1.5 * scale * SIZE, rtol=1e-6)
            equal(dy, np.zeros((4, 2)))


def test_gradients_go_through_groups_of_several_dtypes() -> None:
    def gathered(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            everything, _, other = hvd.grouped_allgather([x, tf.range(RANK + 1), y])
            weights = tf.range(1.0, tf.cast(tf.shape(everything)[0], tf.float32) + 1.0)
            loss = (tf.reduce_sum(everything * weights) + tf.reduce_sum(tf.cast(other, tf.float32))) * (
                RANK + 1.0
            )
        return tape.gradient(loss, [x, y])

    def reduced(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            a, _, b = hvd.grouped_allreduce([x, tf.constant(RANK), y], op=hvd.Sum)
            loss = (tf.reduce_sum(a) + 2.0 * tf.reduce_sum(tf.cast(b, tf.float32))) * (RANK + 1.0)
        return tape.gradient(loss, [x, y])

    total = float(sum(range(1, SIZE + 1)))
    before = sum(r + 1 for r in range(RANK))
    for mode in DIFFERENTIABLE:
        dx, dy = mode(gathered)(tf.ones([RANK + 1]), tf.ones([2], tf.float64))
        equal(dx, np.arange(before + 1, before + RANK + 2) * total / SIZE)
        equal(dy, np.full(2, total / SIZE))
        dx, dy = mode(reduced)(tf.ones([2]), tf.ones([3], tf.float64))
        equal(dx, np.full(2, total))
        equal(dy, np.full(3, 2 * total))


def test_gradients_of_another_type_are_cast_to_that_of_the_results() -> None:
    verbs: dict[str, Callable[[Any], Any]] = {
        "alltoall": hvd.alltoall,
        "alltoall with splits": lambda x: hvd.alltoall(x, [1] * SIZE)[0],
        "allreduce": lambda x: hvd.allreduce(x, op=hvd.Sum),
        "allgather": lambda x: hvd.allgather(x, exact_gradient=True)[:SIZE],
        "broadcast": lambda x: hvd.broadcast(x, RANK * 0, exact_gradient=True),
        "reducescatter": lambda x: hvd.reducescatter(x, op=hvd.Sum, exact_gradient=True),
    }
    everywhere = {"alltoall": 1, "alltoall with splits": 1, "allreduce": SIZE, "reducescatter": 1}
    for dtype in (tf.float16, tf.bfloat16, tf.float64):
        for name, verb in verbs.items():

            def gradient(x: Any, verb: Any = verb) -> Any:
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    result = verb(x)
                return tape.gradient(result, x, output_gradients=tf.ones_like(result, tf.float32))

            # The cast is the same for each type: one of them is enough in graphs.
            for mode in DIFFERENTIABLE[: None if dtype == tf.float16 else 1]:
                found = mode(gradient)(tf.ones([SIZE], dtype))
                assert found.dtype == dtype, (name, found.dtype)
                equal(found, np.full(SIZE, everywhere.get(name, SIZE if RANK == 0 else 0)))


def test_second_derivatives_are_collectives_of_every_rank() -> None:
    """Of the sum of all squares of y = M x both derivatives are 2 M^T M 1, at x = 1."""
    exact = {"exact_gradient": True}
    verbs: dict[str, tuple[Callable[[Any], Any], float]] = {
        "allreduce": (lambda x: hvd.allreduce(x, op=hvd.Sum), 2.0 * SIZE * SIZE),
        "allgather": (lambda x: hvd.allgather(x, **exact), 2.0 * SIZE),
        "broadcast": (lambda x: hvd.broadcast(x, 0, **exact), 2.0 * SIZE * (RANK == 0)),
        "alltoall": (hvd.alltoall, 2.0),
        "reducescatter": (lambda x: hvd.reducescatter(x, op=hvd.Sum, **exact), 2.0 * SIZE),
    }
    for verb, expected in verbs.values():

        def both(x: Any, verb: Any = verb) -> Any:
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    loss = tf.reduce_sum(verb(x) ** 2)
                first = inner.gradient(loss, x)
                total = tf.reduce_sum(first)
            return first, outer.gradient(total, x)

        for mode in DIFFERENTIABLE:
            first, second = mode(both)(tf.ones([SIZE]))
            equal(first, np.full(SIZE, expected), rtol=1e-6)
            equal(second, np.full(SIZE, expected), rtol=1e-6)


def test_exchanged_integers_have_no_gradient_and_are_exchanged() -> None:
    for mode in DIFFERENTIABLE:

        def exchange(x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                whole, counts = hvd.alltoall(tf.cast(x, tf.int32), [1] * SIZE)
                loss = tf.reduce_sum(x) + tf.reduce_sum(tf.cast(whole + counts, tf.float32))
            return whole, tape.gradient(loss, x)

        whole, gradient = mode(exchange)(tf.fill([SIZE], RANK + 1.0))
        equal(whole, np.arange(SIZE) + 1)
        equal(gradient, np.ones(SIZE))


def test_the_gradient_of_reduced_slices_is_that_of_a_reduction() -> None:
    """However they travel, it is not scaled as an allgather's."""

    def gradient(values: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(values)
            slices = tf.IndexedSlices(values, tf.constant([RANK]), tf.constant([SIZE, 2]))
            loss = tf.reduce_sum(hvd.allreduce(slices, op=hvd.Sum).values) * (RANK + 1.0)
        return tape.gradient(loss, values)

    for mode in DIFFERENTIABLE:
        equal(mode(gradient)(tf.ones([1, 2])), np.full((1, 2), sum(range(1, SIZE + 1))))


def test_names_of_gradients_recur() -> None:
    @tf.function
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = (
                tf.reduce_sum(hvd.reducescatter(x))
                + tf.reduce_sum(hvd.alltoall(x))
                + tf.reduce_sum(hvd.allgather(x))
            )
        return tape.gradient(loss, x)

    step(tf.ones([SIZE]))
    before = polyhvd.counters()
    for _ in range(4):
        step(tf.ones([SIZE]))
    after = polyhvd.counters()
    assert after["cache_hits"] - before["cache_hits"] == after["operations"] - before["operations"] == 4 * 7


def test_handles_of_every_kind_are_synchronized() -> None:
    parts = [data(r, (ROWS[r],), "float32") for r in range(SIZE)]
    exchange = hvd.alltoall_async(tf.constant(parts[RANK]), SPLITS[RANK])
    even = hvd.alltoall_async(tf.range(SIZE) + 10 * RANK)
    scatter = hvd.reducescatter_async(tf.range(4.0) * (RANK + 1), op=hvd.Sum)
    several = hvd.grouped_reducescatter_async([tf.ones([SIZE]), tf.ones([2 * SIZE], tf.int32)], op=hvd.Sum)
    gather = hvd.grouped_allgather_async([tf.fill([RANK], RANK), tf.ones([1])])
    mixed = hvd.grouped_allreduce_async([tf.constant(1), tf.constant([2.0])], op=hvd.Sum)
    result, received = hvd.synchronize(exchange)
    equal(result, np.concatenate(sent_to(RANK, parts)))
    equal(received, [SPLITS[r][RANK] for r in range(SIZE)])
    rows, counts = hvd.synchronize(even)
    equal(rows, [RANK + 10 * r for r in range(SIZE)])
    equal(counts, [1] * SIZE)
    equal(hvd.synchronize(scatter), (np.arange(4) * sum(range(1, SIZE + 1)))[rows_of(RANK, 4)])
    one, two = hvd.synchronize(several)
    equal(one, [SIZE])
    equal(two, [SIZE] * 2)
    ranks, ones = hvd.synchronize(gather)
    equal(ranks, np.repeat(np.arange(SIZE), np.arange(SIZE)))
    equal(ones, [1] * SIZE)
    assert [r.dtype for r in hvd.synchronize(mixed)] == [tf.int32, tf.float32]
    assert hvd.poll(exchange)


def my_slices(rank: int, dtype: Any = tf.float32) -> tf.IndexedSlices:
    """Rank r has rows 0 and r, and one of them twice."""
    values = tf.cast(tf.constant([[1, 2], [3, 4], [5, 6]]) * (rank + 1), dtype)
    return tf.IndexedSlices(values, tf.constant([0, rank, rank], tf.int64), tf.constant([SIZE, 2]))


@pytest.mark.parametrize("dtype", [tf.float32, tf.float64], ids=lambda dtype: dtype.name)
def test_slices_are_gathered_and_scaled(dtype: Any) -> None:
    dense = sum(tf.convert_to_tensor(my_slices(r, dtype)).numpy() for r in range(SIZE))
    near = 4 * np.finfo(dtype.as_numpy_dtype).eps
    cases = [
        ({"op": hvd.Sum}, 1.0),
        ({}, 1 / SIZE),
        ({"op": hvd.Sum, "prescale_factor": 0.1, "postscale_factor": 4.0}, 0.1 * 4.0),
        ({"op": hvd.Sum, "compression": hvd.Compression.fp16}, 1.0),
    ]
    for mode in MODES:
        for arguments, scale in cases:
            before = operations()
            result = mode(lambda a=arguments: hvd.allreduce(my_slices(RANK, dtype), name="slices", **a))()
            assert operations() - before == 1
            assert isinstance(result, tf.IndexedSlices)
            assert result.values.dtype == dtype
            assert result.indices.shape[0] == 3 * SIZE
            equal(tf.convert_to_tensor(result), dense * scale, rtol=near)
        tensor, slices = mode(
            lambda: hvd.grouped_allreduce([tf.ones([2]), my_slices(RANK, dtype)], op=hvd.Sum, name="both")
        )()
        equal(tensor, [SIZE] * 2)
        equal(tf.convert_to_tensor(slices), dense)


def test_scaled_slices_of_integers_equal_the_dense_reduction() -> None:
    for dtype in (tf.int32, tf.int64, tf.uint8, tf.uint32):
        terms = [tf.convert_to_tensor(my_slices(r, dtype)).numpy().astype(np.float64) for r in range(SIZE)]
        # A term and the sum are truncated, and nothing before.
        cases = [
            ({"op": hvd.Sum, "postscale_factor": 0.3}, np.trunc(sum(terms) * 0.3)),
            ({"op": hvd.Sum, "prescale_factor": 0.5}, sum(np.trunc(term * 0.5) for term in terms)),
        ]
        for mode in MODES:
            for arguments, expected in cases:
                slices = my_slices(RANK, dtype)
                result = mode(lambda s=slices, a=arguments: hvd.allreduce(s, **a))()
                assert result.dtype == dtype
                equal(tf.convert_to_tensor(result), expected)
                dense = mode(lambda s=slices, a=arguments: hvd.allreduce(tf.convert_to_tensor(s), **a))()
                equal(dense, expected)


def test_an_average_of_slices_of_integers_is_a_float_of_the_same_type_on_any_number_of_ranks() -> None:
    for dtype, averaged in ((tf.uint8, tf.float32), (tf.int32, tf.float64), (tf.int64, tf.float64)):
        terms = [tf.convert_to_tensor(my_slices(r, dtype)).numpy().astype(np.float64) for r in range(SIZE)]
        for mode in MODES:
            for factor in (1.0, 0.5):
                slices = my_slices(RANK, dtype)
                result = mode(lambda s=slices, f=factor: hvd.allreduce(s, postscale_factor=f))()
                assert result.dtype == averaged
                near = 4 * np.finfo(averaged.as_numpy_dtype).eps
                equal(tf.convert_to_tensor(result), sum(terms) / SIZE * factor, rtol=near)


def test_reductions_that_slices_lack_raise_what_users_of_either_library_catch() -> None:
    for op in (hvd.Max, hvd.Min, hvd.Product, hvd.Adasum):
        for error in (ValueError, NotImplementedError, tf.errors.InvalidArgumentError):
            for mode in MODES:
                run = mode(lambda op=op: hvd.allreduce(my_slices(RANK), op=op))
                assert f"op={op.name}" in raises(error, run)


def test_slices_cost_what_their_rows_cost() -> None:
    shape = tf.constant([1 << 24, 64])  # 4 GiB if it were dense
    slices = tf.IndexedSlices(tf.ones([RANK + 1, 64]), tf.range(RANK + 1, dtype=tf.int32), shape)
    before = polyhvd.counters()["shm_bytes"]
    result = hvd.allreduce(slices, op=hvd.Sum)
    assert result.values.shape[0] == sum(range(1, SIZE + 1))
    assert 0 < polyhvd.counters()["shm_bytes"] - before < 1 << 20


def test_tensors_that_cannot_be_reduced_raise_alike_everywhere() -> None:
    x = tf.ones([SIZE], tf.complex64)
    for verb in ("allreduce", "reducescatter"):
        found = set()
        for mode in MODES:
            call = mode(lambda verb=verb: getattr(hvd, verb)(x, op=hvd.Sum))
            for error in (TypeError, ValueError, tf.errors.InvalidArgumentError):
                # In a function AutoGraph puts its lines in front.
                found.add(raises(error, call).rpartition("Error: ")[2].strip())
        assert len(found) == 1, found
        assert f"{verb}: a tensor of complex64" in found.pop()
    assert "of complex64" in raises(TypeError, hvd.allreduce_async, x)


def test_bad_calls_name_the_argument_and_send_nothing() -> None:
    x = tf.ones([4])
    calls: dict[str, list[Callable[[], Any]]] = {
        "splits": [
            lambda: hvd.alltoall(x, [2] * SIZE),
            lambda: hvd.alltoall(x, [1] * (SIZE - 1)),
            lambda: hvd.alltoall(x, [-1, *[1] * (SIZE - 1)]),
            lambda: hvd.alltoall(x, [1.0] * SIZE),
            lambda: hvd.alltoall(x, []),
            lambda: hvd.alltoall(x, tf.ones([SIZE])),
            lambda: hvd.alltoall(x, tf.ones([SIZE, 1], tf.int32)),
            lambda: hvd.alltoall(x, tf.ones([SIZE], tf.int16)),
            lambda: hvd.alltoall(x),  # four rows for three ranks
        ],
        "Adasum": [
            lambda: hvd.allreduce(tf.ones([2], tf.int32), op=hvd.Adasum),
            lambda: hvd.reducescatter(x, op=hvd.Adasum),
        ],
        "scalar": [
            lambda: hvd.reducescatter(tf.constant(1.0)),
            lambda: hvd.alltoall(tf.constant(1.0)),
        ],
        "op": [lambda: hvd.reducescatter(x, op=9), lambda: hvd.allreduce(x, average=True, op=hvd.Sum)],
        "device_dense": [lambda: hvd.reducescatter(x, device_dense="/gpu:0")],
    }
    for word, wrong in calls.items():
        for call in wrong:
            for mode in MODES:
                message = raises(tf.errors.InvalidArgumentError, mode(call))
                assert word in message, message
            assert word in raises(ValueError, call)
    for start in (hvd.alltoall_async, hvd.reducescatter_async):
        raises(tf.errors.InvalidArgumentError, start, tf.constant(1.0))
    equal(hvd.allreduce(tf.constant(float(RANK))), (SIZE - 1) / 2)


def test_disagreements_fail_on_every_rank() -> None:
    for mode in MODES:
        shapes = mode(lambda: hvd.reducescatter(tf.ones([3, 1 + RANK]), name="columns"))
        assert "Mismatched" in raises(tf.errors.FailedPreconditionError, shapes)
        types = mode(lambda: hvd.alltoall(tf.ones([3], tf.float32 if RANK else tf.int32), name="types"))
        assert "Mismatched" in raises(tf.errors.FailedPreconditionError, types)
        group = mode(lambda: hvd.grouped_allreduce([tf.ones([1])] * (1 + RANK % 2), name="counts"))
        raises(tf.errors.FailedPreconditionError, group)


def test_variables_of_a_version_1_session_start_alike() -> None:
    for hook in (False, True):
        with tf.Graph().as_default():
            number = tf.compat.v1.get_variable("number", initializer=float(RANK))
            count = tf.compat.v1.get_variable("count", initializer=np.int64(10 * RANK), dtype=tf.int64)
            if hook:
                hooks = [hvd.BroadcastGlobalVariablesHook(1)]
                with tf.compat.v1.train.MonitoredTrainingSession(hooks=hooks) as session:
                    assert session.run([number, count]) == [1.0, 10]
                continue
            send = hvd.broadcast_global_variables(1)
            with tf.compat.v1.Session() as session:
                session.run(tf.compat.v1.global_variables_initializer())
                session.run(send)
                assert session.run([number, count]) == [1.0, 10]
    assert "broadcast_variables" in raises(RuntimeError, hvd.broadcast_global_variables, 0)


def test_objects_take_horovods_arguments() -> None:
    assert hvd.broadcast_object([RANK], 1, None, "named") == [1]
    assert hvd.broadcast_object_fn(root_rank=2, name="named")(RANK) == 2
    assert hvd.allgather_object(RANK, None, "named") == list(range(SIZE))
