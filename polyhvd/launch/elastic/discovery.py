"""Finds the hosts of an elastic job repeatedly while it runs, on a separate thread."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from polyhvd.launch.hosts.lists import HostsError, parse_hostfile, parse_hosts

__all__ = ["Discovery", "FixedHosts", "HostDiscovery", "HostDiscoveryScript", "HostsFile", "discovery_of"]

_INTERVAL_S = 1.0
_SCRIPT_TIMEOUT_S = 30.0
_OUTPUT_BYTES_MAX = 1 << 20
#: How long a file of hosts has to stay the same after a change, and how often this is tried.
_WRITE_S, _WRITES_MAX = 0.2, 25
_COMPLAINT_CHARACTERS_MAX = 500
_NUMBERS = re.compile(r"\d+")
#: Runs a program that ends with this process, however this process ends.
_LEASHED = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)\n"
    "if os.getppid() != int(sys.argv[1]): os._exit(1)\n"
    "try: os.execvp(sys.argv[2], sys.argv[2:])\n"
    "except OSError as error: sys.exit(f'{sys.argv[2]}: {error.strerror}')\n"
)


class HostDiscovery(Protocol):
    """Finds the present hosts. It may be slow, since it runs on a separate thread."""

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """The hosts by name, with the number of ranks that each takes.

        Raises:
            Exception: it is not known for now; the hosts stay those that were found last.
        """


class FixedHosts:
    """A :class:`HostDiscovery` that lists the hosts that it was given.

    Example::

        FixedHosts({"a": 2}).find_available_hosts_and_slots()  # {"a": 2}
    """

    def __init__(self, hosts: Mapping[str, int]) -> None:
        self._hosts = dict(hosts)

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """The hosts, always the same."""
        return self._hosts


class HostsFile:
    """A :class:`HostDiscovery` that reads a file of hosts, which may change.

    Args:
        path: of the file, as ``--hostfile`` takes it.
        slots: of a host that stands there once, without a number.
    """

    def __init__(self, path: str, slots: int = 1) -> None:
        self._path = path
        self._slots = slots
        self._content: bytes | None = None  # None: it was not read yet

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """Read it; raises HostsError."""
        self._await_writer()
        return {host.name: host.slots for host in parse_hostfile(self._path, self._slots)}

    def _await_writer(self) -> None:
        """If the file has changed, wait until it stays the same for a moment, but only for a few seconds.

        Hosts that are absent while it is written in place would have to leave the job.
        """
        for _ in range(_WRITES_MAX):
            content = b""
            with contextlib.suppress(OSError):  # reported when it is read
                content = Path(self._path).read_bytes()
            is_settled = self._content in (None, content)
            self._content = content
            if is_settled:
                return
            time.sleep(_WRITE_S)


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
        self._killed: subprocess.Popen[bytes] | None = None  # the last process that did not end in time

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """Run it; raises HostsError for what it prints, and OSError when it fails."""
        if self._killed is not None and self._killed.poll() is None:
            raise OSError(
                f"{self._script} is not run again before process {self._killed.pid} of its last run has "
                "ended, which was sent SIGKILL; does it wait for a file system that does not answer?"
            )
        command = [sys.executable, "-I", "-S", "-c", _LEASHED, str(os.getpid()), self._script]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            out, err = self._output(process)
        except BaseException:
            self._killed = process
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
        if process.returncode != 0:
            errors = err.decode("utf-8", "replace").strip().splitlines()
            words = f": {errors[-1]}" if errors else ""
            raise OSError(f"{self._script} has ended with status {process.returncode}{words}")
        lines = out.decode("utf-8", "replace").splitlines()
        names = [name for line in lines if (name := line.split("#")[0].strip())]
        try:
            hosts = parse_hosts(",".join(names), self._slots) if names else []
        except HostsError as error:
            raise HostsError(f"{self._script}: {error}") from None
        return {host.name: host.slots for host in hosts}

    def _output(self, process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
        """The output of the script until it ends; raises OSError if it takes too long or prints too much."""
        until = time.monotonic() + self._timeout_s
        assert process.stdout is not None
        assert process.stderr is not None
        printed = {process.stdout: bytearray(), process.stderr: bytearray()}
        with process.stdout, process.stderr, selectors.DefaultSelector() as selector:
            for stream in printed:
                selector.register(stream, selectors.EVENT_READ)
            while selector.get_map():
                if (remaining_s := until - time.monotonic()) <= 0:
                    has_ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                    what = "has ended, but a process that it has started still holds its output after"
                    what = what if has_ended else "has not ended within"
                    raise OSError(f"{self._script} {what} {self._timeout_s:g} s")
                for key, _ in selector.select(remaining_s):
                    data = os.read(key.fd, 65536)
                    if not data:
                        selector.unregister(key.fileobj)
                    printed[key.fileobj] += data  # type: ignore[index]
                    if len(printed[key.fileobj]) > _OUTPUT_BYTES_MAX:  # type: ignore[index]
                        raise OSError(f"{self._script} has printed more than {_OUTPUT_BYTES_MAX} bytes")
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise OSError(f"{self._script} has not ended within {self._timeout_s:g} s") from None
        return bytes(printed[process.stdout]), bytes(printed[process.stderr])


class _FromPython:
    """Checks the results of a user's :class:`HostDiscovery`."""

    def __init__(self, name: str, inner: HostDiscovery) -> None:
        self._name = name
        self._inner = inner

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        found: Any = self._inner.find_available_hosts_and_slots()
        pairs = list(found.items()) if isinstance(found, Mapping) else [(found, 0)]
        for host, slots in pairs:
            if not isinstance(host, str) or type(slots) is not int or slots < 1:
                raise HostsError(
                    f"{self._name}: expected a dict of the hosts' names with their slots, from 1 on; "
                    f"found {found!r}"[:500]
                )
            parse_hosts(f"[{host}]" if ":" in host else host)
        return dict(pairs)


_PYTHON = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)")


def discovery_of(text: str, slots: int) -> HostDiscovery:
    """The discovery of ``--host-discovery-script``: a program or ``MODULE:NAME``, a :class:`HostDiscovery`.

    Args:
        text: a path, or a module of Python that is found here or is installed, and a name in it: a class or
            function that makes the object without arguments, or the object.
        slots: of a host that a program prints without a number.

    Raises:
        ValueError: there is no such module or name, or it is no such object.

    Example::

        discovery_of("cluster:Hosts", 1)
    """
    named = _PYTHON.fullmatch(text)
    if named is None or os.path.exists(text):
        return HostDiscoveryScript(text, slots)
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    try:
        found = getattr(importlib.import_module(named[1]), named[2])
        if not hasattr(found, "find_available_hosts_and_slots") or isinstance(found, type):
            found = found()
    except Exception as error:
        raise ValueError(f"--host-discovery-script {text}: {type(error).__name__}: {error}") from error
    if not callable(getattr(found, "find_available_hosts_and_slots", None)):
        raise ValueError(
            f"--host-discovery-script {text}: a {type(found).__qualname__} has no method "
            "find_available_hosts_and_slots()"
        )
    return _FromPython(text, found)


class Discovery:
    """Calls a :class:`HostDiscovery` every second, on a thread, and keeps the changes.

    Args:
        source: the discovery to call.
        interval_s: the pause between two calls.
        look_up: called with the name of each host that is found; it may wait, as for name servers.
    """

    def __init__(
        self,
        source: HostDiscovery,
        interval_s: float = _INTERVAL_S,
        *,
        look_up: Callable[[str], object] = lambda name: None,
    ) -> None:
        self.source = source
        self._interval_s = interval_s
        self._look_up = look_up
        self._lock = threading.Lock()  # of what follows, which both threads use
        self._found: dict[str, int] | None = None  # new, and not taken yet
        self._complaints: list[str] = []
        self._known: dict[str, int] | None = None
        self._last_complaint = ""
        self._closed = threading.Event()

    def look(self) -> dict[str, int]:
        """Ask once, on this thread; what the source raises is raised."""
        hosts = self._ask()
        with self._lock:
            self._known = hosts
        return hosts

    def _ask(self) -> dict[str, int]:
        hosts = {
            str(name): int(slots) for name, slots in self.source.find_available_hosts_and_slots().items()
        }
        for name in hosts:
            self._look_up(name)
        return hosts

    def begin(self, ring: Callable[[], None]) -> None:
        """Begin to ask; ``ring`` is called, on the thread, when there is something to take."""
        with self._lock:
            if self._closed.is_set():  # the job is restarted, with the hosts that it had at first
                self._closed, self._known = threading.Event(), None
        arguments = (ring, self._closed)
        threading.Thread(target=self._run, args=arguments, name="polyhvd-discovery", daemon=True).start()

    def take(self) -> dict[str, int] | None:
        """The hosts, if they have changed since they were taken last."""
        with self._lock:
            found, self._found = self._found, None
            return found

    def complaints(self) -> list[str]:
        """New messages for the user, each once."""
        with self._lock:
            complaints, self._complaints = self._complaints, []
            return complaints

    def close(self) -> None:
        """Stop the discovery, without waiting for a call in progress."""
        self._closed.set()

    def _run(self, ring: Callable[[], None], closed: threading.Event) -> None:
        while not closed.wait(self._interval_s):
            before = self._known
            complaint = ""
            try:
                hosts = self._ask()
            except Exception as error:
                text = (str(error) or type(error).__name__)[:_COMPLAINT_CHARACTERS_MAX]
                complaint = f"discovery of hosts: {text}; the hosts stay as they are"
            with self._lock:
                if closed.is_set():
                    return
                changed = not complaint and hosts != before
                self._known = self._known if complaint else hosts
                if changed:
                    self._found = hosts
                # Many programs begin each line with the time and their process id.
                shape = _NUMBERS.sub("", complaint)
                is_new = shape not in ("", self._last_complaint)
                if is_new:
                    self._complaints.append(complaint)
                self._last_complaint = shape
            if (changed or is_new) and not closed.is_set():
                ring()
