"""A running polyhvdrun, and worlds of ranks as threads; tests/launch makes fixtures of them."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from fork_servers import IMPORTS, ForkServers
from ranks_alive import DEADLINE_S, is_running, wait_until

from polyhvd.config import Launched, Settings
from polyhvd.launch.providers.local import meet_as
from polyhvd.rendezvous.auth import new_secret, parse_secret
from polyhvd.rendezvous.server import Server
from polyhvd.runtime import bootstrap
from polyhvd.runtime.connections import Connections

ROOT = Path(__file__).resolve().parents[2]
_RANKS = 2  # at least, in every job

RANK = "import os, sys, time, signal\nrank = int(os.environ['POLYHVD_RANK'])\n"
#: Says where it is, then waits to be ended.
WAITING = RANK + "os.write(1, b'pid %d\\n' % os.getpid())\nwhile True: time.sleep(60)\n"
#: Each rank has a child in its group and one that has left it, as daemons do.
FAMILY = RANK + (
    "import subprocess\n"
    "ignore = 'import os, time, signal; signal.signal(15, signal.SIG_IGN)'\n"
    "say = 'os.write(1, b\"pid %d\\\\n\" % os.getpid())'\n"  # at once: they share a pipe
    "child = [sys.executable, '-c', f'{ignore}; {say}; time.sleep(600)']\n"
    "subprocess.Popen(child)\n"
    "subprocess.Popen(child, start_new_session=True)\n"
)


def pids(out: bytes) -> list[int]:
    return [int(number) for number in re.findall(rb"pid (\d+)", out)]


class Launcher:
    """A polyhvdrun process. Its ranks run Python source given as text.

    Args:
        folder: for scripts and what the job writes.
        servers: in whose forks programs may run, so that they import NumPy and frameworks sooner.
    """

    def __init__(self, folder: Path, servers: ForkServers | None = None) -> None:
        self._folder = folder
        self._servers = servers
        self._scripts = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.out = b""
        self.err = b""

    def script(self, source: str) -> str:
        """Write a script and return its path."""
        self._scripts += 1
        path = self._folder / f"script{self._scripts}.py"
        path.write_text(source)
        return str(path)

    def python(self, framework: str = "numpy") -> list[str]:
        """What stands for ``sys.executable`` in the command of a job whose ranks import this framework.

        With servers the ranks run in forks of them. polyhvdrun then has a proxy of each rank for its child,
        which ends as the rank does but has another process id, group and session. A test whose subject is
        one of these, or what is seen first of a rank's death, uses ``sys.executable``.
        """
        imports = IMPORTS.get("tensorflow" if framework.endswith("keras") else framework)
        if self._servers is None or imports is None:
            return [sys.executable]
        return self._servers.python(_RANKS, imports)

    def start(
        self,
        *options: str,
        source: str = "",
        argv: list[str] | None = None,
        env: dict[str, str] | None = None,
        session: bool = False,
        before: Sequence[str] = (),
        python: str = sys.executable,
        group: bool = False,
        fresh: bool = False,
    ) -> Launcher:
        """Start polyhvdrun with options and, as its command, Python with `source` or else `argv`.

        `source` runs in forks of the servers, if there are any, unless `fresh` is true. `before` are words of
        another command that runs polyhvdrun, with `python`. With `group` it is a process group of its own, as
        below a shell: one without a parent in its session ignores Ctrl-Z.
        """
        if argv is None:
            argv = [*([sys.executable] if fresh else self.python()), self.script(source)]
        self.process = subprocess.Popen(
            [*before, python, "-m", "polyhvd.launch", *options, *argv],
            cwd=ROOT,
            env={**os.environ, "POLYHVD_FLIGHT_DIR": str(self._folder), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=session,
            preexec_fn=os.setpgrp if group else None,
        )
        return self

    def wait_for(self, text: str, count: int, *, error: bool = False) -> bytes:
        """Read until `text` has come `count` times, on standard output or error; returns all of it so far."""
        process = self.process
        assert process is not None
        deadline = time.monotonic() + DEADLINE_S
        while (self.err if error else self.out).count(text.encode()) < count:
            assert time.monotonic() < deadline, f"no {text!r} in time:\n{self.out!r}\n{self.err!r}"
            self._read(process, deadline)
        return self.err if error else self.out

    def finish(self, deadline_s: float = DEADLINE_S) -> tuple[int, str, str]:
        """Wait for the end; returns exit status, standard output and error."""
        process = self.process
        assert process is not None
        try:
            out, err = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            pytest.fail(f"polyhvdrun did not end:\n{self.out + out!r}\n{self.err + err!r}")
        self.out, self.err = self.out + out, self.err + err
        return process.returncode, self.out.decode(), self.err.decode()

    def run(
        self,
        *options: str,
        source: str = "",
        argv: list[str] | None = None,
        env: dict[str, str] | None = None,
        fresh: bool = False,
    ) -> tuple[int, str, str]:
        """Start, and wait for the end."""
        return self.start(*options, source=source, argv=argv, env=env, fresh=fresh).finish()

    def signal(self, number: int) -> None:
        """Send a signal to the launcher alone."""
        assert self.process is not None
        self.process.send_signal(number)

    def _read(self, process: subprocess.Popen[bytes], deadline: float) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        ready, _, _ = select.select([process.stdout, process.stderr], [], [], deadline - time.monotonic())
        for stream in ready:
            data = os.read(stream.fileno(), 65536)
            assert data or stream is process.stderr, f"polyhvdrun ended early:\n{self.out!r}\n{self.err!r}"
            if stream is process.stdout:
                self.out += data
            else:
                self.err += data


def below(pid: int) -> list[int]:
    """All living processes below one, parents before their children."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] not in (b"Z", b"X"):
            parents[int(name)] = int(fields[1])
    found: list[int] = []
    queue = [pid]
    while queue:
        children = [child for child, parent in parents.items() if parent == queue[0]]
        found += children
        queue = [*queue[1:], *children]
    return found


def assert_gone(pids: list[int]) -> None:
    """Fail, and clean up, unless all of these processes end soon."""
    try:
        wait_until(lambda: not any(is_running(pid) for pid in pids), f"the end of {pids}", 25.0)
    finally:
        for pid in pids:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)


class World:
    """Ranks as threads of this process, around one rendezvous."""

    def __init__(self) -> None:
        self.secret = new_secret()
        self.server = Server(parse_secret(self.secret))
        self._connections: list[Connections] = []

    def config(self, rank: int, size: int, **values: object) -> tuple[Launched, Settings]:
        """A rank's variables and settings; by default one host and five seconds."""
        variables: dict[str, object] = {"rendezvous": self.server.endpoint, "secret": self.secret}
        variables |= {name: value for name, value in values.items() if hasattr(Launched, name)}
        settings = {name: value for name, value in values.items() if not hasattr(Launched, name)}
        return (
            Launched(rank=rank, size=size, **variables),  # type: ignore[arg-type]
            Settings(**{"start_timeout_s": 5.0, **settings}),  # type: ignore[arg-type]
        )

    def start(
        self,
        configs: list[tuple[Launched, Settings]],
        *,
        generation: int = 1,
        process_sets: list[list[list[int]]] | None = None,
    ) -> Callable[[], list[Connections | Exception]]:
        """Begin init() on a thread for each config; the result waits for what each one got."""
        results: list[Connections | Exception | None] = [None] * len(configs)

        def init(index: int) -> None:
            sets = process_sets[index] if process_sets else []
            try:
                launched, settings = configs[index]
                placement, store = meet_as(
                    launched, generation - 1, time.monotonic() + settings.start_timeout_s
                )
                assert store is not None
                with store:
                    connections = bootstrap.connect(settings, placement, store, sets)
                self._connections.append(connections)
                results[index] = connections
            except Exception as error:
                results[index] = error

        threads = [threading.Thread(target=init, args=(i,)) for i in range(len(configs))]
        for thread in threads:
            thread.start()

        def wait() -> list[Connections | Exception]:
            for thread in threads:
                thread.join(DEADLINE_S)
                assert not thread.is_alive(), "init() hangs"
            return [result for result in results if result is not None]

        return wait

    def connect(
        self, size: int, *, hosts: str = "", generation: int = 1, **settings: object
    ) -> list[Connections]:
        """init() on all ranks; `hosts` has a letter a rank."""
        configs = [self.config(r, size, host_id=(hosts or "a" * size)[r], **settings) for r in range(size)]
        results = self.start(configs, generation=generation)()
        for result in results:
            if isinstance(result, Exception):
                raise result
        return [result for result in results if isinstance(result, Connections)]

    def disconnect(self) -> None:
        """Close every descriptor that was handed out."""
        for connections in self._connections:
            for descriptor in descriptors(connections):
                os.close(descriptor)
        self._connections = []

    def close(self) -> None:
        self.disconnect()
        self.server.close()


def descriptors(connections: Connections) -> list[int]:
    """All descriptors of these connections."""
    tables = (connections.local_fds, connections.control_fds, connections.data_fds)
    found = [descriptor for table in tables for descriptor in table.values()]
    return found + ([connections.segment_fd] if connections.segment_fd >= 0 else [])
