"""Which hosts there are, asked again and again while an elastic job runs, beside its loop."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from polyhvd.launch.hosts import HostsError, parse_hosts

__all__ = ["Discovery", "FixedHosts", "HostDiscovery", "HostDiscoveryScript"]

_INTERVAL_S = 1.0
_SCRIPT_TIMEOUT_S = 30.0
_OUTPUT_BYTES_MAX = 1 << 20
#: Runs a program that ends with this process, however this process ends.
_LEASHED = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)\n"
    "if os.getppid() != int(sys.argv[1]): os._exit(1)\n"
    "try: os.execvp(sys.argv[2], sys.argv[2:])\n"
    "except OSError as error: sys.exit(f'{sys.argv[2]}: {error.strerror}')\n"
)


class HostDiscovery(Protocol):
    """Says which hosts there are now. May take its time: it has a thread of its own."""

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """The hosts by name, with the number of ranks that each takes.

        Raises:
            Exception: it is not known for now; the hosts stay those that were found last.
        """


class FixedHosts:
    """A :class:`HostDiscovery` that says what it was told.

    Example::

        FixedHosts({"a": 2}).find_available_hosts_and_slots()  # {"a": 2}
    """

    def __init__(self, hosts: Mapping[str, int]) -> None:
        self._hosts = dict(hosts)

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """The hosts, always the same."""
        return self._hosts


class HostDiscoveryScript:
    """A :class:`HostDiscovery` that runs a program, which prints a line ``host`` or ``host:slots`` for each.

    Args:
        script: its path, or a name that is looked up as a shell does.
        slots: of a host that is printed without a number.
        timeout_s: it is killed after.
    """

    def __init__(self, script: str, slots: int = 1, timeout_s: float = _SCRIPT_TIMEOUT_S) -> None:
        self._script = script
        self._slots = slots
        self._timeout_s = timeout_s

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """Run it; raises HostsError for what it prints, and OSError when it fails."""
        command = [sys.executable, "-I", "-S", "-c", _LEASHED, str(os.getpid()), self._script]
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as process:
            try:
                out, err = process.communicate(timeout=self._timeout_s)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise OSError(f"{self._script} has not ended within {self._timeout_s:g} s") from None
        if process.returncode != 0:
            said = err.decode("utf-8", "replace").strip().splitlines()
            words = f": {said[-1]}" if said else ""
            raise OSError(f"{self._script} has ended with status {process.returncode}{words}")
        lines = out[:_OUTPUT_BYTES_MAX].decode("utf-8", "replace").splitlines()
        names = [name for line in lines if (name := line.split("#")[0].strip())]
        try:
            hosts = parse_hosts(",".join(names), self._slots) if names else []
        except HostsError as error:
            raise HostsError(f"{self._script}: {error}") from None
        return {host.name: host.slots for host in hosts}


class Discovery:
    """Asks a :class:`HostDiscovery` every second, on a thread, and keeps what has changed.

    Args:
        source: whom to ask.
        interval_s: the pause between two questions.
    """

    def __init__(self, source: HostDiscovery, interval_s: float = _INTERVAL_S) -> None:
        self.source = source
        self._interval_s = interval_s
        self._lock = threading.Lock()  # of what follows, which both threads use
        self._found: dict[str, int] | None = None  # new, and not taken yet
        self._complaints: list[str] = []
        self._known: dict[str, int] | None = None
        self._last_complaint = ""
        self._closed = threading.Event()

    def look(self) -> dict[str, int]:
        """Ask once, on this thread; what the source raises is raised."""
        hosts = {
            str(name): int(slots) for name, slots in self.source.find_available_hosts_and_slots().items()
        }
        with self._lock:
            self._known = hosts
        return hosts

    def begin(self, ring: Callable[[], None]) -> None:
        """Begin to ask; ``ring`` is called, on the thread, when there is something to take."""
        threading.Thread(target=self._run, args=(ring,), name="polyhvd-discovery", daemon=True).start()

    def take(self) -> dict[str, int] | None:
        """The hosts, if they have changed since they were taken last."""
        with self._lock:
            found, self._found = self._found, None
            return found

    def complaints(self) -> list[str]:
        """What to tell the user: each once."""
        with self._lock:
            told, self._complaints = self._complaints, []
            return told

    def close(self) -> None:
        """Ask no more. A question that is under way is not waited for."""
        self._closed.set()

    def _run(self, ring: Callable[[], None]) -> None:
        while not self._closed.wait(self._interval_s):
            before = self._known
            complaint = ""
            try:
                hosts = self.look()
            except Exception as error:
                complaint = f"discovery of hosts: {error or type(error).__name__}; the hosts stay as they are"
            with self._lock:
                changed = not complaint and hosts != before
                if changed:
                    self._found = hosts
                told = complaint not in ("", self._last_complaint)
                if told:
                    self._complaints.append(complaint)
                self._last_complaint = complaint
            if (changed or told) and not self._closed.is_set():
                ring()
