"""Calls without names, as every rank makes them: the n-th of one rank belongs to the n-th of the others."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import drivers
import numpy as np
from drivers import Driver

__all__ = [
    "dropped_handles",
    "four_threads",
    "mismatch_in_the_middle",
    "mixed_kinds",
    "overlapping_process_sets",
    "poll_loop",
    "warm_cache",
]

_STEPS = 12


def _value(call: int, rank: int) -> float:
    return float((rank + 1) * 10 ** (call % 4))


def _total(call: int, ranks: range | list[int]) -> float:
    return sum(_value(call, rank) for rank in ranks)


def _full(driver: Driver, value: float, count: int = 3) -> Any:
    return driver.from_numpy(np.full(count, value, np.float32))


def _check(driver: Driver, what: str, result: Any, expected: float, count: int = 3) -> None:
    found = driver.to_numpy(result)
    np.testing.assert_array_equal(found, np.full(count, expected, np.float32), err_msg=what)


def poll_loop(name: str) -> None:
    """Two calls are always in flight; even ranks wait for the older one, odd ranks for the newer one."""
    driver = drivers.get(name)
    hvd = driver.hvd
    rank, everybody = hvd.rank(), range(hvd.size())
    flying: deque[tuple[int, Any]] = deque()
    for call in range(_STEPS):
        flying.append((call, hvd.allreduce_async(_full(driver, _value(call, rank)), op=hvd.Sum)))
        if len(flying) < 2:
            continue
        which, handle = flying.popleft() if rank % 2 == 0 else flying.pop()
        _check(driver, f"call {which}", hvd.synchronize(handle), _total(which, everybody))
    for which, handle in flying:
        _check(driver, f"call {which}", hvd.synchronize(handle), _total(which, everybody))


def four_threads(name: str) -> None:
    """Each thread makes the same calls as the others, which are all alike."""
    driver = drivers.get(name)
    hvd = driver.hvd
    expected = float(sum(range(1, hvd.size() + 1)))
    failures: list[BaseException] = []
    begin = threading.Barrier(4)

    def work() -> None:
        try:
            begin.wait()
            for step in range(_STEPS):
                result = hvd.allreduce(_full(driver, hvd.rank() + 1.0), op=hvd.Sum)
                _check(driver, f"step {step}", result, expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def mixed_kinds(name: str) -> None:
    """Several kinds in flight, waited for in another order on each rank."""
    driver = drivers.get(name)
    hvd = driver.hvd
    rank, size = hvd.rank(), hvd.size()
    order = np.random.default_rng(rank)
    for step in range(3):
        flying: list[tuple[str, Any, Any]] = []
        for i in range(4):
            mine = np.full((2, 3), _value(i, rank) + step, np.float32)
            every = [np.full((2, 3), _value(i, r) + step, np.float32) for r in range(size)]
            tensor = driver.from_numpy(mine)
            root = i % size
            flying += [
                ("allreduce", hvd.allreduce_async(tensor, op=hvd.Sum), sum(every)),
                ("allgather", hvd.allgather_async(tensor), np.concatenate(every)),
                ("broadcast", hvd.broadcast_async(tensor, root), every[root]),
            ]
        for k in order.permutation(len(flying)):
            what, handle, expected = flying[k]
            found = driver.to_numpy(hvd.synchronize(handle))
            np.testing.assert_array_equal(found, expected, err_msg=f"{what}, step {step}, {k}")


def overlapping_process_sets(name: str) -> None:
    """Ranks 0 and 1, 1 and 2, and all: each rank takes turns with its sets in its own order."""
    driver = drivers.get(name)
    hvd = driver.hvd
    rank = hvd.rank()
    members = [[0, 1], [1, 2]]
    sets = [hvd.add_process_set(ranks) for ranks in members]
    for step in range(4):
        mine = [(ranks, which) for ranks, which in zip(members, sets, strict=True) if rank in ranks]
        flying: list[tuple[str, Any, float]] = []
        for ranks, which in mine if rank % 2 == step % 2 else mine[::-1]:
            for call in range(3):
                tensor = _full(driver, _value(call, rank) + ranks[0])
                handle = hvd.allreduce_async(tensor, op=hvd.Sum, process_set=which)
                flying.append((f"{ranks}, call {call}", handle, _total(call, ranks) + 2 * ranks[0]))
        everybody = hvd.allreduce_async(_full(driver, 1.0), op=hvd.Sum)
        for what, handle, expected in flying[:: 1 if rank % 2 else -1]:
            _check(driver, what, hvd.synchronize(handle), expected)
        _check(driver, "all", hvd.synchronize(everybody), float(hvd.size()))
    for which in sets:
        assert hvd.remove_process_set(which)


def mismatch_in_the_middle(name: str) -> tuple[str, str]:
    """The second of three calls has another shape, and the fifth another type, on the last rank."""
    driver = drivers.get(name)
    hvd = driver.hvd
    rank, last = hvd.rank(), hvd.size() - 1
    error_type = driver.error_type()
    texts = []
    for odd in (np.zeros(5, np.float32), np.zeros(3, np.int32)):
        for warm in range(2):  # the second time all but the odd one know the call
            first = hvd.allreduce_async(_full(driver, 1.0), op=hvd.Sum)
            bad = driver.from_numpy(odd) if rank == last and warm else _full(driver, 2.0)
            second = hvd.allreduce_async(bad, op=hvd.Sum)
            third = hvd.allreduce_async(_full(driver, 3.0), op=hvd.Sum)
            _check(driver, "third", hvd.synchronize(third), 3.0 * hvd.size())
            if warm:
                texts.append(_text_of(error_type, lambda handle=second: hvd.synchronize(handle)))
            else:
                _check(driver, "second", hvd.synchronize(second), 2.0 * hvd.size())
            _check(driver, "first", hvd.synchronize(first), 1.0 * hvd.size())
    return texts[0], texts[1]


def _text_of(error_type: type[BaseException], call: Callable[[], Any]) -> str:
    try:
        call()
    except error_type as error:
        return str(error)
    raise AssertionError("no error was raised")


def warm_cache(name: str) -> tuple[int, int]:
    """Cache hits and calls of three steps after the first, in which handles are waited for in any order."""
    driver = drivers.get(name)
    hvd = driver.hvd
    rank = hvd.rank()
    order = np.random.default_rng(rank)
    before = calls = 0
    for step in range(4):
        hvd.barrier()
        if step == 1:
            before = drivers.counters(name)["cache_hits"]
        flying = []
        for call in range(7):
            tensor = _full(driver, _value(call, rank), 3 + call % 5)
            flying.append((call, hvd.allreduce_async(tensor, op=hvd.Sum)))
        for k in order.permutation(len(flying)):
            call, handle = flying[k]
            expected = _total(call, range(hvd.size()))
            _check(driver, f"call {call}", hvd.synchronize(handle), expected, 3 + call % 5)
        calls += len(flying) if step else 0
    return drivers.counters(name)["cache_hits"] - before, calls


def dropped_handles(name: str) -> None:
    """Nobody waits for most of the calls; on each rank for others."""
    driver = drivers.get(name)
    hvd = driver.hvd
    rank, everybody = hvd.rank(), range(hvd.size())
    for call in range(4 * _STEPS):
        handle = hvd.allreduce_async(_full(driver, _value(call, rank)), op=hvd.Sum)
        if call % (2 + rank) == 0:
            _check(driver, f"call {call}", hvd.synchronize(handle), _total(call, everybody))
        del handle
    hvd.barrier()
