"""Finds the rank that a failed job is to be blamed on. Pure.

When one rank dies the others soon fail too, because they lost it. The first exit that the launcher
sees need not be the cause: what counts is how each rank ended.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Ending", "describe", "exit_status", "first_cause", "traceback_lines"]

_LINES_MAX = 60
_TRACEBACK = b"Traceback (most recent call last)"
#: A rank that ends with one of these suffered from another one.
_VICTIM = re.compile(
    rb"\b(PeerLostError|PeerDepartedError|HorovodInternalError|ShutdownError|TransferTimeoutError)\b"
)


@dataclass
class Ending:
    """How a rank ended by itself, before the launcher sent any signal."""

    rank: int
    host: str
    status: int  # negative: the signal that killed it
    tail: Sequence[bytes] = field(default=())  # the last lines on its standard error
    reason: str = ""  # the launcher's own words, where there is no exit status

    @property
    def certainty(self) -> int:
        """0: killed from outside or crashed; 1: failed; 2: failed because it lost another rank."""
        if self.status < 0 or self.reason:
            return 0
        return 2 if any(_VICTIM.search(line) for line in _last_error(self.tail)) else 1


def first_cause(endings: Sequence[Ending]) -> Ending:
    """The failure that explains the others; among equals the earliest. ``endings`` in their order."""
    return min(endings, key=lambda ending: ending.certainty)


def describe(ending: Ending) -> str:
    """One line: which rank, where, and what happened to it."""
    who = f"rank {ending.rank} on {ending.host}"
    if ending.reason:
        return f"{who} {ending.reason}"
    if ending.status < 0:
        return f"{who} was killed by {_signal_name(-ending.status)}"
    return f"{who} exited with status {ending.status}"


def exit_status(ending: Ending) -> int:
    """The exit status of the whole job, as a shell would put it."""
    return 128 - ending.status if ending.status < 0 else ending.status


def traceback_lines(tail: Sequence[bytes]) -> list[bytes]:
    """What to show of a rank's last words: its last traceback, or the last few lines."""
    starts = [i for i, line in enumerate(tail) if line.startswith(_TRACEBACK)]
    return list(tail[starts[-1] :] if starts else tail[-20:])[-_LINES_MAX:]


def _last_error(tail: Sequence[bytes]) -> list[bytes]:
    """The lines that name the exception: below the stack of the last traceback, which is indented."""
    return [line for line in traceback_lines(tail) if line[:1] not in (b" ", b"")]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
