"""The records that a rank writes: its identity, the offset of its clock, and its timeline.

:mod:`polyhvd.observe.timeline` and :mod:`polyhvd.observe.flight` read the files.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from polyhvd import _core
from polyhvd.collectives.adapter import OpKind
from polyhvd.observe import autotune
from polyhvd.observe.files import claimed
from polyhvd.runtime.world import World

__all__ = [
    "Carried",
    "begin",
    "clock_offset",
    "hand_over",
    "path_of_process",
    "path_of_rank",
    "start_timeline",
    "stop_timeline",
]

DYNAMIC = "DYNAMIC"
_ROUNDS = 8
#: In later worlds of an elastic job, where ranks wait for this: with a larger error, which is recorded.
#: Timelines are aligned by the operations in them anyway.
_ROUNDS_AGAIN = 1


@dataclass(frozen=True)
class Carried:
    """A timeline that a process carries from one world to the next.

    Args:
        file: in which it continues.
        file_path: that the timeline was started with.
    """

    file: _core.TimelineFile
    file_path: str


def begin(
    world: World, carried: Carried | None = None, tuner: autotune.Autotuner | None = None
) -> autotune.Autotuner | None:
    """Describe this rank to its engine, continue or start its timeline, and tune, as its settings ask for it.

    All ranks call it when they have entered a world: with several hosts it compares their clocks.

    Args:
        world: that this process has entered; closed if this fails.
        carried: its timeline, of the last world.
        tuner: its autotuner, of the last world.

    Returns:
        The autotuner for the next world.
    """
    try:
        _describe(world)
        if carried is not None:
            world.engine.take_over_timeline(carried.file)
            world.timeline, world.timeline_is_carried = carried.file_path, True
        elif world.settings.timeline and world.settings.timeline.upper() != DYNAMIC:
            start_timeline(world, world.settings.timeline, world.settings.timeline_mark_cycles)
        tunes = world.settings.steps_per_sample(world.placement.rank, world.placement.size) > 0
        return autotune.begin(world, tuner) if tunes else tuner
    except BaseException:
        world.close()
        raise


def _describe(world: World) -> None:
    offset_ns, error_ns = _measure_clock(world) if len(set(world.hosts)) > 1 else (0, 0)
    header = {
        "job": world.job,
        "rank": world.placement.rank,
        "size": world.placement.size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "generation": world.placement.generation,
        "process": world.member,
        "boot": _boot(),
        "clock_offset_ns": offset_ns,
        "clock_error_ns": error_ns,
    }
    world.engine.set_header(json.dumps(header))


def start_timeline(world: World, file_path: str, mark_cycles: bool) -> None:
    """See :func:`polyhvd.start_timeline`."""
    if world.timeline_is_carried and os.fspath(file_path) == world.timeline:
        return  # it continues: a function of an elastic job is called again in each world
    if os.path.isdir(file_path):  # whose neighbours the other ranks could write
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), file_path)
    own = path_of_rank(Path(file_path), world.placement.rank)
    if world.member is not None and world.placement.generation > 1:
        own = path_of_process(Path(file_path), world.member)
    path = os.fspath(own)
    with claimed(path):  # raises the errors that open() does
        world.engine.start_timeline(path, mark_cycles, world.settings.timeline_bytes_max)
    world.timeline = os.fspath(file_path)


def stop_timeline(world: World) -> None:
    """See :func:`polyhvd.stop_timeline`."""
    world.engine.stop_timeline()
    world.timeline, world.timeline_is_carried = "", False


def hand_over(world: World) -> Carried | None:
    """The timeline of a world that this process leaves for the next one; None: there is none."""
    file = world.engine.hand_over_timeline()
    return None if file is None else Carried(file, world.timeline)


def path_of_rank(path: Path, rank: int) -> Path:
    """Rank 0's file is where Horovod writes its only one; ``.rankN`` precedes the suffix of the others."""
    return path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def path_of_process(path: Path, member: int) -> Path:
    """The file of a process that joins an elastic job later: its rank may change, its number does not.

    Args:
        path: as of :func:`path_of_rank`.
        member: the number of the process.
    """
    return path.with_name(f"{path.stem}.process{member}{path.suffix}")


def clock_offset(rounds: Sequence[tuple[int, int, int, int]]) -> tuple[int, int]:
    """Offset of this clock to another one, and the most that it can be wrong by.

    No rank leaves an exchange before all have entered it, which bounds the offset from both
    sides; the middle of the tightest bounds is taken.

    Args:
        rounds: for each exchange when it was entered and left, here and there, in nanoseconds.
    """
    least = max(entered - other_left for entered, _, _, other_left in rounds)
    most = min(left - other_entered for _, left, other_entered, _ in rounds)
    return (least + most) // 2, abs(most - least + 1) // 2


def _measure_clock(world: World) -> tuple[int, int]:
    """Offset of this rank's clock to rank 0's, by a few small collectives."""
    gathered = []
    left = 0
    is_later = world.member is not None and world.placement.generation > 1
    for _ in range((_ROUNDS_AGAIN if is_later else _ROUNDS) + 1):
        own = np.array([[time.monotonic_ns(), left]], dtype=np.int64)
        handle = world.engine.submit(OpKind.ALLGATHER, "polyhvd.clock", (own,), None, blocking=True)
        handle.wait()
        left = time.monotonic_ns()
        times = np.frombuffer(memoryview(handle.buffers()[0]), dtype=np.int64).reshape(
            world.placement.size, 2
        )
        gathered.append(times.tolist())
    rank = world.placement.rank
    if rank == 0:
        return 0, 0
    return clock_offset(
        [(this[rank][0], after[rank][1], this[0][0], after[0][1]) for this, after in pairwise(gathered)]
    )


def _boot() -> str:
    """An id of this boot of the host: processes that share it share the monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
