"""The properties of the collectives, as every rank checks them; the test files say which and where.

Each function runs on a rank, loops over element types and shapes, and returns a digest of each
result by case, so that the test can compare the ranks' bits. Since those are equal, it is enough
that one rank compares a case with what NumPy says: the ranks take turns.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import drivers
import numpy as np
import oracle
from drivers import Driver

from polyhvd.collectives.adapter import Capability

__all__ = [
    "allgather",
    "allreduce",
    "allreduce_async",
    "allreduce_in_place",
    "allreduce_not_dense",
    "broadcast",
    "broadcast_async",
    "broadcast_in_place",
    "ends_of_ranges",
    "numbers",
    "same_bits",
]

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]

#: Odd sizes leave tails behind vectors; the last is longer than all chunks in flight.
SHAPES: Sequence[Shape] = ((), (1,), (17,), (3, 341), (4097,), (0,), (3, 0), (101, 2971))


def _shapes(driver: Driver) -> list[Shape]:
    has_empty = Capability.EMPTY in driver.capabilities
    return [shape for shape in SHAPES if has_empty or 0 not in shape]


def _cases(
    driver: Driver, *, skip: Sequence[str] = (), seed: int = 0, reduced: bool = True
) -> Iterator[tuple[np.dtype[Any], list[Shape], list[_Terms]]]:
    """An element type, its shapes, and for each shape every rank's values."""
    size = driver.hvd.size()
    for dtype in driver.dtypes:
        if dtype.name in skip:
            continue
        shapes = [shape for shape in _shapes(driver) if driver.covers(dtype, shape, reduced=reduced)]
        yield dtype, shapes, [_Terms(dtype, shape, size, seed) for shape in shapes]


class _Terms(Sequence[Array]):
    """The ranks' values of one case, each made when it is asked for."""

    def __init__(self, dtype: np.dtype[Any], shape: Shape, size: int, seed: int = 0) -> None:
        self._dtype, self._shape, self._size, self._seed = dtype, shape, size, seed

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, rank: Any) -> Any:
        if isinstance(rank, slice):
            return [self[r] for r in range(*rank.indices(self._size))]
        if not -self._size <= rank < self._size:
            raise IndexError(rank)
        return oracle.contribution(self._dtype, self._shape, rank % self._size, self._seed)


def _tensors(driver: Driver, terms: Sequence[Sequence[Array]]) -> list[Any]:
    rank = driver.hvd.rank()
    return [driver.from_numpy(values[rank]) for values in terms]


def _check_all(
    driver: Driver,
    what: str,
    shapes: Sequence[Shape],
    results: Sequence[Any],
    expected: Sequence[Callable[[], Array]],
) -> dict[str, int]:
    """Digests of the results; those of this rank's turn are compared with what is expected."""
    assert len(results) == len(expected), f"{what}: {len(results)} results for {len(expected)} tensors"
    rank, size = driver.hvd.rank(), driver.hvd.size()
    digests = {}
    for shape, result, wanted in zip(shapes, results, expected, strict=True):
        case = f"{what} {list(shape)}"
        actual = driver.to_numpy(result)
        if zlib.crc32(case.encode()) % size == rank:
            oracle.check(case, actual, wanted())
        digests[case] = oracle.digest(actual)
    return digests


def _skipped_by(op: str, prescale: float, postscale: float) -> tuple[str, ...]:
    """A factor has no meaning for bools."""
    return ("bool",) if op == "Average" or (prescale, postscale) != (1.0, 1.0) else ()


def allreduce(
    name: str,
    op: str,
    prescale: float = 1.0,
    postscale: float = 1.0,
    hosts: Sequence[int] | None = None,
) -> dict[str, int]:
    """New tensors with the reduction; the arguments keep their values."""
    driver = drivers.get(name)
    digests = {}
    for dtype, shapes, terms in _cases(driver, skip=_skipped_by(op, prescale, postscale)):
        tensors = _tensors(driver, terms)
        what = f"allreduce {op} {dtype.name}"

        def reduce_all(*inputs: Any, what: str = what) -> list[Any]:
            return [
                driver.hvd.allreduce(
                    tensor,
                    name=f"{what} {i}",
                    op=getattr(driver.hvd, op),
                    prescale_factor=prescale,
                    postscale_factor=postscale,
                )
                for i, tensor in enumerate(inputs)
            ]

        results = driver.call(reduce_all, *tensors)
        expected = [partial(oracle.reduce, op, values, prescale, postscale, hosts) for values in terms]
        digests.update(_check_all(driver, what, shapes, results, expected))
        for values, tensor in zip(terms, tensors, strict=True):
            oracle.check(
                f"argument of {what}", driver.to_numpy(tensor), values[driver.hvd.rank()], exact=True
            )
    return digests


def allreduce_in_place(name: str, op: str) -> dict[str, int]:
    """``allreduce_`` overwrites its argument and returns it."""
    driver = drivers.get(name)
    digests = {}
    for dtype, shapes, terms in _cases(driver, skip=_skipped_by(op, 1.0, 1.0)):
        tensors = _tensors(driver, terms)
        what = f"allreduce_ {op} {dtype.name}"
        for i, tensor in enumerate(tensors):
            result = driver.hvd.allreduce_(tensor, name=f"{what} {i}", op=getattr(driver.hvd, op))
            assert result is tensor, f"{what}: returned {type(result).__name__}, not its argument"
        expected = [partial(oracle.reduce, op, values) for values in terms]
        digests.update(_check_all(driver, what, shapes, tensors, expected))
    return digests


def ends_of_ranges(name: str) -> dict[str, int]:
    """The least and the greatest integers, and neighbours that a conversion to float64 would make equal."""
    driver = drivers.get(name)
    hvd = driver.hvd
    digests = {}
    for dtype in driver.dtypes:
        if dtype.kind not in "iu":
            continue
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
        middle = 1 << (8 * dtype.itemsize - 1 - (dtype.kind == "i"))
        values = [least, least + 1, 0, 1, 3, middle - 1, middle, middle + 4, middle + 5, most - 1, most]
        # Every value of an even rank meets every value of an odd one.
        grid = np.tile(np.array(values, dtype), len(values))
        terms = [np.roll(grid if r % 2 else np.sort(grid), 2 * r) for r in range(hvd.size())]
        for op, prescale in (
            ("Sum", 1.0),
            ("Average", 1.0),
            ("Min", 1.0),
            ("Max", 1.0),
            ("Product", 1.0),
            ("Max", 0.5),
        ):
            what = f"ends of {dtype.name} {op} {prescale}"

            def reduce(x: Any, op: str = op, prescale: float = prescale, what: str = what) -> Any:
                return hvd.allreduce(x, name=what, op=getattr(hvd, op), prescale_factor=prescale)

            result = driver.call(reduce, driver.from_numpy(terms[hvd.rank()]))
            expected = partial(oracle.reduce, op, terms, prescale)
            digests.update(_check_all(driver, what, [grid.shape], [result], [expected]))
    return digests


def allreduce_async(name: str, op: str, in_place: bool) -> dict[str, int]:
    """All tensors in flight at once, submitted and waited for in another order on each rank."""
    driver = drivers.get(name)
    hvd = driver.hvd
    start = hvd.allreduce_async_ if in_place else hvd.allreduce_async
    digests = {}
    flying: list[tuple[str, Shape, Callable[[], Array], Any, Any]] = []
    for dtype, shapes, terms in _cases(driver, skip=_skipped_by(op, 1.0, 1.0)):
        tensors = _tensors(driver, terms)
        what = f"{start.__name__} {op} {dtype.name}"
        for i in np.random.default_rng(hvd.rank()).permutation(len(tensors)):
            handle = start(tensors[i], name=f"{what} {i}", op=getattr(hvd, op))
            expected = partial(oracle.reduce, op, terms[i])
            flying.append((what, shapes[i], expected, tensors[i], handle))
    for i in np.random.default_rng(100 + hvd.rank()).permutation(len(flying)):
        what, shape, expected, tensor, handle = flying[i]
        result = hvd.synchronize(handle)
        assert hvd.poll(handle) is True, f"{what} {list(shape)}: not done after synchronize()"
        assert (result is tensor) == in_place, f"{what} {list(shape)}: wrong object returned"
        digests.update(_check_all(driver, what, [shape], [result], [expected]))
    return digests


def allreduce_not_dense(name: str) -> dict[str, int]:
    """Views with strides, which on odd ranks lie in memory in another order than on even ones."""
    driver = drivers.get(name)
    hvd = driver.hvd
    digests = {}
    for dtype in driver.dtypes:
        for shape in [s for s in ((5, 7), (3, 4, 5), (64, 1025)) if driver.covers(dtype, s, reduced=True)]:
            terms = _Terms(dtype, shape, hvd.size())
            mine = terms[hvd.rank()]

            def view(mine: Array = mine) -> Any:
                if hvd.rank() % 2 == 1:
                    return driver.from_numpy(mine)
                return driver.transposed(driver.from_numpy(np.ascontiguousarray(mine.transpose())))

            expected = [partial(oracle.reduce, "Sum", terms)]
            what = f"allreduce of a view {dtype.name}"
            results = [hvd.allreduce(view(), name=what, op=hvd.Sum)]
            digests.update(_check_all(driver, what, [shape], results, expected))
            if Capability.IN_PLACE not in driver.capabilities:
                continue
            what = f"allreduce_ of a view {dtype.name}"
            target = view()
            hvd.allreduce_(target, name=what, op=hvd.Sum)
            digests.update(_check_all(driver, what, [shape], [target], expected))
            what = f"broadcast_ of a view {dtype.name}"
            target = view()
            hvd.broadcast_(target, hvd.size() - 1, name=what)
            digests.update(_check_all(driver, what, [shape], [target], [partial(terms.__getitem__, -1)]))
    return digests


def special_values(name: str) -> dict[str, int]:
    """Infinities, NaN, zeros of both signs, the least and the greatest numbers."""
    driver = drivers.get(name)
    hvd = driver.hvd
    digests = {}
    for dtype in driver.dtypes:
        if dtype.kind in "iub":
            continue
        values = [0.0, -0.0, 1.0, np.inf, -np.inf, np.nan, 65504.0, 2.0**-24, -(2.0**-14)]
        grid = np.array(values, np.float64).astype(dtype)
        terms = [np.roll(np.tile(grid, 9), 9 * rank).copy() for rank in range(hvd.size())]
        terms = [
            np.concatenate([term, np.repeat(grid, 9)[:: 1 - 2 * (r % 2)]]) for r, term in enumerate(terms)
        ]
        ops = ("Sum", "Min", "Max", "Product")
        labels = [f"special values {op} {dtype.name}" for op in ops]

        def reduce_all(x: Any, labels: Sequence[str] = labels, ops: Sequence[str] = ops) -> list[Any]:
            named = zip(labels, ops, strict=True)
            return [hvd.allreduce(x, name=what, op=getattr(hvd, op)) for what, op in named]

        results = driver.call(reduce_all, driver.from_numpy(terms[hvd.rank()]))
        for op, what, result in zip(ops, labels, results, strict=True):
            actual, expected = driver.to_numpy(result), oracle.reduce(op, terms)
            is_nan = np.isnan(expected.astype(np.float64))
            assert np.array_equal(np.isnan(actual.astype(np.float64)), is_nan), f"{what}: NaN differs"
            oracle.check(what, actual[~is_nan], expected[~is_nan], exact=True)
            digests[what] = oracle.digest(actual)
    return digests


def _rows_of(rank: int, size: int, pattern: str) -> int:
    return {
        "equal": 3,
        "growing": rank + 1,
        "one has none": 0 if rank == size // 2 else 2 + rank,
        "only the last has some": 5 if rank == size - 1 else 0,
        "none": 0,
        "many": 3001 * (size - rank),
    }[pattern]


def allgather(name: str, pattern: str) -> dict[str, int]:
    """The ranks' rows one after the other, with other numbers of rows on each rank."""
    driver = drivers.get(name)
    hvd = driver.hvd
    size = hvd.size()
    rows = [_rows_of(rank, size, pattern) for rank in range(size)]
    digests = {}
    for dtype in driver.dtypes:
        if not driver.covers(dtype, (sum(rows), 5, 3), reduced=False):
            continue
        terms: list[list[Array]] = []
        names = []
        for tail in ((), (1,), (5, 3), (17,)):
            terms.append([oracle.contribution(dtype, (rows[r], *tail), r) for r in range(size)])
            names.append(f"allgather {pattern} {dtype.name} {list(tail)}")
        if Capability.EMPTY in driver.capabilities:
            terms.append([oracle.contribution(dtype, (rows[r], 0), r) for r in range(size)])
            names.append(f"allgather {pattern} {dtype.name} no columns")

        def gather_all(*inputs: Any, names: list[str] = names) -> list[Any]:
            return [hvd.allgather(tensor, name=n) for tensor, n in zip(inputs, names, strict=True)]

        results = driver.call(gather_all, *_tensors(driver, terms))
        expected = [partial(np.concatenate, values) for values in terms]
        shapes = [(sum(rows), *values[0].shape[1:]) for values in terms]
        digests.update(_check_all(driver, f"allgather {pattern} {dtype.name}", shapes, results, expected))
    return digests


def allgather_async(name: str) -> dict[str, int]:
    """Many allgathers in flight, with other numbers of rows on each rank."""
    driver = drivers.get(name)
    hvd = driver.hvd
    handles, shapes, expected = [], [], []
    for i in range(20):
        terms = [oracle.contribution(np.dtype(np.float32), (r + i, 3), r, i) for r in range(hvd.size())]
        if 0 in [len(term) for term in terms] and Capability.EMPTY not in driver.capabilities:
            continue
        tensor = driver.from_numpy(terms[hvd.rank()])
        handles.append(hvd.allgather_async(tensor, name=f"allgather_async {i}"))
        expected.append(partial(np.concatenate, terms))
        shapes.append((sum(map(len, terms)), 3))
    results = [hvd.synchronize(handle) for handle in reversed(handles)][::-1]
    return _check_all(driver, "allgather_async", shapes, results, expected)


def _not_from(root: int, driver: Driver) -> list[str]:
    """Element types that this root does not broadcast: float32 has every root, another type has one."""
    size = driver.hvd.size()
    others = [dtype.name for dtype in driver.dtypes if dtype.name != "float32"]
    return [name for position, name in enumerate(others) if position % size != root]


def broadcast(name: str) -> dict[str, int]:
    """Every rank once the root; the arguments keep their values."""
    driver = drivers.get(name)
    hvd = driver.hvd
    digests = {}
    for root in range(hvd.size()):
        for dtype, shapes, terms in _cases(driver, skip=_not_from(root, driver), seed=root, reduced=False):
            tensors = _tensors(driver, terms)
            what = f"broadcast from {root} {dtype.name}"

            def send_all(*inputs: Any, what: str = what, root: int = root) -> list[Any]:
                return [hvd.broadcast(tensor, root, name=f"{what} {i}") for i, tensor in enumerate(inputs)]

            results = driver.call(send_all, *tensors)
            expected = [partial(values.__getitem__, root) for values in terms]
            digests.update(_check_all(driver, what, shapes, results, expected))
            for values, tensor in zip(terms, tensors, strict=True):
                oracle.check(f"argument of {what}", driver.to_numpy(tensor), values[hvd.rank()], exact=True)
    return digests


def broadcast_in_place(name: str) -> dict[str, int]:
    """``broadcast_`` overwrites its argument and returns it."""
    driver = drivers.get(name)
    hvd = driver.hvd
    digests = {}
    for root in range(hvd.size()):
        for dtype, shapes, terms in _cases(driver, skip=_not_from(root, driver), seed=root, reduced=False):
            tensors = _tensors(driver, terms)
            what = f"broadcast_ from {root} {dtype.name}"
            for i, tensor in enumerate(tensors):
                result = hvd.broadcast_(tensor, root, name=f"{what} {i}")
                assert result is tensor, f"{what}: returned {type(result).__name__}, not its argument"
            expected = [partial(values.__getitem__, root) for values in terms]
            digests.update(_check_all(driver, what, shapes, tensors, expected))
    return digests


def broadcast_async(name: str, in_place: bool) -> dict[str, int]:
    """From all roots at once, submitted in another order on each rank."""
    driver = drivers.get(name)
    hvd = driver.hvd
    start = hvd.broadcast_async_ if in_place else hvd.broadcast_async
    digests = {}
    for dtype, shapes, terms in _cases(driver, reduced=False):
        flying = []
        for root in range(hvd.size()):
            flying += [(root, i, tensor) for i, tensor in enumerate(_tensors(driver, terms))]
        order = np.random.default_rng(hvd.rank()).permutation(len(flying))
        handles = {}
        for k in order:
            root, i, tensor = flying[k]
            handles[root, i] = start(tensor, root, name=f"{dtype.name} {i} from {root}")
        for root in range(hvd.size()):
            results = [hvd.synchronize(handles[root, i]) for i in range(len(shapes))]
            what = f"{start.__name__} from {root} {dtype.name}"
            expected = [partial(values.__getitem__, root) for values in terms]
            digests.update(_check_all(driver, what, shapes, results, expected))
    return digests


def _cancelling(dtype: np.dtype[Any], length: int, rank: int, seed: int) -> Array:
    """Terms of all magnitudes and both signs: each way to add them up has bits of its own."""
    random = np.random.default_rng([seed, rank, length])
    exponents = random.integers(0, {"float16": 10, "float64": 50}.get(dtype.name, 25), length)
    return np.ldexp(random.standard_normal(length), exponents).astype(dtype)


def same_bits(name: str, seed: int, hosts: Sequence[int] | None = None) -> dict[str, int]:
    """One sum of cancelling terms, at many offsets among other tensors, in many orders and sizes."""
    driver = drivers.get(name)
    hvd = driver.hvd
    size, rank = hvd.size(), hvd.rank()
    digests = {}
    for dtype in (d for d in driver.dtypes if d.name in ("float16", "bfloat16", "float32", "float64")):
        for length in (100, 1000, 4096, 70_000):
            term = [_cancelling(dtype, length, r, seed) for r in range(size)]
            expected = oracle.reduce("Sum", term, hosts=hosts)
            other = oracle.reduce("Sum", term, hosts=[1, size - 1])
            if dtype.itemsize >= 4:  # the one rounding of half types may hide the difference
                assert oracle.digest(other) != oracle.digest(expected), "these terms show nothing"
            random = np.random.default_rng([seed, rank, length])
            flying = {}
            submissions = [("wanted", 0), *(("other", i) for i in range(6))]
            for k in random.permutation(len(submissions)):
                what, i = submissions[k]
                values = term[rank] if what == "wanted" else np.full(7 * seed + 131 * i + 1, rank, dtype)
                call = hvd.allreduce_async(
                    driver.from_numpy(values), name=f"{what} {dtype.name} {length} {i}", op=hvd.Sum
                )
                flying[what, i] = call
            case = f"same bits {dtype.name} [{length}]"
            for key, handle in flying.items():
                result = driver.to_numpy(hvd.synchronize(handle))
                if key[0] == "wanted":
                    oracle.check(case, result, expected, exact=True)
                    digests[case] = oracle.digest(result)
            alone = hvd.allreduce(driver.from_numpy(term[rank]), name=f"alone {dtype.name}", op=hvd.Sum)
            oracle.check(f"{case} alone", driver.to_numpy(alone), expected, exact=True)
    return digests


def numbers(name: str) -> dict[str, int]:
    """What a loss or an accuracy is after ``.item()`` or ``float()``: no tensor."""
    driver = drivers.get(name)
    hvd = driver.hvd
    rank, size = hvd.rank(), hvd.size()
    digests = {}
    for kind in (float, int, np.float64, np.float32, np.int64):
        calls = {
            f"sum of {kind.__name__}": (
                lambda x: hvd.allreduce(x, name="number", op=hvd.Sum),
                size * (size + 1) // 2,
            ),
            f"{kind.__name__} of the last rank": (lambda x: hvd.broadcast(x, size - 1, name="number"), size),
        }
        for what, (call, wanted) in calls.items():
            result = driver.to_numpy(call(kind(rank + 1)))
            assert result.size == 1, f"{what}: {result!r}"
            assert float(result.reshape(())) == wanted, f"{what}: {result!r}"
            assert not hasattr(kind, "dtype") or result.dtype == np.dtype(kind), f"{what}: {result.dtype}"
            digests[what] = oracle.digest(result)
    return digests
