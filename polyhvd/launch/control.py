"""How a user on the launcher's host has a word with a running elastic job: a Unix socket without a file.

The client sends one line of JSON, and the launcher answers with one or more. Each side checks the user id of
its peer (SO_PEERCRED): a launcher accepts requests of its own user and of root, and a client accepts answers
from launchers of its own user, or of any user if it is root. The name of the socket ends in random digits, so
that another user cannot bind it first.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from polyhvd.rendezvous import network

__all__ = ["Control", "Request", "jobs", "request"]

_PREFIX = "polyhvd/job/"
_LINE_BYTES_MAX = 1 << 16
_CLIENT_TIMEOUT_S = 10.0
#: Raised when decoding invalid JSON.
_INVALID = (ValueError, RecursionError)


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
        self._listener.bind(f"\0{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}")
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
            accepted = False
            with contextlib.suppress(OSError, *_INVALID):
                accepted = self._serve(connection)
            if not accepted:
                connection.close()

    def _serve(self, connection: socket.socket) -> bool:
        """Read a request and pass it on; return whether the request now owns the connection."""
        if network.peer(connection)[1] not in (os.geteuid(), 0):
            return False
        connection.settimeout(_CLIENT_TIMEOUT_S)
        line = b""
        while b"\n" not in line and len(line) < _LINE_BYTES_MAX:
            if not (part := connection.recv(4096)):
                break
            line += part
        words = json.loads(line)
        if not isinstance(words, dict):
            return False
        self._take(Request(words, connection))
        return True


def jobs() -> list[int]:
    """Process ids of the launchers of this user's elastic jobs on this host; for root, of all users'."""
    return sorted(_places())


def request(
    job: int, words: dict[str, Any], heard: Callable[[dict[str, Any]], None], timeout_s: float = 600.0
) -> None:
    """Send a request to a launcher, and pass its answers on until it closes the connection.

    Args:
        job: process id of its launcher.
        words: the request.
        heard: called with each answer.
        timeout_s: limit for the whole call, in seconds; the first answer has to arrive within 10 s.

    Raises:
        TimeoutError: no answer in time.
        OSError: there is no such job, it is another user's, it has ended, or its answer is invalid.
    """
    place = _places().get(job)
    if place is None:
        raise ProcessLookupError(f"job {job} did not answer: it is another user's, or has just ended")
    deadline = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(min(timeout_s, _CLIENT_TIMEOUT_S))
        connection.connect(place)
        if not _may_answer(job, *network.peer(connection)):
            raise PermissionError(f"job {job} did not answer: another user's process has its name")
        count, data = 0, b""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has let go of us
            connection.sendall(json.dumps(words).encode() + b"\n")
            while part := connection.recv(4096):
                *lines, data = (data + part).split(b"\n")
                for line in lines:
                    count += 1
                    heard(_decoded(job, line))
                if len(data) > _LINE_BYTES_MAX:
                    raise OSError(f"job {job} has sent an invalid answer")
                if (left_s := deadline - time.monotonic()) <= 0:
                    raise TimeoutError
                if count:
                    connection.settimeout(left_s)
        if count == 0:
            raise PermissionError(f"job {job} did not answer: it has just ended")


def _decoded(job: int, line: bytes) -> dict[str, Any]:
    with contextlib.suppress(*_INVALID):
        words = json.loads(line)
        if isinstance(words, dict):
            return words
    raise OSError(f"job {job} has sent an invalid answer")


def _places() -> dict[int, str]:
    """The sockets of launchers whose answers this user may trust, by process id."""
    found = {}
    for name, process, user in network.abstract_listeners(_PREFIX):
        number, _, _ = name.removeprefix(f"\0{_PREFIX}").partition("-")
        if number.isdecimal() and number.isascii() and _may_answer(int(number), process, user):
            found[int(number)] = name
    return found


def _may_answer(job: int, process: int, user: int) -> bool:
    """Whether a listener is the launcher of a job, and of a user to be trusted."""
    # A process of another container that shares this network has the process id 0 here.
    return process in (job, 0) and (user == os.geteuid() or (os.geteuid() == 0 and process == job))
