"""Policies for the end of a rank: a policy decides, the job carries it out. Pure.

A policy starts nothing, signals nothing and reads no clock, so that lists of endings test it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from polyhvd.launch.job.blame import Ending

__all__ = [
    "Decision",
    "FailurePolicy",
    "GoOn",
    "LetOthersFinish",
    "StartReplacement",
    "StopAtFirstFailure",
    "StopOthers",
    "processes_per_core",
]

#: After a failure, by how certain it is that this is the cause itself: time for the cause to show up, and for
#: the other ranks to report what they have lost and to write their flight dumps. The longest is for a rank
#: that has lost another one. On a busy host it is as many times longer as processes share a core.
_SETTLE_S = (0.5, 0.5, 1.0)
_PROCESSES_PER_CORE_MAX = 10.0


@dataclass(frozen=True)
class GoOn:
    """The other ranks go on."""


@dataclass(frozen=True)
class StopOthers:
    """Ask the other ranks to end, at this moment by ``time.monotonic()`` or at an earlier decision's."""

    at: float
    reason: str = ""  #: why the rank's end has this effect, if it does not always have it


@dataclass(frozen=True)
class StartReplacement:
    """Another process takes the rank's place. For elastic jobs: no policy here decides so."""


Decision = GoOn | StopOthers | StartReplacement


class FailurePolicy(Protocol):
    """A policy. A job calls it when one of its ranks has ended by itself."""

    def on_ending(self, ending: Ending, running: Set[int], now: float) -> Decision:
        """Return what follows.

        The job asks for every rank that ends, in good order or not, until it stops its ranks. Its exit
        status is that of the failure which explains the others, whatever was decided.

        Args:
            ending: which rank has ended, where and how.
            running: the ranks that have not ended.
            now: the time, by ``time.monotonic()``.

        Example::

            StopAtFirstFailure().on_ending(Ending(1, "host1", -9), {0}, now=5.0)  # StopOthers(at=5.5)
        """


def processes_per_core() -> float:
    """Return how many processes share each core of this host, now or in the last minute: from 1 to 10."""
    try:
        load, _, _, runnable, _ = Path("/proc/loadavg").read_text().split()
        busy = max(float(load), int(runnable.partition("/")[0]))
    except (OSError, ValueError):  # no /proc, or that of a sandbox
        return 1.0
    return min(max(busy / (os.cpu_count() or 1), 1.0), _PROCESSES_PER_CORE_MAX)


class StopAtFirstFailure:
    """A rank that fails ends the job. The default.

    Args:
        slowdown: returns by how much longer than usual the other ranks need.
    """

    def __init__(self, slowdown: Callable[[], float] = processes_per_core) -> None:
        self._slowdown = slowdown

    def on_ending(self, ending: Ending, running: Set[int], now: float) -> Decision:
        """Stop the others soon, after more time where the failure does not explain itself."""
        if not ending.failed:
            return GoOn()
        return StopOthers(now + _SETTLE_S[ending.certainty] * self._slowdown())


class LetOthersFinish:
    """A rank that fails stops no others: they end by themselves, if they can continue without it."""

    def on_ending(self, ending: Ending, running: Set[int], now: float) -> Decision:
        """Let the others go on."""
        return GoOn()
