"""Starts an agent on each host: directly on this one, through ssh on the others.

The job, with the secret in it, goes to the agent's standard input and never on a command line.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyhvd.launch import agent

__all__ = ["AgentProcess", "SshOptions", "kill_strays", "local_command", "ssh_command"]

_SOURCE = Path(agent.__file__)
_NOISE_BYTES_MAX = 1 << 16  # printed by a login shell before the agent speaks
#: Belongs to the launcher's session or host, not to the job.
_NOT_FORWARDED = re.compile(
    r"_|DISPLAY|HOME|HOST|HOSTNAME|LOGNAME|LS_COLORS|MAIL|OLDPWD|PWD|SHELL|SHLVL|TERM|TMPDIR|USER"
    r"|(BASH_FUNC|DBUS|SSH|SUDO|SYSTEMD|WAYLAND|XDG)_.*"
)


@dataclass(frozen=True)
class SshOptions:
    """How other hosts are reached; everything else is left to the user's ssh configuration."""

    port: int | None = None
    identity_file: str | None = None
    options: tuple[str, ...] = ()  # as for ssh -o
    python: str = field(default_factory=lambda: sys.executable)  # on the other host
    connect_timeout_s: float = 30.0


def local_command() -> list[str]:
    """The command of an agent on this host."""
    return [sys.executable, "-I", "-S", str(_SOURCE), str(os.getpid())]


def ssh_command(host: str, ssh: SshOptions, source_bytes: int) -> list[str]:
    """The command of an agent on another host, which reads its program from standard input."""
    # BatchMode: nobody is there to answer a question. Host keys are checked as the user's
    # configuration says, because the job's secret goes over this connection.
    options = ["BatchMode=yes", f"ConnectTimeout={max(1, round(ssh.connect_timeout_s))}"]
    options += ["ServerAliveInterval=5", "ServerAliveCountMax=3", *ssh.options]
    command = ["ssh", "-T", "-x"]
    for option in options:
        command += ["-o", option]
    if ssh.port is not None:
        command += ["-p", str(ssh.port)]
    if ssh.identity_file is not None:
        command += ["-i", ssh.identity_file]
    program = f"import sys;exec(compile(sys.stdin.buffer.read({source_bytes}),'polyhvd-agent','exec'))"
    # What tells every process of this job to end must not end ssh, and with it the far ranks, at once.
    shield = ["sh", "-c", 'trap "" HUP INT TERM; exec "$@"', "ssh"]
    remote = f"exec {shlex.quote(ssh.python)} -I -S -c {shlex.quote(program)}"
    return [*shield, *command, "--", host, remote]


def forwarded_environment() -> dict[str, str]:
    """What ranks on other hosts get of the launcher's environment."""
    return {name: value for name, value in os.environ.items() if not _NOT_FORWARDED.fullmatch(name)}


def kill_strays(secret: str, wait_s: float = 2.0) -> None:
    """Kill processes of a job on this host that have outlived its agent and the agent's guard.

    They are known by the job's secret in their environment.
    """
    mark = f"POLYHVD_SECRET={secret}".encode()
    deadline = time.monotonic() + wait_s
    while True:
        strays = [
            int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if _holds(path, mark)
        ]
        for pid in strays:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not strays or time.monotonic() >= deadline:
            return
        time.sleep(0.01)


def _holds(environ: Path, mark: bytes) -> bool:
    try:
        return mark in environ.read_bytes().split(b"\0")
    except OSError:
        return False  # gone, or somebody else's


class AgentProcess:
    """An agent as the launcher sees it: frames in, frames out. Killing it kills its ranks."""

    def __init__(self, host: str, ssh: SshOptions | None, job: dict[str, Any]) -> None:
        """Start it; ``ssh`` None means on this host. The job follows once it answers."""
        self.host = host
        self.ranks: list[int] = [rank for rank, _ in job["ranks"]]
        self.remote = ssh is not None
        self.ready = False
        self.ended = False
        #: The last lines of the agent's own standard error: ssh's complaints.
        self.complaints: deque[str] = deque(maxlen=20)
        self._job = job
        self._inbox = bytearray()
        source = b"" if ssh is None else _SOURCE.read_bytes()
        command = local_command() if ssh is None else ssh_command(host, ssh, len(source))
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the launcher alone to handle
            bufsize=0,
        )
        stdin, stdout, stderr = self.process.stdin, self.process.stdout, self.process.stderr
        assert stdin is not None
        assert stdout is not None
        assert stderr is not None
        self._stdin, self.stdout, self.stderr = stdin, stdout, stderr
        # A persistent master of ssh may hold the far end for ever.
        os.set_blocking(stderr.fileno(), False)
        self._write(source)

    def receive(self) -> list[tuple[int, int, bytes]]:
        """Read what is there and return the frames; sets ``ended`` at the end of the stream."""
        data = os.read(self.stdout.fileno(), 1 << 18)
        if not data:
            self.ended = True
            return []
        self._inbox += data
        if not self.ready and not self._greeted():
            return []
        return agent.split_frames(self._inbox)

    def complain(self) -> bool:
        """Read what is there of the agent's standard error; False when nothing is."""
        try:
            data = os.read(self.stderr.fileno(), 1 << 16)
        except BlockingIOError:
            return False
        self.complaints.extend(line for line in data.decode("utf-8", "replace").splitlines() if line.strip())
        return bool(data)

    def signal(self, number: int) -> None:
        """Send a signal to every rank of this agent that still runs."""
        if self.ready:
            self._write(agent.frame(agent.SIGNAL, -1, number.to_bytes(4, "big")))

    def cut(self) -> None:
        """Close the agent's standard input: it kills its ranks and ends."""
        with contextlib.suppress(OSError):
            self._stdin.close()

    def close(self, timeout_s: float = 5.0) -> int:
        """End the agent, by force if need be; returns its exit status."""
        self.cut()
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        self.stdout.close()
        self.stderr.close()
        return status

    def _greeted(self) -> bool:
        begin = self._inbox.find(agent.MAGIC)
        if begin < 0:
            if len(self._inbox) > _NOISE_BYTES_MAX:
                raise ValueError(f"{self.host} prints too much before the agent starts")
            return False
        del self._inbox[: begin + len(agent.MAGIC)]
        self.ready = True
        # Not before: the interpreter at the other end reads ahead of its program.
        self._write(agent.frame(agent.JOB, -1, json.dumps(self._job).encode()))
        return True

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        with contextlib.suppress(OSError, ValueError):  # its end is seen on its output
            while view:
                view = view[os.write(self._stdin.fileno(), view) :]
