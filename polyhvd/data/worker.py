"""A process that makes batches for a loader's rank.

It is started by :mod:`polyhvd.data.workers`, and ends with the rank, or when the rank closes its connection.
It has what the rank sends, and nothing of the rank's memory: no framework, thread, lock or GPU.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from polyhvd.data.handover import receive, send
from polyhvd.data.remote_errors import RemoteError, pack
from polyhvd.runtime import current

__all__ = ["main"]

_WATCH_S = 0.5


def main(descriptor: int, parent: int) -> None:
    """Make batches until the rank closes the connection.

    Args:
        descriptor: of the connection to the rank.
        parent: the rank's process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the rank gets it too, and decides
    threading.Thread(target=_watch, args=(parent,), name="polyhvd-data-watch", daemon=True).start()
    connection = socket.socket(fileno=descriptor)
    work: Any = None
    failed: RemoteError | None = None
    warn_s = 0.0
    try:
        while True:
            number, message, _ = receive(connection)
            if number == 0:
                *message, warn_s = message
                work, failed = _unpacked(message)
                continue
            place, arguments = message
            current.inherit(place)
            with _traced(warn_s):
                made = failed or _made(work, arguments)
            _answer(connection, number, made)
            del message, arguments, made  # their memory
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _watch(parent: int) -> None:
    """End with the rank, also within a batch."""
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os._exit(1)


@contextmanager
def _traced(warn_s: float) -> Iterator[None]:
    """Within, the lines that this process is at are printed if it takes this many seconds; 0: never."""
    if not warn_s or sys.stderr is None:
        yield
        return
    faulthandler.dump_traceback_later(warn_s)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _unpacked(message: Any) -> tuple[Any, RemoteError | None]:
    import pickle

    pickled, sys.argv = message
    try:
        return pickle.loads(pickled), None
    except BaseException as error:
        return None, pack(error, __file__)


def _made(work: Any, arguments: Any) -> Any:
    try:
        return work(*arguments)
    except BaseException as error:
        return pack(error, __file__)


def _answer(connection: socket.socket, number: int, value: Any) -> None:
    import cloudpickle

    try:
        send(connection, number, value, cloudpickle.dumps)
    except OSError:
        raise
    except Exception as error:
        unsuitable = TypeError(f"what transform returned cannot be pickled, which workers= needs: {error!r}")
        send(connection, number, pack(unsuitable))
