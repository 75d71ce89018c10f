"""Processes that make batches for this rank, each of them one batch after the other."""

from __future__ import annotations

import io
import json
import logging
import multiprocessing.spawn
import os
import select
import socket
import subprocess
import sys
import threading
import weakref
from collections import ChainMap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any, ClassVar

import cloudpickle

from polyhvd.data.handover import UnreadableError, receive, send
from polyhvd.data.patience import look, warn_s
from polyhvd.data.remote_errors import RemoteError, pack
from polyhvd.data.waiting import LOOK_S
from polyhvd.errors import DataError
from polyhvd.runtime import current

__all__ = ["Task", "Workers"]

#: ``sys.path`` is the rank's before anything is imported.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); from polyhvd.data.worker import main; "
    "main(int(sys.argv[1]), int(sys.argv[2]))"
)
_END_S = 1.0  # how long workers that end may take
_LOG = logging.getLogger("polyhvd")


class Workers:
    """Starts processes, and distributes tasks to them. They end with this process, however it ends.

    Processes are started as new programs, not forked: a fork would copy the locks of threads that the rank
    has, such as those of frameworks and of this library, in whatever state they are. They import nothing of
    the rank's program either, which needs no ``if __name__ == "__main__"``: functions of the program are
    sent by cloudpickle.

    Args:
        count: of processes.
        work: makes the result of a task of its arguments. Each process has a copy.
        stopped_s: how long a process may be stopped by a signal while its result is wanted.

    Raises:
        ValueError: ``work`` cannot be pickled.

    Example::

        workers = Workers(2, work)
        tasks = [workers.submit((number,)) for number in range(10)]
        results = [task.result() for task in tasks]
        workers.close()
    """

    def __init__(self, count: int, work: Callable[..., Any], stopped_s: float = 120.0) -> None:
        try:
            pickled = _pickled(work)
        except Exception as error:
            raise ValueError(
                f"workers={count}: transform or a function of decode= cannot be sent to another process: "
                f"{error!r}; it must not refer to locks, open files, sockets or generators, also not by "
                "global names; create these within the function"
            ) from error
        self.count = count
        #: Bytes of the largest result so far.
        self.largest_bytes = 0
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        self._end = weakref.finalize(self, _end, self._workers, self._process)
        for number in range(count):
            self._workers.append(_Worker(number, count, stopped_s))
            self._workers[-1].send(0, (pickled, sys.argv, warn_s()))
        self._submitted = 0

    @property
    def is_usable(self) -> bool:
        """Whether the processes run, and belong to this process and not to one that it is a fork of."""
        return self._end.alive and self._process == os.getpid()

    def submit(self, arguments: tuple[Any, ...]) -> Task:
        """Send a task to the process that has the fewest. Only one thread may call it.

        It waits while that process has as many tasks as its connection takes.

        Raises:
            DataError: this process has too many open files or no memory.
        """
        world = current.find()
        with self._lock:
            worker = min(self._workers, key=lambda worker: worker.pending)
            worker.pending += 1
        self._submitted += 1
        try:
            worker.send(self._submitted, (None if world is None else world.placement, arguments))
        except BaseException:
            self._count_result(worker, 0)
            raise
        return Task(self, worker, self._submitted)

    def close(self) -> None:
        """End the processes, also those that work on a task."""
        if self._process == os.getpid():
            self._end()

    def _count_result(self, worker: _Worker, size: int) -> None:
        with self._lock:
            worker.pending -= 1
            self.largest_bytes = max(self.largest_bytes, size)


class Task:
    """A batch that a process makes. Ask for the results of a process in the order of its tasks."""

    def __init__(self, workers: Workers, worker: _Worker, number: int) -> None:
        self._workers = workers
        self._worker = worker
        self._number = number
        self._value: Any = None
        self._is_done = False
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Wait until the process has made the result.

        Raises:
            DataError: the process has ended, is stopped, or takes as long as a stall that ends the job.
        """
        with self._lock:
            while not self._is_done:
                try:
                    number, value, size = self._worker.receive()
                except DataError:
                    self._workers.close()
                    raise
                self._workers._count_result(self._worker, size)
                if number == self._number:  # and not that of a task that nothing waits for any more
                    self._value, self._is_done = value, True

    def result(self) -> Any:
        """The result, once.

        Raises:
            DataError: the process has ended, or is stopped.
            BaseException: what the function raised in the process.
        """
        self.wait()
        value, self._value = self._value, None
        if isinstance(value, RemoteError):
            raise value.restore()
        return value


class _Worker:
    """A process, and the connection to it."""

    def __init__(self, number: int, count: int, stopped_s: float) -> None:
        self._stopped_s = stopped_s
        self._name = f"worker {number + 1} of {count} of the data loader"
        self.pending = 0
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self.connection, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            arguments = (str(other.fileno()), str(os.getpid()), json.dumps(sys.path))
            program = os.fsdecode(multiprocessing.spawn.get_executable() or sys.executable)
            self.process = subprocess.Popen(
                [program, "-c", _PROGRAM, *arguments], stdin=subprocess.DEVNULL, pass_fds=[other.fileno()]
            )

    def send(self, number: int, value: Any) -> None:
        with self._sending, suppress(ConnectionError):  # it has ended, which the next receive() reports
            if self.connection.fileno() < 0:  # closed; the same
                return
            try:
                send(self.connection, number, value)
            except ConnectionError:
                raise
            except OSError as error:
                raise DataError(
                    f"{self._name} (process {self.process.pid}) cannot get the rows of a batch: {error}; "
                    "raise the limit of open files (ulimit -n) or of memory of this process"
                ) from error

    def receive(self) -> tuple[int, Any, int]:
        poll, waited_s, stopped_s = select.poll(), 0.0, 0.0
        with self._receiving, suppress(EOFError, ConnectionError, ValueError):  # the last if it is closed
            poll.register(self.connection, select.POLLIN)
            # A forked child of this process may keep the other end open after the worker has ended.
            while not poll.poll(1e3 * LOOK_S):
                if self.process.poll() is not None:
                    break
                # By looks, not by the clock: a whole job that was stopped is continued.
                stopped_s = stopped_s + LOOK_S if _is_stopped(self.process.pid) else 0.0
                if stopped_s >= self._stopped_s:
                    raise DataError(
                        f"{self._name} (process {self.process.pid}) was stopped by a signal, and nothing has "
                        f"continued it (kill -CONT {self.process.pid}) within {self._stopped_s:g} s; raise "
                        "read_timeout_s= to wait longer"
                    )
                waited_s += LOOK_S
                look(waited_s, self._is_slow)
            else:
                try:
                    return self._received()
                except ConnectionError:  # it has ended, with tasks; results from before can still be read
                    return self._received()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        raise DataError(f"{self._name} (process {self.process.pid}) {self._how_ended()}")

    def _is_slow(self) -> str:
        return (
            f"{self._name} (process {self.process.pid}) has not returned its batch; its standard error has "
            "the lines of decode= or transform= that it is at"
        )

    def _received(self) -> tuple[int, Any, int]:
        try:
            return receive(self.connection)
        except UnreadableError as error:
            return error.number, pack(error.reason), 0

    def close(self) -> None:
        """Wait until the process has ended, which it does soon, or end it.

        One that the kernel does not end, such as one that waits for a file system, is left.
        """
        if self.pending:  # a batch that nothing waits for
            self.process.kill()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            try:
                self.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                _LOG.warning(
                    "%s (process %d) was killed and has not ended within %g s; it is left",
                    self._name,
                    self.process.pid,
                    _END_S,
                )
        with self._sending, self._receiving:
            self.connection.close()

    def _how_ended(self) -> str:
        status = self.process.returncode
        if status is None:
            return "has closed its connection"
        if status < 0:
            cause = "; if the system lacked memory, use fewer workers= or smaller batches" * (status == -9)
            return f"was killed by signal {-status}{cause}"
        return f"ended with status {status}; its standard error may have the cause"


def _is_stopped(process: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text("latin-1").rpartition(")")[2].split()[0] == "T"
    return False


def _pickled(work: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(work)
    return file.getvalue()


def _code(code: CodeType) -> tuple[Any, ...]:
    """How code is pickled, with the name of its file, which cloudpickle drops and tracebacks need."""
    make, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if value == "<dynamic-code>" else value for value in arguments)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table: ClassVar[Any] = ChainMap({CodeType: _code}, cloudpickle.Pickler.dispatch_table)


def _end(workers: list[_Worker], owner: int) -> None:
    if owner != os.getpid():
        return
    for worker in workers:
        with suppress(OSError):
            worker.connection.shutdown(socket.SHUT_RDWR)  # ends the worker, and wakes threads that use it
    for worker in workers:
        worker.close()
