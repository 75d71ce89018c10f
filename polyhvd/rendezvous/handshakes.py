"""Drives many handshakes at once, incoming and outgoing, on the caller's thread.

Unauthenticated peers are dropped after a time limit; however many there are, ranks can still connect.
Nothing beyond the handshake is read, so sockets can be handed on as they are.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyhvd.rendezvous import network
from polyhvd.rendezvous.auth import (
    OTHER_SECRET,
    REFUSAL,
    Answerer,
    AuthError,
    Caller,
    Greeting,
    SessionKeys,
)

__all__ = ["Authenticated", "Handshakes", "OnOtherSecret", "Outgoing"]

_ACCEPTS_PER_TURN = 64
_EVICTABLE_AFTER_S = 0.5
_RETRY_FIRST_S = 0.02
_RETRY_LAST_S = 1.0

Admit = Callable[[Greeting], bool]
OnOtherSecret = Callable[[Greeting, str], None]


@dataclass
class Authenticated:
    """A connection whose two sides have proved the secret. The receiver owns the socket."""

    greeting: Greeting
    connection: socket.socket
    incoming: bool
    keys: SessionKeys


@dataclass
class Outgoing:
    """A connection that this side makes, over as many tries as it takes."""

    family: int
    address: Any
    greeting: Greeting
    persistent: bool
    done: bool = False
    failed: bool = False  # for good
    error: str = "no answer yet"
    others: list[tuple[int, Any]] = field(default_factory=list)  # families and addresses, to try in turn
    retry_at: float = 0.0
    retry_s: float = _RETRY_FIRST_S


@dataclass(eq=False)
class _Pending:
    connection: socket.socket
    machine: Caller | Answerer
    since: float
    outgoing: Outgoing | None = None
    connected: bool = True
    inbox: bytearray = field(default_factory=bytearray)


class Handshakes:
    """The listeners of one process, and the connections that it makes. Not thread-safe.

    ``poll`` never blocks beyond its timeout.
    ``admit`` decides on an incoming greeting, before it is proved, whether to go on with it.
    ``on_other_secret`` is called with the greeting and address of a peer that does not know the secret, which
    may be any process.
    """

    def __init__(
        self,
        secret: bytes,
        admit: Admit,
        *,
        patience_s: float = 5.0,
        pending_max: int = 256,
        on_other_secret: OnOtherSecret | None = None,
    ) -> None:
        self._secret = secret
        self._admit = admit
        self._on_other_secret = on_other_secret
        self._patience_s = patience_s
        self._pending_max = pending_max
        self._selector = selectors.DefaultSelector()
        self._listeners: list[socket.socket] = []
        self._paused_until = 0.0  # 0: listening
        self._pending: dict[_Pending, None] = {}  # in order of age
        self._strangers = 0  # how many of them are incoming
        self._outgoing: list[Outgoing] = []
        self._passed: list[Authenticated] = []

    def fileno(self) -> int:
        """Readable when ``poll`` has something to do, timers apart."""
        return self._selector.fileno()

    def listen(self, listener: socket.socket) -> None:
        """Take over a listening socket."""
        listener.setblocking(False)
        self._listeners.append(listener)
        if not self._paused_until:
            self._selector.register(listener, selectors.EVENT_READ)

    def connect(
        self,
        family: int,
        address: Any,
        greeting: Greeting,
        *,
        persistent: bool = True,
        others: Sequence[tuple[int, Any]] = (),
    ) -> Outgoing:
        """Start to connect. A persistent attempt is repeated until ``close``, with ``others`` in turn."""
        outgoing = Outgoing(family, address, greeting, persistent, others=list(others))
        self._outgoing.append(outgoing)
        self._try(outgoing)
        return outgoing

    def poll(self, timeout_s: float) -> list[Authenticated]:
        """Wait for something to happen, and return the connections that have come through."""
        if not self._passed:
            self._turn(max(0.0, min(timeout_s, self.timer_s())))
        passed, self._passed = self._passed, []
        return passed

    def timer_s(self) -> float:
        """Seconds until ``poll`` has to be called although nothing arrived."""
        times = [outgoing.retry_at for outgoing in self._outgoing if outgoing.retry_at]
        if self._paused_until:
            times.append(self._paused_until)
        if self._pending:
            times.append(next(iter(self._pending)).since + self._patience_s)
        return max(0.0, min(times) - time.monotonic()) if times else 60.0

    def close(self) -> None:
        """Drop everything that has not been handed out."""
        for listener in self._listeners:
            listener.close()
        for pending in self._pending:
            pending.connection.close()
        for passed in self._passed:
            passed.connection.close()
        self._listeners, self._passed, self._outgoing = [], [], []
        self._pending.clear()
        self._selector.close()

    def _turn(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                self._accept(key.fileobj)  # type: ignore[arg-type]
            elif key.data in self._pending:  # else evicted in this turn
                self._progress(key.data)
        self._expire()

    def _expire(self) -> None:
        now = time.monotonic()
        while self._pending:
            oldest = next(iter(self._pending))
            if now < oldest.since + self._patience_s:
                break
            self._drop(oldest, "no answer in time")
        if self._paused_until and now >= self._paused_until:
            self._paused_until = 0.0
            for listener in self._listeners:
                self._selector.register(listener, selectors.EVENT_READ)
        for outgoing in self._outgoing:
            if outgoing.retry_at and now >= outgoing.retry_at:
                self._try(outgoing)

    # Incoming

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            if self._strangers >= self._pending_max and not self._evict():
                return self._pause()
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return None
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    return self._pause()
                continue  # the peer went away while it was queued
            try:
                connection.setblocking(False)
                network.tune(connection)
                self._add(_Pending(connection, Answerer(self._secret), time.monotonic()))
            except OSError:
                connection.close()
        return None

    def _evict(self) -> bool:
        """Make room: a rank needs milliseconds, so whoever has been here longest is the stranger."""
        oldest = next(item for item in self._pending if item.outgoing is None)
        if time.monotonic() - oldest.since < _EVICTABLE_AFTER_S:
            return False
        self._drop(oldest, "")
        return True

    def _pause(self) -> None:
        """Leave new connections in the kernel's queue for a moment."""
        if not self._paused_until:
            self._paused_until = time.monotonic() + 0.05
            for listener in self._listeners:
                self._selector.unregister(listener)

    # Outgoing

    def _try(self, outgoing: Outgoing) -> None:
        outgoing.retry_at = 0.0
        connection = socket.socket(outgoing.family, socket.SOCK_STREAM)
        connection.setblocking(False)
        network.tune(connection)
        code = connection.connect_ex(outgoing.address)
        pending = _Pending(connection, Caller(self._secret, outgoing.greeting), time.monotonic(), outgoing)
        if code == 0:
            self._add(pending)
            self._greet(pending)
        elif code == errno.EINPROGRESS:
            pending.connected = False
            self._add(pending)
        else:
            connection.close()
            # A Unix listener whose queue is full, perhaps with strangers, fails with EAGAIN.
            self._fail(outgoing, os.strerror(code), final=not outgoing.persistent and code != errno.EAGAIN)

    def _fail(self, outgoing: Outgoing, reason: str, *, final: bool) -> None:
        outgoing.error = reason
        if outgoing.others:  # another host may have that address in this network
            outgoing.others.append((outgoing.family, outgoing.address))
            outgoing.family, outgoing.address = outgoing.others.pop(0)
        elif final:
            outgoing.failed = True
            return
        outgoing.retry_at = time.monotonic() + outgoing.retry_s
        outgoing.retry_s = min(2 * outgoing.retry_s, _RETRY_LAST_S)

    def _greet(self, pending: _Pending) -> None:
        assert isinstance(pending.machine, Caller)
        self._send(pending, pending.machine.hello)

    # Both

    def _add(self, pending: _Pending) -> None:
        events = selectors.EVENT_READ if pending.connected else selectors.EVENT_WRITE
        self._selector.register(pending.connection, events, pending)
        self._pending[pending] = None
        self._strangers += pending.outgoing is None

    def _remove(self, pending: _Pending) -> None:
        self._selector.unregister(pending.connection)
        del self._pending[pending]
        self._strangers -= pending.outgoing is None

    def _drop(self, pending: _Pending, reason: str, *, hopeless: bool = False) -> None:
        self._remove(pending)
        pending.connection.close()
        if pending.outgoing:
            self._fail(pending.outgoing, reason, final=hopeless or not pending.outgoing.persistent)

    def _progress(self, pending: _Pending) -> None:
        try:
            if pending.connected:
                self._read(pending)
            else:
                self._connected(pending)
        except AuthError as error:
            if str(error) == OTHER_SECRET:
                self._report_other_secret(pending)
            self._drop(pending, str(error), hopeless=True)
        except BlockingIOError:
            pass
        except OSError as error:
            self._drop(pending, error.strerror or str(error))

    def _report_other_secret(self, pending: _Pending) -> None:
        greeting = pending.machine.greeting
        with contextlib.suppress(OSError):
            if pending.outgoing is not None:
                pending.connection.send(REFUSAL, socket.MSG_NOSIGNAL)
            elif self._on_other_secret is not None and greeting is not None:
                self._on_other_secret(greeting, network.peer_address(pending.connection))

    def _connected(self, pending: _Pending) -> None:
        code = pending.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._drop(pending, os.strerror(code))
            return
        pending.connected = True
        self._selector.modify(pending.connection, selectors.EVENT_READ, pending)
        self._greet(pending)

    def _read(self, pending: _Pending) -> None:
        machine = pending.machine
        # Never a byte more than the handshake: what follows belongs to the next owner.
        part = pending.connection.recv(machine.wanted - len(pending.inbox))
        if not part:
            self._drop(pending, "the peer closed the connection: another job or generation")
            return
        pending.inbox += part
        if len(pending.inbox) < machine.wanted:
            return
        message = bytes(pending.inbox)
        pending.inbox.clear()
        reply = machine.receive(message)
        if pending.outgoing is None and machine.wanted and not self._welcome(pending):
            self._drop(pending, "")
            return
        if reply and not self._send(pending, reply):
            return
        if not machine.wanted:
            self._pass(pending)

    def _welcome(self, pending: _Pending) -> bool:
        greeting = pending.machine.greeting
        return greeting is not None and same_user(pending.connection) and self._admit(greeting)

    def _send(self, pending: _Pending, message: bytes) -> bool:
        # A fresh socket takes a hundred bytes at once; one that does not is useless.
        sent = 0
        with contextlib.suppress(OSError):
            sent = pending.connection.send(message, socket.MSG_NOSIGNAL)
        if sent != len(message):
            self._drop(pending, "the connection was cut")
        return sent == len(message)

    def _pass(self, pending: _Pending) -> None:
        greeting = pending.machine.greeting
        assert greeting is not None
        if pending.outgoing is not None and not same_user(pending.connection):
            self._drop(pending, "the peer is another user", hopeless=True)
            return
        self._remove(pending)
        if pending.outgoing is not None:
            pending.outgoing.done = True
            self._outgoing.remove(pending.outgoing)
        incoming, keys = pending.outgoing is None, pending.machine.keys()
        self._passed.append(Authenticated(greeting, pending.connection, incoming, keys))


def same_user(connection: socket.socket) -> bool:
    """Return whether the peer of a Unix socket runs as this user; True for other sockets."""
    if connection.family != socket.AF_UNIX:
        return True
    return network.peer(connection)[1] == os.geteuid()
