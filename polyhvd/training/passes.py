"""Backward passes whose gradients wait, on this rank, for an update: those of all optimizers of a process.

They are in no state. Code that keeps a state commits when there are none, and drops them to restore a commit.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

__all__ = ["CountedPasses", "drop_passes", "passes_held", "register"]


class CountedPasses(Protocol):
    """Counts the passes of an optimizer."""

    def passes_held(self) -> int:
        """How many passes an update takes at most, while it has not used some of them; else 0."""

    def drop_passes(self) -> None:
        """Forget those that were made: they are going to be made again."""


_lock = threading.Lock()  # of the set
_everyone: weakref.WeakSet[CountedPasses] = weakref.WeakSet()


def register(passes: CountedPasses) -> None:
    """Take the passes of another optimizer into account, as long as they are there."""
    with _lock:
        _everyone.add(passes)


def passes_held() -> int:
    """The largest number among the optimizers; 0: no update lacks passes. The same for equal calls."""
    with _lock:
        everyone = list(_everyone)
    return max((passes.passes_held() for passes in everyone), default=0)


def drop_passes() -> None:
    """Have all optimizers forget the passes that no update has used."""
    with _lock:
        everyone = list(_everyone)
    for passes in everyone:
        passes.drop_passes()
