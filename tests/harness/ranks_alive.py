"""Waits for what other processes do, as /proc shows it."""

from __future__ import annotations

import time
from collections.abc import Callable

from polyhvd.testing.processes import is_running, processes_with, state_of

__all__ = ["DEADLINE_S", "is_running", "processes_with", "wait_until", "wait_until_asleep"]

DEADLINE_S = 120.0  # for liveness only


def wait_until_asleep(pid: int, deadline_s: float = 30.0) -> None:
    """Wait until a process's main thread sleeps in the kernel, since it has nothing to do."""
    deadline = time.monotonic() + deadline_s
    while state_of(pid) != "S":
        assert time.monotonic() < deadline, f"process {pid} does not come to rest"
        time.sleep(0.01)


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Poll for something that happens in another process."""
    deadline, pause_s = time.monotonic() + deadline_s, 0.001
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)
