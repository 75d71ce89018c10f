"""One rank of a pool: runs the functions that the pool sends it, one after the other.

Its arguments are FD PARENT STACKS FRAMEWORK: PARENT is the process that it ends with, or 0 if what started
it sees to that; a launcher that closes descriptors gives the name of an abstract socket in the place of FD.
Functions reach their pool through ``note``.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import signal
import socket
import sys
import traceback
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from typing import Any

__all__ = ["begin", "main", "note"]

_PR_SET_PDEATHSIG = 1
_pool: Connection | None = None


def note(value: Any) -> None:
    """Send the pool a value while the function still runs; see ``Pool.note``."""
    assert _pool is not None, "only a pool's rank can take notes"
    _pool.send(("note", value))


def begin(framework: str) -> int:
    """Make this process a rank; returns its id, which launchers and servers do not report."""
    importlib.import_module(f"polyhvd.{framework}").init()
    return os.getpid()


def main() -> None:
    """Serve the pool until it closes the connection."""
    global _pool
    descriptor, parent, stacks, framework = sys.argv[1:]
    if int(parent) > 0:
        _die_with(int(parent))
    # Opened now: a rank that is stuck may have no descriptor, memory or GIL left later.
    faulthandler.register(signal.SIGUSR1, file=Path(stacks).open("w"), all_threads=True)  # noqa: SIM115
    faulthandler.enable()
    _pool = Connection(int(descriptor) if descriptor.isdigit() else _dial(descriptor))
    if not _perform(_pool, "polyhvd.testing.worker", "begin", (framework,)):
        return
    while True:
        try:
            module, name, arguments = _pool.recv()
        except EOFError:
            if "polyhvd.testing.session" in sys.modules:  # fixtures that outlive tests are to be finished
                sys.modules["polyhvd.testing.session"].end()
            return
        _perform(_pool, module, name, arguments)


def _dial(name: str) -> int:
    """Connect to the pool, which has a socket for each rank."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{name}")
        return connection.detach()


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _perform(pool: Connection, module: str, name: str, arguments: tuple[Any, ...]) -> bool:
    """Run one function and send what it returned or raised."""
    try:
        function = attrgetter(name)(importlib.import_module(module))
        value = function(*arguments)
        pool.send(("value", value))
    except BaseException:
        pool.send(("error", traceback.format_exc()))
        return False
    return True
