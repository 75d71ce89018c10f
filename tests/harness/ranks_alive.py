"""Waits for what other processes do, as /proc shows it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from polyhvd.testing.processes import is_running, processes_with, state_of

__all__ = [
    "DEADLINE_S",
    "is_running",
    "outliving_sigkill",
    "processes_with",
    "wait_until",
    "wait_until_asleep",
]

DEADLINE_S = 120.0  # for liveness only
_PYTHON = sys.executable  # which a test may replace
#: Traces a process with PTRACE_SEIZE, and does not take note of its end, which its parent then cannot see.
_TRACER = (
    "import ctypes, os, signal, sys\n"
    "failed = ctypes.CDLL(None).ptrace(0x4206, int(sys.argv[1]), None, None)\n"
    "os.write(1, b'no' if failed else b'yes')\n"
    "signal.pause()\n"
)


def wait_until_asleep(pid: int) -> None:
    """Wait until a process's main thread sleeps in the kernel, since it has nothing to do."""
    wait_until(lambda: state_of(pid) == "S", f"process {pid} comes to rest", 30.0)


@contextlib.contextmanager
def outliving_sigkill(pid: int) -> Iterator[None]:
    """Make a process outlive SIGKILL, like one that waits for a file system that does not answer."""
    with subprocess.Popen([_PYTHON, "-c", _TRACER, str(pid)], stdout=subprocess.PIPE) as tracer:
        try:
            assert tracer.stdout is not None
            if tracer.stdout.read(2) == b"no":
                pytest.skip("needs ptrace(), which this user or this container may not call")
            yield
        finally:
            tracer.kill()


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Poll for something that happens in another process."""
    deadline, pause_s = time.monotonic() + deadline_s, 0.001
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)
