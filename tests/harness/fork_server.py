"""A fork server: imports modules once, and runs each program in a fork of itself, seconds sooner.

``python fork_server.py DESCRIPTOR READY PARENT MODULE...`` serves ``forked.py`` at a listening socket for
as long as PARENT lives, and closes READY when it has imported the modules. It has one thread and has used
nothing of what it has imported, so a program begins as in an interpreter of its own, but for the imports.
What cannot be imported is the program's affair. If a module has started threads, programs are sent away,
to import for themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import io
import json
import os
import random
import selectors
import signal
import socket
import struct
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

__all__: list[str] = []

_LENGTH = struct.Struct("!I")  # of the request that follows
_STATUS = struct.Struct("!i")  # of the program that has ended; negative for a signal
_SENT_AWAY = 1 << 16  # no exit status
_DESCRIPTORS_MAX = 64
_HIGH = 512  # descriptors of the server, out of the way of those that programs are given
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.PyDLL(None)


@dataclass
class _Program:
    """What a child is to run, as ``forked.py`` asks for it."""

    argv: list[str]
    cwd: str
    environment: dict[str, str]
    numbers: list[int]  # of the descriptors, where they were sent from
    descriptors: list[int]

    @classmethod
    def receive(cls, connection: socket.socket) -> _Program:
        head, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, _DESCRIPTORS_MAX)
        (left,) = _LENGTH.unpack(head)
        data = bytearray()
        while left > 0:  # a signal may follow, which is for the program
            part = connection.recv(left)
            if not part:
                raise ConnectionError("half a request")
            data += part
            left -= len(part)
        return cls(**json.loads(data), descriptors=[_high(descriptor) for descriptor in descriptors])

    def close(self) -> None:
        """Close the descriptors, which a child has now, or nobody."""
        for descriptor in self.descriptors:
            os.close(descriptor)

    def take_over(self) -> None:
        """Make this process the one that was asked for."""
        os.setsid()
        for number, descriptor in zip(self.numbers, self.descriptors, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.chdir(self.cwd)
        os.environ.clear()
        os.environ.update(self.environment)
        sys.path[0] = ""
        paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        sys.path[1:1] = [path for path in paths if path not in sys.path]
        if not os.environ.get("PYTHONFAULTHANDLER"):
            faulthandler.disable()
        _open_streams()
        if os.environ.get("PYTHONUNBUFFERED"):
            for stream in (sys.stdout, sys.stderr):
                stream.reconfigure(write_through=True)  # type: ignore[union-attr]
        random.seed()
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()

    def run(self) -> None:
        """Run ``-c SOURCE`` or a script, as Python's command line would."""
        main = ModuleType("__main__")
        if self.argv[0] == "-c":
            source, name = self.argv[1], "<string>"
            sys.argv = ["-c", *self.argv[2:]]
        else:
            with open(self.argv[0], encoding="utf-8") as script:
                source, name = script.read(), self.argv[0]
            main.__file__ = name
            sys.path[0] = os.path.dirname(os.path.realpath(name))
            sys.argv = self.argv
        sys.modules["__main__"] = main
        exec(compile(source, name, "exec", dont_inherit=True), vars(main))


def _open_streams() -> None:
    """Open the program's output as an interpreter does: the server's streams are those of a file."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name)
        with contextlib.suppress(OSError):  # the program may have been given no output
            raw = open(number, "wb", closefd=False)  # noqa: SIM115
            is_lines = number == 2 or raw.isatty()
            new = io.TextIOWrapper(raw, old.encoding, old.errors, line_buffering=is_lines)
            setattr(sys, name, new)
            setattr(sys, f"__{name}__", new)


class _Server:
    """The children, and who waits for them."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.PollSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def serve(self) -> _Program:
        """Fork for whoever asks. Returns in children alone."""
        while True:
            for key, _ in self._selector.select()[:1]:  # one at a time, since it may end another
                if key.fileobj is self._listener:
                    program = self._accept()
                    if program is not None:
                        return program
                elif isinstance(key.fileobj, socket.socket):
                    self._hear(key.fileobj, key.data)
                else:
                    self._end(key.fileobj, *key.data)

    def _accept(self) -> _Program | None:
        connection = _out_of_the_way(self._listener.accept()[0])
        try:
            program = _Program.receive(connection)
        except (OSError, struct.error):
            connection.close()
            return None
        if len(os.listdir("/proc/self/task")) > 1:
            program.close()
            connection.send(_STATUS.pack(_SENT_AWAY))
            connection.close()
            return None
        pid = _fork()
        if pid == 0:
            for key in list(self._selector.get_map().values()):
                os.close(key.fd)
            connection.close()
            return program
        program.close()
        self._selector.register(connection, selectors.EVENT_READ, pid)
        self._selector.register(_high(os.pidfd_open(pid)), selectors.EVENT_READ, (pid, connection))
        return None

    def _hear(self, connection: socket.socket, pid: int) -> None:
        """Pass on a signal; who has gone takes the program and its children along."""
        try:
            data = connection.recv(1)
        except OSError:
            data = b""
        if data:
            os.kill(pid, data[0])
        else:
            self._selector.unregister(connection)
            for kill in (os.kill, os.killpg):  # a child that has just begun leads no group yet
                with contextlib.suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)

    def _end(self, descriptor: Any, pid: int, connection: socket.socket) -> None:
        _, status = os.waitpid(pid, 0)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        if connection in self._selector.get_map():
            self._selector.unregister(connection)
        with contextlib.suppress(OSError):
            connection.send(_STATUS.pack(os.waitstatus_to_exitcode(status)))
        connection.close()


def _fork() -> int:
    """Fork without the handlers of libraries, as they start what a program is to start itself."""
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = int(_LIBC._Fork())
    if pid != 0:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
        return pid
    ctypes.pythonapi.PyOS_AfterFork_Child()
    _live_with(os.getppid())
    return 0


def _live_with(parent: int) -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _high(descriptor: int) -> int:
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    os.close(descriptor)
    return moved


def _out_of_the_way(connection: socket.socket) -> socket.socket:
    return socket.socket(fileno=_high(connection.detach()))


def main() -> None:
    """Serve, and in a child run what was asked for."""
    descriptor, ready, parent, *modules = sys.argv[1:]
    _live_with(int(parent))
    listener = _out_of_the_way(socket.socket(fileno=int(descriptor)))
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    os.close(int(ready))
    gc.freeze()  # a collection in a child would copy all pages
    program = _Server(listener).serve()
    program.take_over()
    program.run()


if __name__ == "__main__":
    main()
