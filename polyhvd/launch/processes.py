"""The processes below this one: who they are, and how they get signals.

A part of the agent's program, see :mod:`polyhvd.launch.agent_program`: the standard library alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time

__all__ = ["descendants", "kill_descendants", "tell"]

#: Processes that tidy /dev/shm up once their clients are dead: of multiprocessing, and of PyTorch.
_JANITOR = re.compile(rb"resource_tracker import main|torch_shm_manager")
_JANITOR_S = 3.0


def _children() -> dict[int, list[int]]:
    """All living processes by their parent."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as stat:
                fields = stat.read().rpartition(b")")[2].split()
        except OSError:
            continue  # gone
        if fields[0] not in (b"Z", b"X"):
            children.setdefault(int(fields[1]), []).append(int(name))
    return children


def descendants() -> set[int]:
    """All living processes below this one."""
    children = _children()
    found: set[int] = set()
    queue = [os.getpid()]
    while queue:
        for child in children.get(queue.pop(), []):
            found.add(child)
            queue.append(child)
    return found


def tell(rank: int, number: int) -> None:
    """Send a signal to a rank if it catches it, or else to those below it that do: it may be a shell."""
    children = _children()
    queue = [rank]
    while queue:
        pid = queue.pop()
        if _catches(pid, number):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        else:
            queue += children.get(pid, [])


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, or has blocked it to wait for it."""
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            masks = re.findall(rb"Sig(?:Cgt|Blk):\s*([0-9a-f]+)", status.read())
    except OSError:
        return False
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def _is_janitor(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as command:
            return bool(_JANITOR.search(command.read()))
    except OSError:
        return False


def kill_descendants(wait_s: float = 5.0) -> None:
    """Kill everything below this process; orphans come to us, who are their subreaper.

    Janitors end by themselves when their clients are dead, and get a moment for it.
    """
    begin = time.monotonic()
    while True:
        living = descendants()
        now = time.monotonic()
        spare = wait_s == 0.0 or now < begin + _JANITOR_S
        for pid in living:
            if spare and _is_janitor(pid):
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not living or now >= begin + wait_s:
            return
        time.sleep(0.005)
