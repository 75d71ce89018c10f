"""The descendants of this process: finds them, sends them signals, and reads how the kernel ended them.

A part of the agent's program, see :mod:`polyhvd.launch.job.agent_program`: uses only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time

__all__ = ["await_killed", "descendants", "kill_descendants", "oom_kills", "run_aside", "send_signal"]

#: Processes that tidy /dev/shm up once their clients are dead: of multiprocessing, and of PyTorch.
_JANITOR = re.compile(rb"resource_tracker import main|torch_shm_manager")
_JANITOR_S = 3.0
#: For the end of a process after SIGKILL, which may wait for a file system that does not answer.
_KILLED_S = 5.0
_PR_SET_PDEATHSIG = 1


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
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return set()  # scanning all processes of a large host would take too long
    children = _children()
    found: set[int] = set()
    queue = [os.getpid()]
    while queue:
        for child in children.get(queue.pop(), []):
            found.add(child)
            queue.append(child)
    return found


def send_signal(rank: int, number: int) -> None:
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
    """Return whether a process has a handler for a signal, or has blocked it to wait for it."""
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


def await_killed(process: subprocess.Popen[bytes], name: str) -> int:
    """Return the exit status of a child that was sent SIGKILL.

    Waits a few seconds for its end. Then it reports the process, by this name, and leaves it behind.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(_KILLED_S)
    text = f"polyhvd: {name} (process {process.pid}) has not ended within {_KILLED_S:g} s of SIGKILL"
    print(f"{text}; it is left behind", file=sys.stderr, flush=True)
    return -signal.SIGKILL


def oom_kills() -> tuple[int, int]:
    """How many processes the kernel has killed for lack of memory so far.

    Returns:
        Of this process's cgroup, and of this host; 0 where it cannot be read.
    """
    own = next((count for path in _cgroup_files() if (count := _oom_kill(path)) is not None), 0)
    return own, _oom_kill("/proc/vmstat") or 0


def _cgroup_files() -> list[str]:
    """The files that may have the count of this process's cgroup, of version 2 and 1, likeliest first."""
    files = []
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as cgroups:
        for line in cgroups:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if controllers == "":
                folder, name = "/sys/fs/cgroup", "memory.events"
            elif "memory" in controllers.split(","):
                folder, name = "/sys/fs/cgroup/memory", "memory.oom_control"
            else:
                continue
            # In a container, the path may be that of the host, and its own cgroup the root.
            files += [f"{folder}{path}/{name}", f"{folder}/{name}"]
    return files


def _oom_kill(path: str) -> int | None:
    try:
        with open(path) as counts:
            return next((int(line.split()[1]) for line in counts if line.startswith("oom_kill ")), None)
    except OSError:
        return None


def run_aside(program: bytes) -> int:
    """Have a child of this process, which has one thread, run a program in Python.

    It may hang, as file systems and networks do, while this process goes on; and it ends with this process.

    Returns:
        A descriptor from which comes what the program writes to descriptor 1. Who calls reaps the child.
    """
    parent = os.getpid()
    found, written = os.pipe()
    if os.fork() > 0:
        os.close(written)
        return found
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.dup2(written, 1)
        for descriptor in map(int, os.listdir("/proc/self/fd")):  # with the launcher's pipes among them
            if descriptor > 2:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        if os.getppid() == parent:
            exec(compile(program, "polyhvd-examination", "exec"), {"__name__": "__main__"})
            status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        os._exit(status)
