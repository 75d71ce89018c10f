"""The launcher's end of an agent: frames in, frames out, and what carries them.

The job, with the secret in it, goes to the agent's standard input and never on a command line.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO, Any

from polyhvd.launch.job import agent
from polyhvd.launch.job.processes import await_killed

__all__ = ["AgentProcess", "AgentStreams"]

_ENDS = (agent.EXITED, agent.FAILED)
_NOISE_BYTES_MAX = 1 << 16  # printed by a login shell before the agent speaks


class AgentStreams:
    """See :class:`polyhvd.launch.providers.starting.HostAgent`: what all agents have in common."""

    #: What a message says has ended, when the agent has.
    program = "the agent"

    def __init__(self, host: str, stdin: IO[bytes], stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.host = host
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        self.ranks: list[int] = []
        self.environment: dict[str, str] = {}
        self.ready = False
        self.ended = False
        #: The last lines of the agent's own standard error, and those of what has started it.
        self.complaints: deque[str] = deque(maxlen=20)
        self.fault = ""
        self._inbox = bytearray()
        self._outbox = bytearray()
        self._at_end = False  # nothing more will be read
        # A persistent master of ssh may hold the far end for ever; and one that is stopped takes nothing.
        for stream in (stdin, stdout, stderr):
            os.set_blocking(stream.fileno(), False)

    @property
    def unread_bytes(self) -> int:
        """How much was put aside, and waits for :meth:`receive`."""
        return len(self._inbox)

    @property
    def unsent_bytes(self) -> int:
        """How much waits for :meth:`flush`."""
        return len(self._outbox)

    def put_aside(self) -> bool:
        """Read what is there, for :meth:`receive` to look at later; False when nothing is."""
        try:
            data = os.read(self.stdout.fileno(), 1 << 18)
        except BlockingIOError:
            return False
        except OSError as error:  # of a connection
            self.complaints.append(error.strerror or str(error))
            data = b""
        self._at_end = not data
        self._inbox += self._unpacked(data)
        return not self._at_end

    def receive(self) -> list[tuple[int, int, bytes]]:
        """Read what is there and return the frames; sets ``ended`` at the end of the stream."""
        self.put_aside()
        self.ended = self.ended or self._at_end
        if not self.ready and not self._greeted():
            return []
        frames = agent.split_frames(self._inbox)
        ended = {rank for kind, rank, _ in frames if kind in _ENDS}
        if ended:
            self.ranks = [rank for rank in self.ranks if rank not in ended]
        return frames

    def is_done(self) -> bool:
        """Return whether nothing more will come, and the end of every rank is in what has come."""
        if not self._at_end:
            return False
        unread = agent.split_frames(bytearray(self._inbox))
        return {rank for kind, rank, _ in unread if kind in _ENDS} >= set(self.ranks)

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
        self.send(agent.SIGNAL, number.to_bytes(4, "big"))

    def send(self, kind: int, payload: bytes = b"", number: int = -1) -> None:
        """Send a frame, once it has answered; never waits."""
        if self.ready:
            self._write(agent.frame(kind, number, payload))

    def flush(self) -> bool:
        """Send what could not be sent at once; False when some of it is left."""
        try:
            while self._outbox:
                del self._outbox[: os.write(self.stdin.fileno(), self._outbox)]
        except BlockingIOError:
            return False
        except (OSError, ValueError):  # its end is seen on its output
            self._outbox.clear()
        return True

    def end_strays(self) -> None:
        """Kill what has outlived the agent where this process can; elsewhere its guard has to do."""

    def _greeted(self) -> bool:
        """Return whether it has sent the magic number of an agent."""
        return True

    def _unpacked(self, data: bytes) -> bytes:
        """Messages that the agent has sent, decoded from received bytes."""
        return data

    def _write(self, data: bytes) -> None:
        self._outbox += data
        self.flush()


class AgentProcess(AgentStreams):
    """An agent as a process of this host, its own or ssh's, and its three pipes."""

    def __init__(
        self, host: str, command: Sequence[str], source: bytes = b"", env: Mapping[str, str] | None = None
    ) -> None:
        """Start it.

        Args:
            host: as users name it.
            command: runs the agent on that host, its standard streams being this process's pipes.
            source: the agent's program, where the command reads it from standard input.
            env: of the command; None: this process's.
        """
        self._process = subprocess.Popen(
            list(command),
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # only the launcher handles Ctrl-C
            bufsize=0,
        )
        stdin, stdout, stderr = self._process.stdin, self._process.stdout, self._process.stderr
        assert stdin is not None
        assert stdout is not None
        assert stderr is not None
        super().__init__(host, stdin, stdout, stderr)
        self._jobs: list[dict[str, Any]] = []  # not sent yet
        self._status: int | None = None  # after close()
        self._write(source)

    def start(self, job: dict[str, Any]) -> None:
        """Have it start the ranks of ``job``, once it answers."""
        self.ranks += [rank for rank, _ in job["ranks"]]
        self._jobs.append(job)
        if self.ready:
            self._send_jobs()

    def cut(self) -> None:
        """Close the agent's standard input: it kills its ranks and ends."""
        self._outbox.clear()
        with contextlib.suppress(OSError):
            self.stdin.close()

    def kill(self) -> None:
        """End the agent at once; its guard, or its host, ends the ranks."""
        self._process.kill()

    def has_exited(self) -> bool:
        """Return whether the process has ended."""
        return self._process.poll() is not None

    def close(self, timeout_s: float = 5.0) -> int:
        """End the agent, by force if need be; returns its exit status."""
        if self._status is None:
            self.cut()
            try:
                self._status = self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._status = await_killed(self._process, f"{self.program} for {self.host}")
            self.stdout.close()
            self.stderr.close()
        return self._status

    def _greeted(self) -> bool:
        begin = self._inbox.find(agent.MAGIC)
        if begin < 0:
            if len(self._inbox) > _NOISE_BYTES_MAX:
                raise ValueError(f"{self.host} prints too much before the agent starts")
            return False
        del self._inbox[: begin + len(agent.MAGIC)]
        self.ready = True
        # Not before: the interpreter at the other end reads ahead of its program.
        self._send_jobs()
        return True

    def _send_jobs(self) -> None:
        for job in self._jobs:
            self._write(agent.frame(agent.JOB, -1, json.dumps(job).encode()))
        self._jobs.clear()
