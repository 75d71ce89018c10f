"""Measures several peers in turns, so that the machine's noise affects all equally."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.workloads import Workload
from benchmarks.worlds import Block, World

COUNT_MAX = 4000
#: Peers whose calls take longer have this many blocks.
SLOW_CALL_S, SLOW_ROUNDS = 0.7, 2
PAUSE_S_MAX = 0.5
#: A block is quiet when other processes had at most this part of all cores.
QUIET = 0.15
QUIET_BLOCKS_MIN = 3


@dataclass
class Sample:
    """The blocks of one peer. Those that other processes disturbed count where there are no others."""

    blocks: list[Block] = field(default_factory=list)

    @property
    def quiet(self) -> list[Block]:
        return [block for block in self.blocks if block.others <= QUIET]

    @property
    def disturbed(self) -> bool:
        """Whether too few blocks were quiet, so that all of them count."""
        return len(self.quiet) < QUIET_BLOCKS_MIN

    @property
    def times(self) -> list[float]:
        """Milliseconds, in order."""
        blocks = self.blocks if self.disturbed else self.quiet
        return sorted(1e3 * second for block in blocks for second in block.seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    def quantile(self, part: float) -> float:
        times = self.times
        return times[min(len(times) - 1, int(part * len(times)))]

    def summary(self) -> dict[str, object]:
        """The content of the JSON file."""
        return {
            "median_ms": self.median,
            "p10_ms": self.quantile(0.1),
            "p90_ms": self.quantile(0.9),
            "calls": len(self.times),
            "disturbed": self.disturbed,
            "blocks": [
                {"median_ms": 1e3 * statistics.median(block.seconds), "cpu_of_others": block.others}
                for block in self.blocks
            ],
        }


#: By column, by peer.
Results = list[tuple[Workload, dict[str, Sample]]]


@dataclass(frozen=True)
class Effort:
    """How long to measure: blocks of each peer, how many at most until they are quiet, seconds of a block.

    `pause` is the time without measuring after each block, as a multiple of the block's own.
    """

    rounds: int = 7
    rounds_max: int = 21
    block_s: float = 0.15
    pause: float = 0.0
    seconds_max: float = 60.0  # of a workload, when there are enough blocks but not enough quiet ones

    def count(self, call_s: float) -> int:
        """Calls in a block."""
        return max(2 if call_s > SLOW_CALL_S else 3, min(COUNT_MAX, int(self.block_s / max(call_s, 1e-6))))


def _quick_call(world: World, workload: Workload) -> float:
    """Seconds of a call that nothing disturbs, about."""
    first = min(world.measure(workload, 2).seconds)
    return min(world.measure(workload, 20).seconds) if first < 0.005 else first


class Column:
    """A workload, and the peers that offer it."""

    def __init__(
        self, worlds: dict[str, World], workload: Workload, effort: Effort, say: Callable[[str], None]
    ) -> None:
        self.workload, self.effort = workload, effort
        self.worlds: dict[str, World] = {}
        self.counts: dict[str, int] = {}
        self.slow: set[str] = set()
        self.spent_s = 0.0
        for name, world in worlds.items():
            try:
                if all(world.order("prepare", workload)):
                    call_s = _quick_call(world, workload)
                    self.counts[name] = effort.count(call_s)
                    self.worlds[name] = world
                    self.slow |= {name} if call_s > SLOW_CALL_S else set()
            except RuntimeError as error:
                say(f"{workload.label} {workload.path}: {str(error).splitlines()[0]}")
        self.samples = {name: Sample() for name in self.counts}

    def is_done(self, turn: int) -> bool:
        """Return whether there are enough blocks, and enough quiet ones or no time for more."""
        if turn < self.effort.rounds:
            return False
        samples = self.samples.values()
        enough = all(len(s.quiet) >= min(self.effort.rounds, len(s.blocks)) for s in samples)
        return enough or self.spent_s > self.effort.seconds_max

    def take_turn(self, turn: int) -> None:
        """A block of each peer, beginning with another one than the time before."""
        begin = time.monotonic()
        names = list(self.counts)
        first = turn % max(1, len(names))
        for name in names[first:] + names[:first]:
            if name in self.slow and turn >= SLOW_ROUNDS:
                continue
            block_begin = time.monotonic()
            self.samples[name].blocks.append(self.worlds[name].measure(self.workload, self.counts[name]))
            time.sleep(min(PAUSE_S_MAX, self.effort.pause * (time.monotonic() - block_begin)))
        self.spent_s += time.monotonic() - begin


def interleaved(
    worlds: dict[str, World], workloads: Sequence[Workload], effort: Effort, say: Callable[[str], None]
) -> Results:
    """Samples of all workloads, which take turns as well, by peer.

    A peer that does not offer a workload has none, and one that fails is reported.
    """
    for world in worlds.values():
        with contextlib.suppress(RuntimeError):  # it has ended, which its next order says
            world.order("forget")
    columns = [Column(worlds, workload, effort, say) for workload in workloads]
    for turn in range(effort.rounds_max):
        for column in columns:
            if not column.is_done(turn):
                column.take_turn(turn)
    return [(column.workload, column.samples) for column in columns if column.samples]
