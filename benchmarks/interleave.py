"""Measures several peers in turns, so that the machine's noise falls on all alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.workloads import Workload
from benchmarks.worlds import World

COUNT_MAX = 4000


@dataclass
class Sample:
    """The times of one peer's calls, in milliseconds, block by block."""

    blocks: list[list[float]] = field(default_factory=list)

    @property
    def times(self) -> list[float]:
        return sorted(time for block in self.blocks for time in block)

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    def quantile(self, part: float) -> float:
        times = self.times
        return times[min(len(times) - 1, int(part * len(times)))]

    def summary(self) -> dict[str, object]:
        """What is kept in the JSON file."""
        return {
            "median_ms": self.median,
            "p10_ms": self.quantile(0.1),
            "p90_ms": self.quantile(0.9),
            "calls": len(self.times),
            "median_ms_of_blocks": [statistics.median(block) for block in self.blocks],
        }


@dataclass(frozen=True)
class Effort:
    """How long to measure: blocks of each peer, and seconds of a block."""

    rounds: int = 7
    block_s: float = 0.15

    def count(self, call_s: float) -> int:
        """Calls in a block."""
        return max(3, min(COUNT_MAX, int(self.block_s / max(call_s, 1e-6))))


def _quick_call(world: World) -> float:
    """Seconds of a call that nothing disturbs, about."""
    first = min(world.measure(2))
    return min(world.measure(20)) if first < 0.005 else first


def interleaved(
    worlds: dict[str, World], workload: Workload, effort: Effort, say: Callable[[str], None]
) -> dict[str, Sample]:
    """Samples by peer; a peer that does not offer the workload has none, and one that fails is reported."""
    counts: dict[str, int] = {}
    for name, world in worlds.items():
        try:
            if all(world.order("prepare", workload)):
                counts[name] = effort.count(_quick_call(world))
        except RuntimeError as error:
            say(f"{workload.label} {workload.path}: {str(error).splitlines()[0]}")
    samples = {name: Sample() for name in counts}
    names = list(counts)
    for turn in range(effort.rounds):
        first = turn % max(1, len(names))
        for name in names[first:] + names[:first]:
            times = worlds[name].measure(counts[name])
            samples[name].blocks.append([1e3 * time for time in times])
    return samples
