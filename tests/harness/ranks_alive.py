"""Waits for what other processes do, as /proc shows it."""

from __future__ import annotations

import time

from polyhvd.testing.processes import is_running, processes_with, state_of

__all__ = ["is_running", "processes_with", "wait_until_asleep"]


def wait_until_asleep(pid: int, deadline_s: float = 30.0) -> None:
    """Wait until a process's main thread sleeps in the kernel, since it has nothing to do."""
    deadline = time.monotonic() + deadline_s
    while state_of(pid) != "S":
        assert time.monotonic() < deadline, f"process {pid} does not come to rest"
        time.sleep(0.01)
