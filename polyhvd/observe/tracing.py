"""What a rank writes about itself: who it is, how its clock differs, and its timeline.

:mod:`polyhvd.observe.timeline` and :mod:`polyhvd.observe.flight` read the files.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from polyhvd.collectives.adapter import OpKind
from polyhvd.observe.files import claimed
from polyhvd.runtime.world import World

__all__ = ["begin", "clock_offset", "path_of_rank", "start_timeline"]

DYNAMIC = "DYNAMIC"
_ROUNDS = 8


def begin(world: World) -> None:
    """Describe this rank to its engine, and start the timeline that the environment asks for.

    Called by ``init()`` on all ranks: with several hosts it compares their clocks.
    """
    offset_ns, error_ns = _measure_clock(world) if len(set(world.hosts)) > 1 else (0, 0)
    header = {
        "rank": world.placement.rank,
        "size": world.placement.size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "generation": world.placement.generation,
        "boot": _boot(),
        "clock_offset_ns": offset_ns,
        "clock_error_ns": error_ns,
    }
    world.engine.set_header(json.dumps(header))
    settings = world.settings
    if settings.timeline and settings.timeline.upper() != DYNAMIC:
        start_timeline(world, settings.timeline, settings.timeline_mark_cycles)


def start_timeline(world: World, file_path: str, mark_cycles: bool) -> None:
    """See :func:`polyhvd.start_timeline`."""
    if os.path.isdir(file_path):  # whose neighbours the other ranks could write
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), file_path)
    path = os.fspath(path_of_rank(Path(file_path), world.placement.rank))
    with claimed(path):  # says what is wrong as Python does
        world.engine.start_timeline(path, mark_cycles, world.settings.timeline_bytes_max)


def path_of_rank(path: Path, rank: int) -> Path:
    """Rank 0's file is where Horovod writes its only one; ``.rankN`` precedes the suffix of the others."""
    return path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def clock_offset(rounds: Sequence[tuple[int, int, int, int]]) -> tuple[int, int]:
    """Offset of this clock to another one, and the most that it can be wrong by.

    Nobody has left an exchange before everybody has entered it, which bounds the offset from both
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
    for _ in range(_ROUNDS + 1):
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
    """What processes with the same monotonic clock have in common."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
