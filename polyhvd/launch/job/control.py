"""How commands on the launcher's host send requests to a running job: a Unix socket without a file.

The client sends one line of JSON, and the launcher answers with one or more. Each side checks the user id of
its peer (SO_PEERCRED): a launcher accepts requests of its own user and of root, and a client accepts answers
from launchers of its own user, or of any user if it is root. The name of the socket ends in random digits, so
that another user cannot bind it first.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from polyhvd.observe.terminal import printable
from polyhvd.rendezvous import network

__all__ = ["CommandRequests", "Control", "Request", "converse", "jobs", "limit_s", "request"]

#: Of elastic jobs, and of others.
_PREFIX, _FIXED_PREFIX = "polyhvd/job/", "polyhvd/fixed/"
_LINE_BYTES_MAX = 1 << 16
_CLIENT_TIMEOUT_S = 10.0
_LIMIT_S_MAX = 1e6  # as of settings
_BACKLOG = 128  # a launcher that is stopped accepts none
#: Errors of a system, or a process, that has no more descriptors or memory for now; and the pause after one.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_EXHAUSTED_S = 0.1
#: Raised when decoding invalid JSON.
_INVALID = (ValueError, RecursionError)


class Request:
    """A request to the job, with its content and the connection for replies."""

    def __init__(self, content: dict[str, Any], connection: socket.socket) -> None:
        self.content = content
        self._connection = connection

    def answer(self, **fields: Any) -> None:
        """Send a reply; never waits, and ignores a client that has gone."""
        with contextlib.suppress(OSError):
            self._connection.send(
                json.dumps(fields).encode() + b"\n", socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
            )

    def finish(self, answers: Sequence[dict[str, Any]]) -> None:
        """Send these answers and close, on a thread: they may be more than the socket takes at once."""
        thread = threading.Thread(target=self._send, args=(answers,), name="polyhvd-answer", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads
            self.close()

    def _send(self, answers: Sequence[dict[str, Any]]) -> None:
        with self._connection, contextlib.suppress(OSError):
            self._connection.settimeout(_CLIENT_TIMEOUT_S)
            self._connection.sendall(b"".join(json.dumps(each).encode() + b"\n" for each in answers))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class Control:
    """Listens, on a separate thread, with one more for each client: a silent one delays no other.

    Args:
        take: called on a client's thread with its request; it must not wait.
        elastic: whether the job is.

    Raises:
        OSError: the system has no such socket.
        RuntimeError: the system has no more threads.
    """

    def __init__(self, take: Callable[[Request], None], *, elastic: bool = True) -> None:
        self._take = take
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        prefix = _PREFIX if elastic else _FIXED_PREFIX
        try:
            self._listener.bind(f"\0{prefix}{os.getpid()}-{secrets.token_hex(8)}")
            self._listener.listen(_BACKLOG)
            threading.Thread(target=self._run, name="polyhvd-control", daemon=True).start()
        except BaseException:
            self._listener.close()
            raise

    def close(self) -> None:
        """Listen no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # which ends accept(), too
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    return
                time.sleep(_EXHAUSTED_S)
                continue
            thread = threading.Thread(
                target=self._handle, args=(connection,), name="polyhvd-client", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # the system has no more threads
                connection.close()

    def _handle(self, connection: socket.socket) -> None:
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
        content = json.loads(line)
        if not isinstance(content, dict):
            return False
        self._take(Request(content, connection))
        return True


class CommandRequests:
    """Keeps requests from commands until the job's loop takes them.

    Args:
        ring: called, on another thread, when there is one.
        elastic: whether the job is.
    """

    def __init__(self, ring: Callable[[], None], *, elastic: bool) -> None:
        self._ring = ring
        self._elastic = elastic
        self._requests: deque[Request] = deque()  # threads append, the loop takes; needs no lock
        self._control: Control | None = None

    def open(self) -> str:
        """Listen; returns why that is impossible; empty: it is not."""
        try:
            self._control = Control(self._add, elastic=self._elastic)
        except OSError as error:
            return error.strerror or str(error)
        except RuntimeError as error:
            return str(error)
        return ""

    def take(self, accepted: Callable[[dict[str, Any]], bool]) -> list[Request]:
        """Take the requests whose content is accepted; the others stay."""
        found = [self._requests.popleft() for _ in range(len(self._requests))]
        self._requests.extendleft(item for item in reversed(found) if not accepted(item.content))
        return [item for item in found if accepted(item.content)]

    def close(self) -> None:
        """Listen no more; requests that were not taken are not answered."""
        if self._control is not None:
            self._control.close()
        for request in self._requests:
            request.close()

    def _add(self, request: Request) -> None:
        self._requests.append(request)
        self._ring()


def jobs(*, fixed: bool = False) -> list[int]:
    """Process ids of the launchers of this user's elastic jobs on this host; for root, of all users'.

    Args:
        fixed: whether to include jobs that are not elastic.
    """
    return sorted(_places(fixed=fixed))


def converse(command: str, given: int | None, ask: Callable[[int], None], *, fixed: bool = False) -> int:
    """Run a command that sends a request to a job, and print an error as a line on standard error.

    Args:
        command: its name.
        given: process id of the job's launcher; None: the only one here.
        ask: called with the process id; raises OSError.
        fixed: whether the job may be one that is not elastic.

    Returns:
        The exit status.
    """
    job = given
    try:
        job = _chosen(given, jobs(fixed=fixed), "job" if fixed else "elastic job")
        ask(job)
        return 0
    except TimeoutError:
        print(f"{command}: no answer in time from job {job}; is its polyhvdrun stopped?", file=sys.stderr)
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"{command}: {printable(error.strerror or str(error))}", file=sys.stderr)
    return 1


def _chosen(given: int | None, found: Sequence[int], noun: str) -> int:
    listed = ", ".join(map(str, found)) or "none"
    if given is not None and given not in found:
        raise OSError(
            f"--job {given}: this user has no {noun} with this process id on this host; found: {listed}"
        )
    if not found:
        raise OSError(
            f"found no {noun} of this user whose polyhvdrun runs on this host; jobs started with --mpi or "
            "--jsrun are not listed"
        )
    if given is None and len(found) > 1:
        raise OSError(f"choose a job with --job PID; {noun}s whose polyhvdrun runs here: {listed}")
    return found[0] if given is None else given


def limit_s(text: str) -> float:
    """A limit in seconds, as an argument of a command; raises ArgumentTypeError."""
    with contextlib.suppress(ValueError):
        if (value := float(text)) > 0:
            return min(value, _LIMIT_S_MAX)
    raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, found {text!r}")


def request(
    job: int, content: dict[str, Any], on_reply: Callable[[dict[str, Any]], None], timeout_s: float = 600.0
) -> None:
    """Send a request to a launcher, and pass its answers on until it closes the connection.

    Args:
        job: process id of its launcher.
        content: the request.
        on_reply: called with each reply.
        timeout_s: limit for the whole call, in seconds; the first answer has to arrive within 10 s.

    Raises:
        TimeoutError: no answer in time.
        OSError: there is no such job, it is another user's, it has ended, or its answer is invalid.
    """
    place = _places(fixed=True).get(job)
    if place is None:
        raise ProcessLookupError(f"job {job} did not answer: it belongs to another user, or has just ended")
    deadline = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(min(timeout_s, _CLIENT_TIMEOUT_S))
        try:
            connection.connect(place)
        except BlockingIOError:  # earlier requests wait for a launcher that is stopped
            raise TimeoutError from None
        if not _is_trusted(job, *network.peer(connection)):
            raise PermissionError(f"job {job} did not answer: another user's process has its name")
        count, data = 0, b""
        with contextlib.suppress(
            BrokenPipeError, ConnectionResetError
        ):  # the launcher has closed the connection
            connection.sendall(json.dumps(content).encode() + b"\n")
            while part := connection.recv(4096):
                *lines, data = (data + part).split(b"\n")
                for line in lines:
                    count += 1
                    on_reply(_decoded(job, line))
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
        content = json.loads(line)
        if isinstance(content, dict):
            return content
    raise OSError(f"job {job} has sent an invalid answer")


def _places(*, fixed: bool = False) -> dict[int, str]:
    """The sockets of launchers whose answers this user may trust, by process id."""
    found = {}
    for prefix in (_FIXED_PREFIX, _PREFIX) if fixed else (_PREFIX,):
        for name, process, user in network.abstract_listeners(prefix):
            number, _, _ = name.removeprefix(f"\0{prefix}").partition("-")
            if number.isdecimal() and number.isascii() and _is_trusted(int(number), process, user):
                found[int(number)] = name
    return found


def _is_trusted(job: int, process: int, user: int) -> bool:
    """Return whether a listener is the launcher of a job, and of a user to be trusted."""
    # A process of another container that shares this network has the process id 0 here.
    return process in (job, 0) and (user == os.geteuid() or (os.geteuid() == 0 and process == job))
