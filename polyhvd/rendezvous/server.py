"""The launcher's key-value store, where the ranks of a job find each other.

Values are bytes under (scope, index), written once: the first writer wins. An *own* value lives as
long as the connection that wrote it, so nothing is left of ranks that have met, failed or died. A
*gather* waits for indices 0 .. count-1 of a scope and answers all its waiters at once. One thread
serves everything; peers are authenticated first, then speak in frames of a JSON header and a raw
body, both bounded.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from polyhvd.rendezvous import network
from polyhvd.rendezvous.auth import NO_RANK, AuthError, Greeting, prove
from polyhvd.rendezvous.handshakes import Handshakes
from polyhvd.rendezvous.store import GatherTimeoutError, StoreError
from polyhvd.rendezvous.store import Store as StoreInterface

__all__ = ["Client", "Server", "Store"]

_FRAME = struct.Struct("!II")
_HEADER_BYTES_MAX = 1 << 20
_BODY_BYTES_MAX = 1 << 28
_COUNT_MAX = 1 << 20
_READ_BYTES = 1 << 18
_PATIENCE_S = 10.0  # of one try to connect

Header = dict[str, Any]


def _frame(header: Header, body: bytes = b"") -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > _HEADER_BYTES_MAX or len(body) > _BODY_BYTES_MAX:
        raise ValueError(f"too large for the rendezvous: {len(text)} + {len(body)} bytes")
    return _FRAME.pack(len(text), len(body)) + text + body


class _Inbox:
    """Cuts a stream into frames; memory grows with what has arrived, not with what was announced."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        self._data += data

    def take(self) -> tuple[Header, bytes] | None:
        """The next complete frame; raises StoreError for one that cannot be right."""
        if len(self._data) < _FRAME.size:
            return None
        header_size, body_size = _FRAME.unpack_from(self._data)
        if header_size > _HEADER_BYTES_MAX or body_size > _BODY_BYTES_MAX:
            raise StoreError(f"a frame of {header_size} + {body_size} bytes is too long")
        begin = _FRAME.size + header_size
        if len(self._data) < begin + body_size:
            return None
        text = bytes(self._data[_FRAME.size : begin])
        body = bytes(self._data[begin : begin + body_size])
        del self._data[: begin + body_size]
        try:
            header = json.loads(text)
        except ValueError:
            raise StoreError("a frame is not JSON") from None
        if not isinstance(header, dict):
            raise StoreError("a frame is not a JSON object")
        return header, body


@dataclass(eq=False)
class _Waiter:
    peer: _Peer
    request: int
    deadline: float


@dataclass(eq=False)
class _Gather:
    missing: set[int]
    waiters: list[_Waiter] = field(default_factory=list)


class Store:
    """The values and who waits for them. Pure: no socket, thread or clock."""

    def __init__(self) -> None:
        self.scopes: dict[str, dict[int, bytes]] = {}
        self._writers: dict[tuple[str, int], int] = {}
        self._gathers: dict[str, dict[int, _Gather]] = {}  # scope -> count -> who waits

    def put(
        self, scope: str, index: int, value: bytes, rank: int
    ) -> list[tuple[list[_Waiter], bytes, Header]]:
        """Keep a value unless there is one; returns who is to be answered, and with what."""
        values = self.scopes.setdefault(scope, {})
        if index in values:
            return []
        values[index] = value
        self._writers[scope, index] = rank
        complete = []
        for count, gather in list(self._gathers.get(scope, {}).items()):
            gather.missing.discard(index)
            if not gather.missing:
                self._forget(scope, count)
                complete.append((gather.waiters, *self.collect(scope, count)))
        return complete

    def collect(self, scope: str, count: int) -> tuple[bytes, Header]:
        """The values 0 .. count-1, one after the other, and their sizes."""
        values = [self.scopes[scope][i] for i in range(count)]
        return b"".join(values), {"sizes": [len(value) for value in values]}

    def forget(self, scope: str, index: int, rank: int) -> None:
        """Remove a value if this rank wrote it."""
        if self._writers.get((scope, index)) == rank:
            self.remove(scope, index)

    def missing(self, scope: str, count: int) -> set[int]:
        """Indices below ``count`` that have no value yet."""
        return set(range(count)) - self.scopes.get(scope, {}).keys()

    def wait(self, scope: str, count: int, waiter: _Waiter) -> None:
        """Have the waiter answered by the :meth:`put` that completes the scope."""
        gathers = self._gathers.setdefault(scope, {})
        gathers.setdefault(count, _Gather(self.missing(scope, count))).waiters.append(waiter)

    def remove(self, scope: str, index: int) -> None:
        """Forget a value. Who waits for it, and for more, goes on waiting."""
        del self.scopes[scope][index], self._writers[scope, index]
        if not self.scopes[scope]:
            del self.scopes[scope]
        for count, gather in self._gathers.get(scope, {}).items():
            if index < count:
                gather.missing.add(index)

    def expired(self, now: float) -> list[tuple[_Waiter, list[int]]]:
        """Remove the waiters whose time is over, each with what it still misses."""
        late = []
        for scope, gathers in list(self._gathers.items()):
            for count, gather in list(gathers.items()):
                missing = sorted(gather.missing)
                late += [(waiter, missing) for waiter in gather.waiters if waiter.deadline <= now]
                self._keep(scope, count, [w for w in gather.waiters if w.deadline > now])
        return late

    def remove_peer(self, peer: _Peer) -> None:
        """Forget the waiters of a connection that is gone."""
        for scope, gathers in list(self._gathers.items()):
            for count, gather in list(gathers.items()):
                self._keep(scope, count, [w for w in gather.waiters if w.peer is not peer])

    def next_deadline(self) -> float | None:
        """When :meth:`expired` has something to do."""
        waiters = (w for g in self._gathers.values() for gather in g.values() for w in gather.waiters)
        return min((waiter.deadline for waiter in waiters), default=None)

    def _keep(self, scope: str, count: int, waiters: list[_Waiter]) -> None:
        self._gathers[scope][count].waiters = waiters
        if not waiters:
            self._forget(scope, count)

    def _forget(self, scope: str, count: int) -> None:
        del self._gathers[scope][count]
        if not self._gathers[scope]:
            del self._gathers[scope]


class _Peer:
    """An authenticated connection, on the server's side."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self.connection = connection
        self.rank = rank
        self.inbox = _Inbox()
        self.outbox = bytearray()
        self.own: set[tuple[str, int]] = set()


class Server:
    """Serves a :class:`Store` on one address, on a thread of its own, until ``close``.

    ``endpoint`` is what ranks need as POLYHVD_RENDEZVOUS. Usable as a context manager.
    """

    def __init__(self, secret: bytes, address: str = "127.0.0.1") -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=1024)
        self.endpoint = network.endpoint_text(address, listener.getsockname()[1])
        self._store = Store()
        self._handshakes = Handshakes(secret, self._admit)
        self._handshakes.listen(listener)
        self._wake_read, self._wake_write = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._handshakes, selectors.EVENT_READ, self._handshakes)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._peers: set[_Peer] = set()
        self._thread = threading.Thread(target=self._serve, name="polyhvd-rendezvous", daemon=True)
        self._thread.start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cut all connections and end the thread; clients that wait fail at once."""
        if self._wake_write < 0:
            return
        os.close(self._wake_write)
        self._wake_write = -1
        self._thread.join()

    @staticmethod
    def _admit(greeting: Greeting) -> bool:
        return greeting.purpose == "store" and greeting.target == NO_RANK

    def _serve(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            for peer in list(self._peers):
                self._drop(peer)
            self._handshakes.close()
            self._selector.close()
            os.close(self._wake_read)

    def _turn(self) -> bool:
        events = self._selector.select(self._timer_s())
        for passed in self._handshakes.poll(0):
            peer = _Peer(passed.connection, passed.greeting.source)
            self._peers.add(peer)
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        for key, mask in events:
            if key.data is None:
                return False
            if isinstance(key.data, _Peer) and key.data in self._peers:
                self._attend(key.data, mask)
        for waiter, missing in self._store.expired(time.monotonic()):
            self._answer(waiter, {"missing": missing})
        return True

    def _timer_s(self) -> float:
        deadline = self._store.next_deadline()
        wait_s = self._handshakes.timer_s()
        return wait_s if deadline is None else max(0.0, min(wait_s, deadline - time.monotonic()))

    def _attend(self, peer: _Peer, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                self._flush(peer)
            if mask & selectors.EVENT_READ:
                data = peer.connection.recv(_READ_BYTES)
                if not data:
                    raise StoreError("closed")
                peer.inbox.feed(data)
                while frame := peer.inbox.take():
                    self._perform(peer, *frame)
        except BlockingIOError:
            pass
        except (OSError, KeyError, TypeError, ValueError, ArithmeticError):
            self._drop(peer)  # gone, or it does not speak our language

    def _perform(self, peer: _Peer, header: Header, body: bytes) -> None:
        scope = str(header["scope"])
        if "forget" in header:
            self._store.forget(scope, int(header["forget"]), peer.rank)
        if "index" in header:
            self._put(peer, scope, int(header["index"]), body, own=bool(header["own"]))
        if "count" in header:
            self._gather(peer, header, scope)

    def _put(self, peer: _Peer, scope: str, index: int, value: bytes, *, own: bool) -> None:
        if own and index not in self._store.scopes.get(scope, {}):
            peer.own.add((scope, index))
        for waiters, values, sizes in self._store.put(scope, index, value, peer.rank):
            for waiter in waiters:
                self._answer(waiter, sizes, values)

    def _gather(self, peer: _Peer, header: Header, scope: str) -> None:
        count = int(header["count"])
        if not 0 < count <= _COUNT_MAX:
            raise ValueError("count")
        waiter = _Waiter(peer, int(header["id"]), time.monotonic() + float(header["wait_s"]))
        if self._store.missing(scope, count):
            self._store.wait(scope, count, waiter)
        else:
            values, sizes = self._store.collect(scope, count)
            self._answer(waiter, sizes, values)

    def _answer(self, waiter: _Waiter, header: Header, body: bytes = b"") -> None:
        peer = waiter.peer
        if peer not in self._peers:
            return
        peer.outbox += _frame({"id": waiter.request, **header}, body)
        try:
            self._flush(peer)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(peer)

    def _flush(self, peer: _Peer) -> None:
        try:
            while peer.outbox:
                del peer.outbox[: peer.connection.send(peer.outbox, socket.MSG_NOSIGNAL)]
        finally:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outbox else 0)
            self._selector.modify(peer.connection, events, peer)

    def _drop(self, peer: _Peer) -> None:
        if peer not in self._peers:
            return
        self._peers.discard(peer)
        self._selector.unregister(peer.connection)
        peer.connection.close()
        self._store.remove_peer(peer)
        for scope, index in peer.own:
            self._store.forget(scope, index, peer.rank)


class Client(StoreInterface):
    """A rank's connection to the store. Not thread-safe.

    ``post`` and ``take`` let an event loop wait for replies beside other things; the rest blocks.
    """

    def __init__(self, endpoint: str, secret: bytes, *, rank: int, generation: int, deadline: float) -> None:
        """Connect and authenticate until ``deadline`` (time.monotonic); raises StoreError."""
        greeting = Greeting("store", generation, rank, NO_RANK)
        self.secret = secret
        told = hashlib.sha256(f"{endpoint} {secret.hex()}".encode()).hexdigest()
        self.job = f"job-{told[:16]}"
        self._socket = _connect(endpoint, secret, greeting, deadline)
        self._inbox = _Inbox()
        self._replies: dict[int, tuple[Header, bytes]] = {}
        self._next = 0
        self._lost = ""  # why there will be no more replies
        self.address: str = self._socket.getsockname()[0]  # of this rank, as seen by the launcher

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._socket.close()

    def fileno(self) -> int:
        """Readable when :meth:`take` may have something."""
        return self._socket.fileno()

    def put(self, scope: str, index: int, value: bytes, *, own: bool = False) -> None:
        """Write a value, unless there is one already."""
        self._send({"scope": scope, "index": index, "own": own}, value)

    def forget(self, scope: str, index: int) -> None:
        """Remove a value that this rank wrote, perhaps as an earlier process."""
        self._send({"scope": scope, "forget": index})

    def post_gather(
        self, scope: str, count: int, wait_s: float, *, own: tuple[int, bytes] | None = None
    ) -> int:
        """Ask for values 0 .. count-1, after writing an own one; returns the request's number."""
        self._next += 1
        header: Header = {"scope": scope, "count": count, "wait_s": wait_s, "id": self._next}
        if own is not None:
            header.update(index=own[0], own=True)
        self._send(header, b"" if own is None else own[1])
        return self._next

    def take(self, request: int) -> list[bytes] | None:
        """The values of a request, or None while they are not there; never blocks.

        Raises GatherTimeoutError when the server gave up waiting for somebody.
        """
        self._receive()
        reply = self._replies.pop(request, None)
        if reply is None:
            if self._lost and not self._replies:  # what came before the end still counts
                raise StoreError(f"the launcher is gone: {self._lost}")
            return None
        header, body = reply
        if "missing" in header:
            raise GatherTimeoutError([int(i) for i in header["missing"]])
        values, begin = [], 0
        for size in header["sizes"]:
            values.append(body[begin : begin + size])
            begin += size
        return values

    def gather(
        self, scope: str, count: int, wait_s: float, *, own: tuple[int, bytes] | None = None
    ) -> list[bytes]:
        """Values 0 .. count-1 of a scope, waiting for them; raises GatherTimeoutError."""
        request = self.post_gather(scope, count, wait_s, own=own)
        while (values := self.take(request)) is None:
            select.select([self._socket], [], [])
        return values

    def _send(self, header: Header, body: bytes = b"") -> None:
        try:
            self._socket.setblocking(True)
            self._socket.sendall(_frame(header, body))
        except OSError as error:
            raise StoreError(f"the launcher is gone: {error}") from error

    def _receive(self) -> None:
        try:
            self._socket.setblocking(False)
            while data := self._socket.recv(_READ_BYTES):
                self._inbox.feed(data)
        except BlockingIOError:
            pass
        except OSError as error:
            self._lost = str(error)
        else:
            self._lost = "it closed the connection"
        while frame := self._inbox.take():
            self._replies[int(frame[0]["id"])] = frame


def _connect(endpoint: str, secret: bytes, greeting: Greeting, deadline: float) -> socket.socket:
    """Connect and prove the secret, trying again until the deadline; a wrong secret ends it at once."""
    try:
        address = network.parse_endpoint(endpoint)
    except ValueError as error:
        raise StoreError(f"POLYHVD_RENDEZVOUS: {error}") from None
    while True:
        connection = None
        try:
            patience = min(deadline, time.monotonic() + _PATIENCE_S)
            connection = socket.create_connection(address, timeout=max(0.01, patience - time.monotonic()))
            network.tune(connection)
            prove(connection, secret, greeting, patience)
            return connection
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, AuthError):
                raise StoreError(f"the rendezvous at {endpoint} refused this rank: {error}") from None
            if not isinstance(error, OSError):
                raise
            if time.monotonic() + 0.1 >= deadline:
                raise StoreError(f"cannot reach the rendezvous at {endpoint}: {error}") from None
        time.sleep(0.05)
