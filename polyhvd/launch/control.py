"""How a user on the launcher's host has a word with a running elastic job: a Unix socket without a file.

Lines of JSON: one goes there, and some come back until it is done. Only the same user and root are heard.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Control", "Request", "jobs", "request"]

_PREFIX = "polyhvd/job/"
_CREDENTIALS = struct.Struct("3i")
_LINE_BYTES_MAX = 1 << 16
_CLIENT_TIMEOUT_S = 10.0


class Request:
    """What somebody asks of the job: words, and a way to answer them."""

    def __init__(self, words: dict[str, Any], connection: socket.socket) -> None:
        self.words = words
        self._connection = connection

    def answer(self, **said: Any) -> None:
        """Say something; never waits, and does not mind if nobody is there any more."""
        with contextlib.suppress(OSError):
            self._connection.send(
                json.dumps(said).encode() + b"\n", socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
            )

    def close(self) -> None:
        """Say no more."""
        self._connection.close()


class Control:
    """Listens, on a thread of its own.

    Args:
        take: called on that thread with what somebody asks; it must not wait.
    """

    def __init__(self, take: Callable[[Request], None]) -> None:
        self._take = take
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{_PREFIX}{os.getpid()}")
        self._listener.listen(8)
        threading.Thread(target=self._run, name="polyhvd-control", daemon=True).start()

    def close(self) -> None:
        """Listen no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # which ends accept(), too
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with contextlib.suppress(OSError, ValueError):
                self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(data)[1] not in (os.geteuid(), 0):
            connection.close()
            return
        connection.settimeout(_CLIENT_TIMEOUT_S)
        line = b""
        while b"\n" not in line and len(line) < _LINE_BYTES_MAX:
            if not (part := connection.recv(4096)):
                break
            line += part
        words = json.loads(line)
        if isinstance(words, dict):
            self._take(Request(words, connection))


def jobs() -> list[int]:
    """Process ids of the launchers of elastic jobs on this host, other users' included."""
    names = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()]
    own = [name.removeprefix(f"@{_PREFIX}") for name in names if name.startswith(f"@{_PREFIX}")]
    return sorted({int(name) for name in own if name.isdigit()})


def request(job: int, words: dict[str, Any], heard: Callable[[dict[str, Any]], None]) -> None:
    """Ask something of the job with this launcher, and hear what it says until it says no more.

    Raises:
        OSError: there is no such job, it does not let this user in, or it has ended.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(f"\0{_PREFIX}{job}")
        count = 0
        with (
            contextlib.suppress(BrokenPipeError, ConnectionResetError),  # it has let go of us
            connection.makefile("rb") as lines,
        ):
            connection.sendall(json.dumps(words).encode() + b"\n")
            for line in lines:
                count += 1
                heard(json.loads(line))
        if count == 0:
            raise PermissionError(f"job {job} did not answer: it is another user's, or has just ended")
