"""Python objects, named parameters and barriers, in every framework."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import drivers
import numpy as np
import oracle
import pytest
from worlds import Ranks


def _object_of(rank: int) -> dict[str, Any]:
    return {"rank": rank, "text": "ä" * 1000 * rank, "array": np.arange(rank * 700), "nothing": None}


def _assert_object_of(found: Any, rank: int) -> None:
    expected = _object_of(rank)
    assert np.array_equal(found.pop("array"), expected.pop("array")), f"the array of rank {rank}"
    assert found == expected, f"{found} is not the object of rank {rank}"


def broadcast_objects(name: str) -> None:
    hvd = drivers.get(name).hvd
    for root in range(hvd.size()):
        _assert_object_of(hvd.broadcast_object(_object_of(hvd.rank()), root_rank=root), root)
        mine = _object_of(root) if hvd.rank() == root else None
        _assert_object_of(hvd.broadcast_object(mine, root_rank=root, name=f"named {root}"), root)


def test_broadcast_object_returns_the_roots_object(ranks: Ranks) -> None:
    ranks.run(broadcast_objects)


def gather_objects(name: str) -> None:
    hvd = drivers.get(name).hvd
    for _ in range(3):
        found = hvd.allgather_object(_object_of(hvd.rank()))
        assert len(found) == hvd.size()
        for rank, item in enumerate(found):
            _assert_object_of(item, rank)


def test_allgather_object_returns_all_objects_in_rank_order(ranks: Ranks) -> None:
    ranks.run(gather_objects)


class _Unpicklable:
    """Stands for what holds a lock, a socket or a file."""

    def __reduce__(self) -> str:
        raise TypeError("cannot pickle a lock")


def refuse_objects(name: str) -> None:
    hvd = drivers.get(name).hvd
    for root in range(hvd.size()):
        with pytest.raises(ValueError, match=rf"rank {root} cannot pickle a _Unpicklable: TypeError: cannot"):
            hvd.broadcast_object(_Unpicklable(), root_rank=root)
        with pytest.raises(ValueError, match=rf"rank {root} cannot pickle a _Unpicklable"):
            hvd.allgather_object(_Unpicklable() if hvd.rank() == root else hvd.rank())
        _assert_object_of(hvd.broadcast_object(_object_of(hvd.rank()), root_rank=root), root)
        assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


@pytest.mark.sizes(1, 2, 3)
def test_an_object_that_cannot_be_pickled_is_an_error_on_every_rank(ranks: Ranks) -> None:
    ranks.run(refuse_objects)


def broadcast_arrays(name: str) -> None:
    """Large arrays, which travel beside the pickle: dense, strided, read-only, twice the same, structured."""
    hvd = drivers.get(name).hvd
    large = np.arange(500_000, dtype=np.float64)
    fixed = large.copy()
    fixed.flags.writeable = False
    sent = [
        large,
        large,
        large.reshape(1000, 500).T,
        large[::2],
        fixed,
        large.astype("f4,i4"),
        b"x" * 3_000_000,
    ]
    mine = sent if hvd.rank() == 0 else None
    found = hvd.broadcast_object(mine)
    for theirs, wanted in zip(found, sent, strict=True):
        assert np.array_equal(theirs, wanted)
    assert found[0] is found[1], "one array came as two"
    found[0][0] = -1.0  # as after any unpickling
    assert hvd.rank() == 0 or large[0] == 0.0


@pytest.mark.sizes(1, 2, 3)
@pytest.mark.drivers("numpy")
def test_broadcast_object_keeps_large_arrays_as_they_are(ranks: Ranks) -> None:
    ranks.run(broadcast_arrays)


def broadcast_much(name: str) -> int:
    """How much memory a rank needs at most for 200 MB, in bytes."""
    hvd = drivers.get(name).hvd
    mine = np.ones(25_000_000) if hvd.rank() == 0 else None
    hvd.broadcast_object(None)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    found = hvd.broadcast_object(mine)
    assert found[-1] == 1.0
    return _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


@pytest.mark.sizes(2)
@pytest.mark.drivers("numpy")
def test_broadcast_object_needs_memory_for_the_object_once(ranks: Ranks) -> None:
    root, other = ranks.run(broadcast_much)
    assert root < 60_000_000, "the root has it already"
    assert other < 260_000_000


def broadcast_model(name: str, root: int) -> dict[str, int]:
    driver = drivers.get(name)
    hvd = driver.hvd
    shapes = {"weight": (17, 5), "bias": (5,), "scale": (1,), "embedding": (300, 31)}

    def values_of(rank: int) -> dict[str, Any]:
        return {key: oracle.contribution(np.dtype(np.float32), shape, rank) for key, shape in shapes.items()}

    values = values_of(hvd.rank())
    # Another order of insertion on each rank: names match, not positions.
    keys = list(shapes)[hvd.rank() % 4 :] + list(shapes)[: hvd.rank() % 4]
    parameters = {key: driver.parameter(values[key]) for key in keys}
    driver.broadcast_parameters(parameters, root)
    digests = {}
    for key, wanted in values_of(root).items():
        actual = driver.to_numpy(parameters[key])
        oracle.check(f"parameter {key} from {root}", actual, wanted, exact=True)
        digests[key] = oracle.digest(actual)
    return digests


@pytest.mark.every_size
def test_broadcast_parameters_overwrites_them_with_the_roots(ranks: Ranks) -> None:
    for root in range(ranks.size):
        ranks.run_alike(broadcast_model, root)


def broadcast_other_names(name: str, extra: bool) -> dict[str, int]:
    driver = drivers.get(name)
    hvd = driver.hvd
    others = [f"of rank {hvd.rank()}"] if extra or hvd.rank() else []
    parameters = {key: driver.parameter(np.ones(3, np.float32)) for key in ("weight", *others)}
    with pytest.raises(hvd.RankMismatchError) as caught:
        driver.broadcast_parameters(parameters, 0)
    text = str(caught.value)  # JAX's names are paths in a tree
    first = "of rank 0" if extra else "no others"
    assert re.search(rf"different names: besides 1 in common rank 0 has \W*{first}", text), text
    assert re.search(r"rank 1 has \W*of rank 1", text), text
    pairs = [("twice", driver.parameter(np.ones(3, np.float32))) for _ in range(1 + hvd.rank() % 2)]
    if driver.framework in ("numpy", "torch"):  # where pairs are taken, as a name can be repeated
        with pytest.raises(hvd.RankMismatchError, match=r"ha(s|ve) 'twice \(2\)'"):
            hvd.broadcast_parameters(pairs, root_rank=0)
    return broadcast_model(name, 0)  # the job goes on


@pytest.mark.drivers("numpy", "torch", "mxnet", "jax", "cupy")  # TensorFlow's are a list
@pytest.mark.parametrize("extra", [True, False])
def test_broadcast_parameters_of_other_names_is_refused_on_every_rank(ranks: Ranks, extra: bool) -> None:
    if ranks.size > 1:
        ranks.run_alike(broadcast_other_names, extra)


def cross_barriers(name: str, rounds: int) -> list[tuple[float, float]]:
    hvd = drivers.get(name).hvd
    random = np.random.default_rng(hvd.rank())
    times = []
    for _ in range(rounds):
        random.standard_normal(int(random.integers(1, 100_000)))  # arrive at different times
        entered = time.clock_gettime(time.CLOCK_MONOTONIC)
        hvd.barrier()
        times.append((entered, time.clock_gettime(time.CLOCK_MONOTONIC)))
    return times


def test_no_rank_leaves_a_barrier_before_all_have_entered(ranks: Ranks) -> None:
    by_round = zip(*ranks.run(cross_barriers, 30), strict=True)
    for number, times in enumerate(by_round):
        entered, left = zip(*times, strict=True)
        assert max(entered) <= min(left), f"round {number}: {times}"


def ask_where(name: str) -> tuple[Any, ...]:
    hvd = drivers.get(name).hvd
    assert hvd.is_initialized()
    hvd.init()  # a second time does nothing
    local = (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
    return (hvd.rank(), hvd.size(), *local, hvd.is_homogeneous())


def test_every_rank_knows_its_place(ranks: Ranks) -> None:
    size = ranks.size
    expected = [(rank, size, rank, size, 0, 1, True) for rank in range(size)]
    assert ranks.run(ask_where) == expected


def start_again(name: str) -> None:
    driver = drivers.get(name)
    hvd = driver.hvd
    for _ in range(3):
        hvd.shutdown()
        assert not hvd.is_initialized()
        hvd.init()
        ones = driver.from_numpy(np.ones(5, np.float32))
        result = driver.call(lambda x: hvd.allreduce(x, name="again", op=hvd.Sum), ones)
        oracle.check("after init", driver.to_numpy(result), np.full(5, hvd.size(), np.float32))


def test_init_may_follow_shutdown(ranks: Ranks) -> None:
    ranks.run(start_again)


def two_threads(name: str) -> None:
    """Each thread has its own sequence of calls; the ranks start them in different orders."""
    driver = drivers.get(name)
    hvd = driver.hvd

    def work(label: str) -> None:
        for i in range(50):
            tensor = driver.from_numpy(np.full(100 + i, hvd.rank(), np.float32))
            result = driver.to_numpy(hvd.allreduce(tensor, name=f"{label} {i}", op=hvd.Sum))
            oracle.check(label, result, np.full(100 + i, sum(range(hvd.size())), np.float32))

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(work, ("left", "right")[:: 1 - 2 * (hvd.rank() % 2)]))


@pytest.mark.sizes(2, 4)
def test_two_threads_may_wait_for_different_operations(ranks: Ranks) -> None:
    ranks.run(two_threads)
