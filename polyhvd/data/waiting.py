"""Waits that Ctrl-C ends at any moment."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from typing import Any

__all__ = ["is_done_by", "wait_for"]

#: The longest wait. CPython handles a signal that arrives just before the main thread waits for a lock only
#: when that wait is over. On a busy machine one Ctrl-C of ten arrives so.
_LOOK_S = 0.5


def wait_for(condition: threading.Condition, predicate: Callable[[], object]) -> None:
    """Wait until the predicate is true, in a thread that holds the lock of the condition."""
    while not condition.wait_for(predicate, _LOOK_S):
        pass


def is_done_by(future: Future[Any], deadline: float) -> bool:
    """Wait for a future, but not longer than until ``deadline`` of ``time.monotonic()``."""
    while not future.done():
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        with contextlib.suppress(TimeoutError):
            future.exception(min(left_s, _LOOK_S))
    return True
