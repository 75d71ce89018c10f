"""Worlds as values: several at once in one process, one after the other, and what belongs to which."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polyhvd.numpy as hvd
import pytest
from launching import wait_until

from polyhvd import HorovodInternalError, InvalidArgumentError, NotInitializedError, PeerLostError, ProcessSet
from polyhvd.config import Launched, Settings
from polyhvd.launch.providers.local import meet_as
from polyhvd.rendezvous.auth import new_secret, parse_secret
from polyhvd.rendezvous.server import Server
from polyhvd.runtime import current
from polyhvd.runtime.placement import Placement, by_host, placements, visible_gpus
from polyhvd.runtime.world import World

SETTINGS = Settings(start_timeout_s=20.0)


class Meeting:
    """A rendezvous at which threads of this process meet as ranks."""

    def __init__(self) -> None:
        self.secret = new_secret()
        self.server = Server(parse_secret(self.secret))

    def world(
        self,
        rank: int,
        size: int,
        generation: int,
        sets: list[list[int]] | None = None,
        settings: Settings = SETTINGS,
        member: int | None = None,
    ) -> World:
        launched = Launched(rank=rank, size=size, rendezvous=self.server.endpoint, secret=self.secret)
        placement, store = meet_as(launched, generation - 1, time.monotonic() + 20)
        assert store is not None
        with store:
            return World(settings, placement, store, sets or [], member=member)


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    meeting = Meeting()
    yield meeting
    meeting.server.close()


def on_threads(count: int, function: Callable[[int], Any]) -> list[Any]:
    """What the function returns for each number, all of them at once; raises the first error."""
    results: list[Any] = [None] * count
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = function(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
    return results


@pytest.mark.parametrize("size", [2, 3])
def test_two_worlds_of_two_generations_are_used_at_once(meeting: Meeting, size: int) -> None:
    def rank(number: int) -> list[float]:
        with meeting.world(number, size, 1) as first, meeting.world(number, size, 2) as second:
            assert [world.engine.generation for world in (first, second)] == [1, 2]
            both = []
            # Operations of one name in both, interleaved; and some that are in flight while the other's run.
            for step in range(20):
                handle = first.numpy.allreduce_async(np.full(5, number + step), op=hvd.Sum, name="x")
                both.append(second.numpy.allreduce(np.full(3, 10.0 * number), op=hvd.Sum, name="x")[0])
                both.append(first.numpy.synchronize(handle)[0])
            return both

    ranks = sum(range(size))
    expected = [value for step in range(20) for value in (10.0 * ranks, ranks + size * step)]
    assert on_threads(size, rank) == [expected] * size


def test_a_world_that_ends_leaves_the_other_as_it_is(meeting: Meeting) -> None:
    def rank(number: int) -> float:
        first, second = meeting.world(number, 2, 1), meeting.world(number, 2, 2)
        first.close()
        with pytest.raises(HorovodInternalError):  # shut down, or the other was first
            first.numpy.allreduce(np.ones(2))
        value = second.numpy.allreduce(np.full(2, float(number)), op=hvd.Sum)[0]
        second.close()
        second.close()
        return float(value)

    assert on_threads(2, rank) == [1.0, 1.0]


def test_the_current_world_is_another_one(meeting: Meeting) -> None:
    hvd.init()
    try:
        with meeting_of_one(7) as other:
            assert hvd.size() == 1
            assert other.placement.generation == 7
            assert current.world() is not other
            assert other.numpy.allreduce(np.ones(2))[0] == hvd.allreduce(np.ones(2))[0] == 1
            other_set = ProcessSet([0])
            other.register(other_set, 1)
            with pytest.raises(InvalidArgumentError, match="is not registered"):
                hvd.allreduce(np.ones(2), process_set=other_set)
        assert hvd.allreduce(np.ones(2))[0] == 1
    finally:
        hvd.shutdown()


def meeting_of_one(generation: int) -> World:
    return World(SETTINGS, Placement(generation=generation))


def test_process_sets_belong_to_their_world(meeting: Meeting) -> None:
    done = threading.Barrier(3)  # rank 0 may not leave before: it connects the others

    def rank(number: int) -> tuple[list[float], list[int]]:
        with meeting.world(number, 3, 1, [[0, 1]]) as first, meeting.world(number, 3, 2, [[1, 2]]) as second:
            sets = ProcessSet([0, 1]), ProcessSet([1, 2])
            for world, item in zip((first, second), sets, strict=True):
                world.register(item, 1)
            sums = [
                float(world.numpy.allreduce(np.array([float(number)]), op=hvd.Sum, process_set=item)[0])
                for world, item in zip((first, second), sets, strict=True)
                if item.included()
            ]
            with pytest.raises(InvalidArgumentError):
                second.numpy.allreduce(np.ones(1), process_set=sets[0])
            positions = [item.rank() for item in sets]
            done.wait(20)
        for item in sets:
            with pytest.raises(NotInitializedError):
                item.size()
        return sums, positions

    assert on_threads(3, rank) == [([1.0], [0, -1]), ([1.0, 3.0], [1, 0]), ([3.0], [-1, 1])]


def test_a_generation_that_has_ended_is_told() -> None:
    hvd.init()
    generation = current.world().placement.generation
    assert current.of_generation(generation, "x") is current.world()
    hvd.shutdown()
    with pytest.raises(PeerLostError, match=f"x belongs to generation {generation} .* there is none now"):
        current.of_generation(generation, "x")
    hvd.init()
    try:
        now = current.world().placement.generation
        assert now > generation
        with pytest.raises(PeerLostError, match=f"this is generation {now}"):
            current.of_generation(generation, "x")
    finally:
        hvd.shutdown()


def test_worlds_leave_no_descriptors_and_threads(meeting: Meeting) -> None:
    def rank(number: int) -> None:
        for generation in range(1, 6):
            meeting.world(number, 2, generation).close()

    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    on_threads(2, rank)
    before = counts()
    on_threads(2, rank)
    wait_until(lambda: all(now <= then for now, then in zip(counts(), before, strict=True)), f"{before}")


@pytest.mark.parametrize(("member", "level"), [(None, "WARNING"), (0, "DEBUG")], ids=["fixed", "elastic"])
def test_the_path_of_a_dump_after_a_loss_is_a_warning_unless_the_job_is_elastic(
    meeting: Meeting,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    member: int | None,
    level: str,
) -> None:
    caplog.set_level("DEBUG", "polyhvd")

    def rank(number: int) -> None:
        settings = replace(SETTINGS, flight_dir=str(tmp_path))
        with meeting.world(number, 2, 1, settings=settings, member=member) as world:
            if number == 1:
                world.engine.abort("a test")
            with pytest.raises(PeerLostError):
                world.numpy.allreduce(np.ones(2))

    on_threads(2, rank)
    levels = [each.levelname for each in caplog.records if "the last operations are in" in each.message]
    assert levels == [level] * 2


def test_a_world_of_several_needs_a_store() -> None:
    with pytest.raises(ValueError, match="a world of 2 ranks needs a store"):
        World(SETTINGS, Placement(rank=0, size=2))


def test_settings_that_disagree_are_told_in_every_world(meeting: Meeting) -> None:
    def rank(number: int) -> str:
        settings = replace(SETTINGS, reproducible=number == 0)
        with pytest.raises(hvd.RankMismatchError) as caught:
            meeting.world(number, 2, 1, settings=settings)
        return str(caught.value)

    assert all("reproducible must be the same on all ranks" in text for text in on_threads(2, rank))


def test_places_follow_from_hosts() -> None:
    places = placements(["a", "b", "a", "c", "b", "a"], generation=4)
    assert [(p.rank, p.size, p.generation) for p in places] == [(rank, 6, 4) for rank in range(6)]
    assert [p.host for p in places] == ["a", "b", "a", "c", "b", "a"]
    assert [(p.local_rank, p.local_size) for p in places] == [(0, 3), (0, 2), (1, 3), (0, 1), (1, 2), (2, 3)]
    assert [(p.cross_rank, p.cross_size) for p in places] == [(0, 3), (1, 3), (0, 2), (2, 3), (1, 2), (0, 1)]


def test_processes_of_a_host_become_consecutive_ranks_which_see_its_gpus_in_their_order() -> None:
    hosts = ["b", "a", "b", "c", "a"]
    order = by_host(hosts)
    assert order == [0, 2, 1, 4, 3]
    gpus = [["7"], ["1", "0"], ["2"], [], ["0"]]
    ranked = [gpus[number] for number in order], [hosts[number] for number in order]
    assert [visible_gpus(*ranked, host) for host in "abc"] == [["1", "0"], ["7", "2"], []]


@pytest.mark.parametrize(("changes", "named"), [({"rank": 1}, "RANK=1"), ({"local_rank": 2}, "LOCAL_RANK=2")])
def test_a_place_outside_its_world_is_refused(changes: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=f"POLYHVD_{named} is not below"):
        Placement(**changes)  # type: ignore[arg-type]
