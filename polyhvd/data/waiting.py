"""Waits that Ctrl-C ends at any moment."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from typing import Any

__all__ = ["LOOK_S", "is_done_by", "wait_for"]

#: The longest wait. CPython handles a signal that arrives just before the main thread waits for a lock only
#: when that wait is over. On a busy machine one Ctrl-C of ten arrives so.
LOOK_S = 0.5


def wait_for(
    condition: threading.Condition,
    predicate: Callable[[], object],
    look: Callable[[float], None] = lambda waited_s: None,
) -> None:
    """Wait until the predicate is true, in a thread that holds the lock of the condition.

    Args:
        condition: notified when the predicate may have become true.
        predicate: likewise.
        look: called every :data:`LOOK_S` with the seconds waited so far; may raise.
    """
    waited_s = 0.0
    while not condition.wait_for(predicate, LOOK_S):
        waited_s += LOOK_S
        look(waited_s)


def is_done_by(future: Future[Any], deadline: float) -> bool:
    """Wait for a future, but not longer than until ``deadline`` of ``time.monotonic()``."""
    while not future.done():
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        with contextlib.suppress(TimeoutError):
            future.exception(min(left_s, LOOK_S))
    return True
