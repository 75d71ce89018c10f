"""The properties of exchange, scatter, groups, Adasum, join and process sets, as every rank checks them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import drivers
import numpy as np
import oracle
from drivers import Driver

from polyhvd.collectives.adapter import Capability

__all__ = [
    "adasum",
    "alltoall",
    "everything_in_flight",
    "grouped",
    "join",
    "join_again",
    "many_small",
    "process_sets",
    "reducescatter",
    "scattered_bits",
]

Array = np.ndarray[Any, Any]
FLOATS = ("float16", "bfloat16", "float32", "float64")


def _has_empty(driver: Driver) -> bool:
    return Capability.EMPTY in driver.capabilities


def _check(driver: Driver, what: str, result: Any, expected: Array, *, exact: bool = False) -> None:
    oracle.check(what, driver.to_numpy(result), expected, exact=exact)


def _splits(pattern: str, rank: int, size: int) -> list[int]:
    """Rows that a rank sends to each."""
    return {
        "equal": [2] * size,
        "uneven": [1 + (rank + 2 * to) % 3 for to in range(size)],
        "all to the last": [3 * (to == size - 1) for to in range(size)],
        "some none": [(rank + to) % 2 * 4 for to in range(size)],
        "many": [1000 * (to + 1) + rank for to in range(size)],
    }[pattern]


def alltoall(name: str, pattern: str, with_splits: bool) -> None:
    """Every rank gets the rows meant for it, in order of rank, and their numbers."""
    driver = drivers.get(name)
    hvd = driver.hvd
    size, rank = hvd.size(), hvd.rank()
    splits = [_splits(pattern, r, size) for r in range(size)]
    spare = 1 if with_splits else 0  # a row that goes nowhere
    for dtype in driver.dtypes:
        for tail in ((), (3, 5)):
            what = f"alltoall {pattern} {dtype.name} {list(tail)}"
            if not driver.covers(dtype, (sum(map(sum, splits)), *tail), reduced=False):
                continue
            terms = [oracle.contribution(dtype, (sum(splits[r]) + spare, *tail), r) for r in range(size)]
            starts = [sum(splits[r][:rank]) for r in range(size)]
            expected = np.concatenate(
                [terms[r][starts[r] : starts[r] + splits[r][rank]] for r in range(size)]
            )
            if not _has_empty(driver) and (len(expected) == 0 or len(terms[rank]) == 0):
                expected = expected[:0]  # this rank still takes part
            argument = {"splits": splits[rank]} if with_splits else {}

            def exchange(x: Any, what: str = what, argument: dict[str, Any] = argument) -> Any:
                return hvd.alltoall(x, name=what, **argument)

            result = driver.call(exchange, driver.from_numpy(terms[rank]))
            if with_splits:
                result, received = result
                _check(driver, what, received, np.array([s[rank] for s in splits], np.int32), exact=True)
            _check(driver, what, result, expected, exact=True)


def _kept(values: Array, rank: int, size: int) -> Array:
    """Rows of a reducescatter that a rank keeps."""
    counts = [len(values) // size + (r < len(values) % size) for r in range(size)]
    start = sum(counts[:rank])
    return values[start : start + counts[rank]]


def _scatter_shapes(driver: Driver, size: int) -> list[tuple[int, ...]]:
    shapes: Sequence[tuple[int, ...]] = ((1,), (17,), (7, 341), (4097,), (0,), (3, 0), (101, 2971))
    return [shape for shape in shapes if _has_empty(driver) or (0 not in shape and shape[0] >= size)]


def reducescatter(name: str, op: str, prescale: float = 1.0, postscale: float = 1.0) -> None:
    """Every rank keeps its rows of the reduction."""
    driver = drivers.get(name)
    hvd = driver.hvd
    size, rank = hvd.size(), hvd.rank()
    for dtype in driver.dtypes:
        if dtype.name == "bool" and (op == "Average" or (prescale, postscale) != (1.0, 1.0)):
            continue
        shapes = [
            shape for shape in _scatter_shapes(driver, size) if driver.covers(dtype, shape, reduced=True)
        ]
        terms = [[oracle.contribution(dtype, shape, r) for r in range(size)] for shape in shapes]
        what = f"reducescatter {op} {dtype.name}"

        def scatter(*inputs: Any, what: str = what) -> list[Any]:
            return [
                hvd.reducescatter(
                    x,
                    name=f"{what} {i}",
                    op=getattr(hvd, op),
                    prescale_factor=prescale,
                    postscale_factor=postscale,
                )
                for i, x in enumerate(inputs)
            ]

        results = driver.call(scatter, *(driver.from_numpy(values[rank]) for values in terms))
        for values, result in zip(terms, results, strict=True):
            rows = [_kept(term, rank, size) for term in values]
            expected = oracle.reduce(op, rows, prescale, postscale)
            _check(driver, f"{what} {list(values[0].shape)}", result, expected)


def grouped(name: str) -> None:
    """Tensors of several element types and shapes as one operation."""
    driver = drivers.get(name)
    hvd = driver.hvd
    size, rank = hvd.size(), hvd.rank()
    shapes = ((5,), (8, 3), (4, 1000), (4099,))
    dtypes = [dtype for dtype in driver.dtypes if dtype.kind != "b"]
    terms = [
        [oracle.contribution(dtype, shape, r) for r in range(size)] for dtype in dtypes for shape in shapes
    ]
    inputs = [driver.from_numpy(values[rank]) for values in terms]
    for repeat in range(2):
        results = driver.call(lambda *x: hvd.grouped_allreduce(list(x), name="grouped", op=hvd.Sum), *inputs)
        assert len(results) == len(terms)
        for values, result in zip(terms, results, strict=True):
            _check(driver, f"grouped_allreduce {repeat}", result, oracle.reduce("Sum", values))
        results = driver.call(lambda *x: hvd.grouped_allgather(list(x), name="grouped rows"), *inputs)
        for values, result in zip(terms, results, strict=True):
            _check(driver, "grouped_allgather", result, np.concatenate(values), exact=True)
        results = driver.call(
            lambda *x: hvd.grouped_reducescatter(list(x), name="grouped parts", op=hvd.Sum), *inputs
        )
        for values, result in zip(terms, results, strict=True):
            expected = _kept(oracle.reduce("Sum", values), rank, size)
            _check(driver, "grouped_reducescatter", result, expected)


def adasum(name: str) -> None:
    """Against the formula, with vectors that are neither parallel nor orthogonal."""
    driver = drivers.get(name)
    hvd = driver.hvd
    for dtype in (d for d in driver.dtypes if d.name in FLOATS):
        for shape in ((1,), (17,), (33, 100), (4,)):
            terms = [oracle.contribution(dtype, shape, r) for r in range(hvd.size())]
            if shape == (4,):
                terms = [np.zeros(4, dtype) for _ in terms]
            what = f"Adasum {dtype.name} {list(shape)}"
            result = driver.call(
                lambda x, what=what: hvd.allreduce(x, name=what, op=hvd.Adasum),
                driver.from_numpy(terms[hvd.rank()]),
            )
            _check(driver, what, result, oracle.adasum(terms))


def everything_in_flight(name: str) -> None:
    """Every asynchronous operation at once, waited for in another order on each rank."""
    driver = drivers.get(name)
    hvd = driver.hvd
    size, rank = hvd.size(), hvd.rank()
    flying = []
    for i in range(5):
        terms = [oracle.contribution(np.dtype(np.float32), (3 * size, 4 + i), r, i) for r in range(size)]
        tensor = driver.from_numpy(terms[rank])
        total = oracle.reduce("Sum", terms)
        parts = np.concatenate([term[3 * rank : 3 * rank + 3] for term in terms])
        gathered = np.concatenate(terms)
        counts = np.full(size, 3, np.int32)  # also without splits, as in Horovod
        two = driver.from_numpy(terms[rank])
        flying += [
            (hvd.alltoall_async(tensor, name=f"a2a {i}"), [parts, counts]),
            (hvd.alltoall_async(tensor, splits=[3] * size, name=f"a2a splits {i}"), [parts, counts]),
            (hvd.reducescatter_async(tensor, name=f"scatter {i}", op=hvd.Sum), [_kept(total, rank, size)]),
            (hvd.grouped_allreduce_async([tensor, two], name=f"pair {i}", op=hvd.Sum), [total, total]),
            (hvd.grouped_allgather_async([tensor, two], name=f"rows {i}"), [gathered, gathered]),
            (
                hvd.grouped_reducescatter_async([tensor, two], name=f"parts {i}", op=hvd.Sum),
                [_kept(total, rank, size)] * 2,
            ),
        ]
    for k in np.random.default_rng(rank).permutation(len(flying)):
        handle, expected = flying[k]
        result = hvd.synchronize(handle)
        assert hvd.poll(handle) is True
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        for actual, wanted in zip(results, expected, strict=True):
            _check(driver, f"operation {k}", actual, wanted)


def many_small(name: str) -> dict[str, int]:
    """Many small allgathers and reducescatters in flight, and a few large ones.

    Of several element types, with rows that differ between ranks, submitted in another order on each where
    an allgather does not wait for the others' sizes.
    """
    driver = drivers.get(name)
    hvd = driver.hvd
    size, rank = hvd.size(), hvd.rank()
    dtypes = [
        dtype for dtype in driver.dtypes if dtype.name in ("float32", "int64", "float16", "uint8", "uint16")
    ]
    least = 0 if _has_empty(driver) else 1
    gathered, scattered = {}, {}
    for i in range(40):
        dtype = dtypes[i % len(dtypes)]
        many = 20_000 if i % 13 == 4 else 0
        gathered[i] = [
            oracle.contribution(dtype, (least + (r + i) % 3 + many, 1 + i % 4), r, i) for r in range(size)
        ]
        scattered[i] = [oracle.contribution(dtype, (size + i + many, 3), r, i) for r in range(size)]
    digests = {}
    for step in range(2):
        flying = {}
        for i in np.random.default_rng(0 if driver.gathers_wait else rank).permutation(40):
            tensors = [driver.from_numpy(gathered[i][rank])]
            if i % 2:  # a group, as of indices and values
                tensors.append(driver.from_numpy(scattered[i][rank]))
            flying[i] = (
                hvd.grouped_allgather_async(tensors, name=f"many rows {i}"),
                hvd.reducescatter_async(
                    driver.from_numpy(scattered[i][rank]), name=f"many parts {i}", op=hvd.Sum
                ),
            )
        for i, (rows, part) in flying.items():
            wanted = [np.concatenate(gathered[i]), np.concatenate(scattered[i])]
            for result, expected in zip(hvd.synchronize(rows), wanted, strict=False):
                _check(driver, f"many rows {i}, step {step}", result, expected, exact=True)
                digests[f"{i} {expected.shape}"] = oracle.digest(driver.to_numpy(result))
            expected = _kept(oracle.reduce("Sum", scattered[i]), rank, size)
            _check(driver, f"many parts {i}, step {step}", hvd.synchronize(part), expected)
    return digests


def scattered_bits(name: str) -> None:
    """One sum of cancelling terms has the same bits alone and among others: that of the ranks in order."""
    driver = drivers.get(name)
    hvd = driver.hvd
    size, rank = hvd.size(), hvd.rank()
    for dtype in (np.dtype(np.float32), np.dtype(np.float64)):
        for length in (100, 4099, 70_000):
            terms = [
                np.ldexp(random.standard_normal(length), random.integers(0, 25, length)).astype(dtype)
                for random in (np.random.default_rng([r, length]) for r in range(size))
            ]
            expected = _kept(oracle.reduce("Sum", terms), rank, size)
            wanted = driver.from_numpy(terms[rank])
            handles = [
                hvd.reducescatter_async(
                    wanted if i == 5 else driver.from_numpy(np.full(7 * i + size, rank, dtype)),
                    name=f"bits {dtype.name} {length} {i}",
                    op=hvd.Sum,
                )
                for i in range(9)
            ]
            results = [hvd.synchronize(handle) for handle in handles]
            _check(driver, f"among others {dtype.name} {length}", results[5], expected, exact=True)
            alone = hvd.reducescatter(wanted, name=f"alone {dtype.name} {length}", op=hvd.Sum)
            _check(driver, f"alone {dtype.name} {length}", alone, expected, exact=True)


def _steps(rank: int) -> int:
    return 2 + 3 * rank


def join(name: str) -> None:
    """Ranks run out of data one after the other; the others go on, with neutral elements for them."""
    driver = drivers.get(name)
    hvd = driver.hvd
    size, rank = hvd.size(), hvd.rank()

    def run(function: Any, what: str, *arrays: Array) -> Any:
        return driver.call(function, *(driver.from_numpy(array) for array in arrays)), what

    some = ("float32", "int32", "float16", *(("uint16", "uint32", "uint64") if driver.tests_kernels else ()))
    dtypes = [dtype for dtype in driver.dtypes if dtype.name in some]
    for step in range(_steps(rank)):
        there = [r for r in range(size) if step < _steps(r)]
        for dtype in dtypes:
            terms = {r: oracle.contribution(dtype, (size + 1, 3), r, step) for r in there}
            for op in ("Sum", "Max", "Min", "Product"):
                what = f"joined {op} {dtype.name}"
                result, _ = run(
                    lambda x, w=what, op=op: hvd.allreduce(x, name=w, op=getattr(hvd, op)), what, terms[rank]
                )
                expected = oracle.reduce(op, list(terms.values()))
                _check(driver, f"{what}, step {step}", result, expected)
            result, what = run(
                lambda x, d=dtype: hvd.reducescatter(x, name=f"joined rs {d.name}", op=hvd.Sum),
                f"joined reducescatter, step {step}",
                terms[rank],
            )
            expected = oracle.reduce("Sum", list(terms.values()))
            _check(driver, what, result, _kept(expected, rank, size))
        mine = oracle.contribution(np.dtype(np.float32), (rank + 1, 2), rank, step)
        result, what = run(
            lambda x: hvd.allgather(x, name="joined gather"), f"joined allgather, step {step}", mine
        )
        rows = [oracle.contribution(np.dtype(np.float32), (r + 1, 2), r, step) for r in there]
        _check(driver, what, result, np.concatenate(rows), exact=True)
        send = np.full((size, 2), rank, np.float32)
        result, what = run(
            lambda x: hvd.alltoall(x, name="joined a2a"), f"joined alltoall, step {step}", send
        )
        _check(driver, what, result, np.array([[r, r] for r in there], np.float32), exact=True)
        result, what = run(
            lambda x: hvd.broadcast(x, size - 1, name="joined send"), f"joined broadcast, step {step}", send
        )
        _check(driver, what, result, np.full((size, 2), size - 1, np.float32), exact=True)
        hvd.barrier()
    assert int(hvd.join()) == size - 1, "the rank with the most data joins last"
    average = driver.call(
        lambda x: hvd.allreduce(x, name="after the join"), driver.from_numpy(np.ones(3, np.float32))
    )
    _check(driver, "after the join", average, np.ones(3, np.float32))


def join_again(name: str) -> None:
    """A join is over when all ranks have joined; the next one begins anew."""
    hvd = drivers.get(name).hvd
    for _ in range(10):
        assert 0 <= int(hvd.join()) < hvd.size()


def process_sets(name: str) -> None:
    """Sets that overlap, come and go while the world works."""
    driver = drivers.get(name)
    hvd = driver.hvd
    size, rank = hvd.size(), hvd.rank()
    ones = np.ones((2 * size, 3), np.float32)
    for step in range(3):
        first = hvd.add_process_set(list(range(size - 1))) if size > 1 else None
        last = hvd.add_process_set(hvd.ProcessSet([0, size - 1])) if size > 2 else None
        for chosen in (first, last):
            if chosen is None or not chosen.included():
                continue
            n, place = chosen.size(), chosen.rank()

            def work(x: Any, chosen: Any = chosen, n: int = n) -> list[Any]:
                return [
                    hvd.allreduce(x, name="in the set", op=hvd.Sum, process_set=chosen),
                    hvd.allgather(x, name="rows in the set", process_set=chosen),
                    hvd.reducescatter(x, name="parts in the set", op=hvd.Sum, process_set=chosen),
                    hvd.broadcast(x, chosen.ranks[-1], name="from the set", process_set=chosen),
                    hvd.alltoall(x, splits=[2] * n, name="within the set", process_set=chosen)[0],
                ]

            results = driver.call(work, driver.from_numpy(ones * (rank + 1)))
            ranks = np.array(chosen.ranks, np.float32)
            factor = float(sum(ranks + 1))
            expected = [
                ones * factor,
                np.concatenate([ones * (r + 1) for r in ranks]),
                _kept(ones * factor, place, n),
                ones * (ranks[-1] + 1),
                np.concatenate([ones[:2] * (r + 1) for r in ranks]),
            ]
            for result, wanted in zip(results, expected, strict=True):
                _check(driver, f"set {chosen.ranks}, step {step}", result, wanted.astype(np.float32))
        world = driver.call(
            lambda x: hvd.allreduce(x, name="in the world", op=hvd.Sum), driver.from_numpy(ones)
        )
        _check(driver, "world", world, ones * size)
        for chosen in (first, last):
            if chosen is not None:
                assert hvd.remove_process_set(chosen) is True
                assert chosen.process_set_id is None
                assert hvd.remove_process_set(chosen) is False
    assert hvd.remove_process_set(hvd.global_process_set) is False
