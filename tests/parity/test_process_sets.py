"""Every public verb in a process set: what members get, and what errors those outside get.

Written from Horovod's documentation: members alone call the verb; ranks are those of the world, and results
are in order of rank; whoever calls it from outside, or in a set that is not registered, gets a ValueError.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import drivers
import numpy as np
import oracle
import pytest
from drivers import Driver
from worlds import Ranks

from polyhvd.collectives.adapter import Capability

pytestmark = pytest.mark.sizes(3)

ROWS = 4
MEMBERS = (0, 2)  # their ranks in the set are 0 and 1
OTHERS = (1, 2)


def _tensor(driver: Driver, rank: int) -> Any:
    """Powers of ten tell from which rank a number came."""
    return driver.from_numpy(np.full((ROWS, 2), 10.0**rank, np.float32))


def _verbs(driver: Driver) -> dict[str, tuple[Callable[[Any, Any], Any], Callable[[list[int], int], Any]]]:
    """Each verb with what its result holds, given the members' ranks and the own one."""
    hvd = driver.hvd
    rows = [1, 3]

    def parts_of(values: list[float]) -> Any:
        return np.repeat(np.float32(values), 2).reshape(-1, 2)

    def exchanged(members: list[int], rank: int) -> Any:
        mine = rows[members.index(rank)]
        return parts_of([10.0**r for r in members for _ in range(mine)])

    def total(members: list[int], rank: int) -> Any:
        return parts_of([sum(10.0**r for r in members)] * ROWS)

    def scattered(members: list[int], rank: int) -> Any:
        return parts_of([sum(10.0**r for r in members)] * (ROWS // 2))

    def average(members: list[int], rank: int) -> Any:
        return parts_of([sum(10.0**r for r in members) / 2] * ROWS)

    def least(members: list[int], rank: int) -> Any:
        return parts_of([min(10.0**r for r in members)] * ROWS)

    def gathered(members: list[int], rank: int) -> Any:
        return parts_of([10.0**r for r in members for _ in range(ROWS)])

    def of_last(members: list[int], rank: int) -> Any:
        return parts_of([10.0 ** members[-1]] * ROWS)

    return {
        "sum": (lambda x, s: hvd.allreduce(x, op=hvd.Sum, process_set=s), total),
        "average": (lambda x, s: hvd.allreduce(x, op=hvd.Average, process_set=s), average),
        "min": (lambda x, s: hvd.allreduce(x, op=hvd.Min, process_set=s), least),
        "grouped_allreduce": (
            lambda x, s: hvd.grouped_allreduce([x, x], op=hvd.Sum, process_set=s)[1],
            total,
        ),
        "allgather": (lambda x, s: hvd.allgather(x, process_set=s), gathered),
        "grouped_allgather": (lambda x, s: hvd.grouped_allgather([x, x], process_set=s)[1], gathered),
        "broadcast": (lambda x, s: hvd.broadcast(x, (s.ranks or [0])[-1], process_set=s), of_last),
        "alltoall": (lambda x, s: hvd.alltoall(x, splits=rows, process_set=s)[0], exchanged),
        "reducescatter": (lambda x, s: hvd.reducescatter(x, op=hvd.Sum, process_set=s), scattered),
        "grouped_reducescatter": (
            lambda x, s: hvd.grouped_reducescatter([x, x], op=hvd.Sum, process_set=s)[1],
            scattered,
        ),
    }


def use_every_verb(name: str) -> None:
    driver = drivers.get(name)
    hvd = driver.hvd
    sets = [hvd.add_process_set(ranks) for ranks in (MEMBERS, OTHERS)]
    try:
        for chosen in sets:
            for what, (call, wanted) in _verbs(driver).items():
                if not chosen.included():
                    continue
                result = driver.call(lambda x, call=call, s=chosen: call(x, s), _tensor(driver, hvd.rank()))
                expected = wanted(chosen.ranks, hvd.rank())
                oracle.check(f"{what} in {chosen.ranks}", driver.to_numpy(result), expected)
    finally:
        for chosen in sets:
            hvd.remove_process_set(chosen)


def test_members_of_a_process_set_get_what_the_members_have(ranks: Ranks) -> None:
    ranks.run(use_every_verb)


def _error_of(driver: Driver, call: Callable[[Any], Any]) -> Exception:
    """What a call raises, at once or where its result is read."""
    try:
        result = driver.to_numpy(driver.call(call, _tensor(driver, driver.hvd.rank())))
    except Exception as error:
        return error
    raise AssertionError(f"returned {result!r}")


def call_from_outside(name: str) -> None:
    driver = drivers.get(name)
    hvd = driver.hvd
    chosen = hvd.add_process_set(MEMBERS)
    if hvd.rank() == 1:
        for what, (call, _) in _verbs(driver).items():
            error = _error_of(driver, lambda x, c=call: c(x, chosen))
            assert isinstance(error, driver.argument_errors()), f"{what}: {error!r}"
            assert "rank 1 is not in" in str(error), f"{what}: {error!r}"
            assert re.search(r"has ranks \[?0, 2", str(error)), f"{what}: {error!r}"
    hvd.barrier()
    hvd.remove_process_set(chosen)


def test_a_call_from_outside_a_process_set_raises_at_once(ranks: Ranks) -> None:
    ranks.run(call_from_outside)


def call_without_a_set(name: str) -> None:
    driver = drivers.get(name)
    hvd = driver.hvd
    gone = hvd.add_process_set(MEMBERS)
    hvd.remove_process_set(gone)
    never = hvd.ProcessSet(list(OTHERS))
    for chosen in (gone, never):
        for what, (call, _) in _verbs(driver).items():
            error = _error_of(driver, lambda x, c=call, s=chosen: c(x, s))
            assert isinstance(error, ValueError), f"{what}: {error!r}"
            assert "is not registered; pass it to init" in str(error), f"{what}: {error!r}"
        with pytest.raises(ValueError, match="is not registered"):
            chosen.size()


def test_a_process_set_that_is_not_registered_is_refused_by_every_verb(ranks: Ranks) -> None:
    ranks.run(call_without_a_set)


def send_objects(name: str) -> None:
    hvd = drivers.get(name).hvd
    chosen = hvd.add_process_set(MEMBERS)
    if chosen.included():
        assert hvd.broadcast_object(hvd.rank(), root_rank=2, process_set=chosen) == 2
        assert hvd.allgather_object(hvd.rank(), process_set=chosen) == list(MEMBERS)
        hvd.barrier(process_set=chosen)
    hvd.remove_process_set(chosen)


def test_objects_and_barriers_stay_in_their_process_set(ranks: Ranks) -> None:
    ranks.run(send_objects)


def start_and_wait(name: str) -> None:
    driver = drivers.get(name)
    hvd = driver.hvd
    sets = [hvd.add_process_set(ranks) for ranks in (MEMBERS, OTHERS)]
    handles = [
        (hvd.allreduce_async(_tensor(driver, hvd.rank()), op=hvd.Sum, process_set=s), s)
        for s in sets
        if s.included()
    ]
    for handle, chosen in reversed(handles):
        total = sum(10.0**r for r in chosen.ranks)
        oracle.check(
            "in flight in two sets",
            driver.to_numpy(hvd.synchronize(handle)),
            np.full((ROWS, 2), total, np.float32),
        )
    for chosen in sets:
        hvd.remove_process_set(chosen)


def test_operations_of_overlapping_process_sets_may_be_in_flight_together(ranks: Ranks) -> None:
    ranks.needs(Capability.ASYNC)
    ranks.run(start_and_wait)


def add_without_the_last(name: str) -> None:
    driver = drivers.get(name)
    hvd = driver.hvd
    rank, last = hvd.rank(), hvd.size() - 1
    early = hvd.add_process_set(MEMBERS)
    kept = []
    if rank != last:
        hvd.remove_process_set(early)
        kept = [hvd.add_process_set(ranks) for ranks in (OTHERS, MEMBERS)]
    hvd.join()
    chosen = [hvd.process_set_of(ranks) for ranks in (reversed(OTHERS), MEMBERS)]
    assert all(found is mine for found, mine in zip(chosen, kept, strict=rank != last))
    assert [found.ranks for found in chosen] == [list(OTHERS), list(MEMBERS)]
    assert hvd.process_set_of(range(hvd.size())) is hvd.global_process_set
    for found in chosen:
        assert hvd.process_set_of(found.ranks) is found
        if not found.included():
            continue
        total = sum(10.0**r for r in found.ranks)
        result = driver.call(
            lambda x, s=found: hvd.allreduce(x, op=hvd.Sum, process_set=s), _tensor(driver, rank)
        )
        oracle.check("sum", driver.to_numpy(result), np.full((ROWS, 2), total, np.float32))
    assert not hvd.remove_process_set(early), "it is gone, and whoever had joined removes it alone"
    for found in chosen:
        assert hvd.remove_process_set(found)
        with pytest.raises(ValueError, match="there is no such process set"):
            hvd.process_set_of(found.ranks or MEMBERS)


def test_a_rank_that_had_joined_finds_the_process_sets_that_others_added(ranks: Ranks) -> None:
    ranks.run(add_without_the_last)
