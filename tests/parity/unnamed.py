"""Calls without names, as every rank makes them: the n-th of one rank belongs to the n-th of the others."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import drivers
import numpy as np
from drivers import Driver
from memory import resident_bytes

__all__ = [
    "dropped_handles",
    "four_threads",
    "four_threads_with_models",
    "four_threads_with_objects",
    "mismatch_in_the_middle",
    "mixed_kinds",
    "objects_without_memory",
    "objects_without_the_last",
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

    def work(_: int) -> None:
        for step in range(_STEPS):
            result = hvd.allreduce(_full(driver, hvd.rank() + 1.0), op=hvd.Sum)
            _check(driver, f"step {step}", result, expected)

    _in_four_threads(work)


def _in_four_threads(work: Callable[[int], None]) -> None:
    """Call ``work`` with the number of each thread, and raise what the first that fails does."""
    begin = threading.Barrier(4)

    def start(thread: int) -> None:
        begin.wait()
        work(thread)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(start, range(4)))


_Content = tuple[int, int, Any]


def _content(rank: int, number: int) -> _Content:
    """Of another length each time; some have arrays that travel beside the pickle."""
    length = 300_000 if number % 5 == 0 else 37 * number + rank
    return rank, number, np.full(length, 1000 * rank + number, np.float64)


def _number_in(content: _Content, rank: int) -> int:
    sender, number, array = content
    assert sender == rank
    assert np.array_equal(array, _content(rank, number)[2]), f"object {number} of rank {rank}"
    return number


def _send_objects(hvd: Any, senders: list[int]) -> tuple[list[int], list[tuple[int, ...]]]:
    """Objects in four threads: the numbers in those of rank 0, and of all that were gathered together."""
    broadcast: list[int] = []
    gathered: list[tuple[int, ...]] = []
    rank = hvd.rank()

    def work(thread: int) -> None:
        for step in range(5):
            mine = _content(rank, 5 * thread + step)
            broadcast.append(_number_in(hvd.broadcast_object(mine), 0))
            found = hvd.allgather_object(mine)
            gathered.append(tuple(map(_number_in, found, senders)))

    _in_four_threads(work)
    assert sorted(broadcast) == list(range(20))
    for numbers in zip(*gathered, strict=True):
        assert sorted(numbers) == list(range(20))
    return sorted(broadcast), sorted(gathered)


def four_threads_with_objects(name: str) -> Any:
    """What each call has brought together; the same on every rank."""
    hvd = drivers.get(name).hvd
    return _send_objects(hvd, list(range(hvd.size())))


def objects_without_the_last(name: str) -> Any:
    """The same after the last rank had joined, and the others went on for a while."""
    hvd = drivers.get(name).hvd
    everybody = list(range(hvd.size()))
    if hvd.rank() != everybody[-1]:
        _send_objects(hvd, everybody[:-1])
    hvd.join()
    return _send_objects(hvd, everybody)


def four_threads_with_models(name: str) -> None:
    """Each thread broadcasts models of its own; all of them have the same names, and come as one."""
    driver = drivers.get(name)
    found: list[float] = []

    def work(thread: int) -> None:
        for step in range(5):
            value = 100.0 * driver.hvd.rank() + 5 * thread + step
            mine = {key: driver.parameter(np.full(50, value, np.float32)) for key in "abcdef"}
            driver.broadcast_parameters(mine, 0)
            came = float(driver.to_numpy(mine["a"])[0])
            for parameter in mine.values():
                _check(driver, f"call {came}", parameter, came, 50)
            found.append(came)

    _in_four_threads(work)
    assert sorted(found) == list(range(20))


def objects_without_memory(name: str) -> int:
    """Bytes that are in use after 10,000 calls and were not after 1,000."""
    hvd = drivers.get(name).hvd

    def resident(calls: int) -> int:
        for call in range(calls):
            hvd.broadcast_object(call % 300)
            hvd.allgather_object(call % 300)
        hvd.barrier()
        return resident_bytes()

    before = resident(500)
    return resident(5000) - before


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
