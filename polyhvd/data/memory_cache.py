"""A cache in the memory of one process of a host, which other processes of the same user reach by a socket.

The socket has a name in Linux's abstract namespace, so that nothing is left of the cache when its processes
end, however they do. If the process that has the cache ends, the next one that needs it begins an empty one.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from contextlib import suppress
from struct import Struct

__all__ = ["PAUSE_S", "MemoryStore", "Store"]

#: What is wanted, the key, the number of bytes that follow, and how many the cache may have.
_REQUEST = Struct("<1s64sQQ")
_LENGTH = Struct("<q")
_GET, _PUT, _MISSING = b"g", b"p", -1
_PEER = Struct("3i")  # process, user and group of the other end
_TIMEOUT_S = 5.0
#: How often, and after how long, a process asks again for one that begins to have the cache.
_TRIES, _RETRY_S = 20, 0.02
#: After a failure, files are read for so long without asking for the cache.
PAUSE_S = 30.0


class Store(ABC):
    """Bytes by keys of 64 hexadecimal digits."""

    @abstractmethod
    def get(self, key: str) -> memoryview | None:
        """The bytes of a key; None: they are not there.

        Raises:
            OSError: the store cannot be used.
        """

    @abstractmethod
    def put(self, key: str, data: memoryview) -> None:
        """Keep bytes, for which others may be dropped; raises OSError as :meth:`get` does."""


class MemoryStore(Store):
    """The host's cache in memory.

    Args:
        bytes_max: to which a write reduces the cache, by dropping what was not used for longest.
        name: of the socket.
    """

    def __init__(self, bytes_max: int, name: str | None = None) -> None:
        self._bytes_max = bytes_max
        self._name = "\0" + (name or f"polyhvd-data-cache-{os.geteuid()}")
        self._forget()
        _stores.add(self)
        weakref.finalize(self, _close, self._held)

    def _forget(self) -> None:
        """Be as new: a forked child has neither the server's threads nor a connection of its parent."""
        self._lock = threading.Lock()
        self._held: list[_Server | socket.socket] = getattr(self, "_held", [])
        for held in self._held:
            if isinstance(held, _Server):
                held.forget()
            else:
                held.close()
        self._held.clear()
        self._paused_until = 0.0

    def get(self, key: str) -> memoryview | None:
        """The bytes of a key; None: they are not there.

        Raises:
            OSError: the process that has the cache does not answer.
        """
        return self._asked(_GET, key, memoryview(b""))

    def put(self, key: str, data: memoryview) -> None:
        """Keep bytes, for which others may be dropped; raises OSError as :meth:`get` does."""
        if len(data) <= self._bytes_max:
            self._asked(_PUT, key, data)

    def _asked(self, what: bytes, key: str, data: memoryview) -> memoryview | None:
        with self._lock:
            if time.monotonic() < self._paused_until:
                return None
            for is_last in (False, True):
                held = self._holder()
                try:
                    if isinstance(held, _Server):
                        return held.answer(what, key, data, self._bytes_max)
                    held.sendall(_REQUEST.pack(what, key.encode(), len(data), self._bytes_max))
                    held.sendall(data)
                    (length,) = _LENGTH.unpack(_received(held, _LENGTH.size))
                    return None if length == _MISSING else _received(held, length)
                except OSError as error:
                    held.close()
                    self._held.clear()
                    if is_last or isinstance(error, TimeoutError):
                        self._paused_until = time.monotonic() + PAUSE_S
                        raise
        raise AssertionError  # the loop returns or raises

    def _holder(self) -> _Server | socket.socket:
        """The server, if this process has it, or else a connection to it."""
        if self._held:
            return self._held[0]
        for _ in range(_TRIES):
            held: _Server | socket.socket
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.settimeout(_TIMEOUT_S)
                connection.connect(self._name)
                _require_same_user(connection)
                held = connection
            except ConnectionRefusedError:  # there is none
                connection.close()
                try:
                    held = _Server(self._name)
                except OSError:  # another process was faster, and may not listen yet
                    time.sleep(_RETRY_S)
                    continue
            except BaseException:
                connection.close()
                self._paused_until = time.monotonic() + PAUSE_S
                raise
            self._held.append(held)
            return held
        raise OSError("no process of this host answers for the cache")


class _Server:
    """Has the entries, and a thread for each process that uses them."""

    def __init__(self, name: str) -> None:
        self._entries: OrderedDict[str, memoryview] = OrderedDict()
        self._bytes = 0
        self._lock = threading.RLock()  # the garbage collector may close it in any thread
        self._closed = False
        self._connections: set[socket.socket] = set()
        self.listener = socket.socket(socket.AF_UNIX)
        try:
            self.listener.bind(name)
            self.listener.listen(128)
        except BaseException:
            self.listener.close()
            raise
        self._thread = threading.Thread(target=self._accept, name="polyhvd-data-cache", daemon=True)
        atexit.register(self.close)
        self._thread.start()

    def answer(self, what: bytes, key: str, data: memoryview, bytes_max: int) -> memoryview | None:
        """The bytes of a key, or None; or keep them."""
        with self._lock:
            found = self._entries.get(key)
            if what == _GET:
                if found is not None:
                    self._entries.move_to_end(key)
                return found
            if found is None:
                self._entries[key] = data
                self._bytes += len(data)
            while self._bytes > bytes_max:
                self._bytes -= len(self._entries.popitem(last=False)[1])
        return None

    def close(self) -> None:
        """End all connections, and drop the entries."""
        atexit.unregister(self.close)
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._closed = True
            self._entries.clear()
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        if self._thread is not threading.current_thread():
            self._thread.join(_TIMEOUT_S)
        self.listener.close()

    def forget(self) -> None:
        """Leave the connections to the parent, in a forked child. Takes no lock: its threads are gone."""
        atexit.unregister(self.close)
        self.listener.close()
        for connection in list(self._connections):
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._connections.add(connection)
            threading.Thread(
                target=self._serve, args=(connection,), name="polyhvd-data-cache", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, suppress(OSError):
                _require_same_user(connection)
                while True:
                    connection.settimeout(None)  # a process may train for long between two requests
                    head = _received(connection, _REQUEST.size)
                    connection.settimeout(_TIMEOUT_S)
                    what, key, length, bytes_max = _REQUEST.unpack(head)
                    found = self.answer(what, key.decode(), _received(connection, length), bytes_max)
                    connection.sendall(_LENGTH.pack(_MISSING if found is None else len(found)))
                    if found is not None:
                        connection.sendall(found)
        finally:
            with self._lock:
                self._connections.discard(connection)


def _received(connection: socket.socket, length: int) -> memoryview:
    data = memoryview(bytearray(length))
    done = 0
    while done < length:
        count = connection.recv_into(data[done:])
        if count == 0:
            raise ConnectionResetError("the process that has the cache in memory has ended")
        done += count
    return data


def _require_same_user(connection: socket.socket) -> None:
    """Raise PermissionError if the other end is a process of another user."""
    _, user, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if user != os.geteuid():
        raise PermissionError(f"the memory cache of this host belongs to the user {user}, not to this one")


def _close(held: list[_Server | socket.socket]) -> None:
    while held:
        held.pop().close()


_stores: weakref.WeakSet[MemoryStore] = weakref.WeakSet()


def _forget_all() -> None:
    for store in list(_stores):
        store._forget()


os.register_at_fork(after_in_child=_forget_all)
