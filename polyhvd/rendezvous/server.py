"""The key-value store that a launcher serves, or a rank in its place.

An *own* value lives as long as the connection that wrote it, so nothing is left of ranks that have
met, failed or died. A *gather* answers all its waiters at once. One thread serves everything; peers
are authenticated first, then speak in signed frames.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from polyhvd.rendezvous import network
from polyhvd.rendezvous.auth import NO_RANK, Greeting, SessionKeys
from polyhvd.rendezvous.handshakes import Handshakes, OnOtherSecret
from polyhvd.rendezvous.signed_stream import (
    BEAT,
    READ_BYTES,
    REFUSED,
    FrameReader,
    Header,
    SignedStream,
    TamperedError,
    pack_frame,
    tampered,
)
from polyhvd.rendezvous.store import COUNT_MAX, StoreError
from polyhvd.rendezvous.values import Values, Waiter

__all__ = ["Server"]


class _Peer:
    """An authenticated connection, on the server's side."""

    def __init__(self, connection: socket.socket, keys: SessionKeys, rank: int) -> None:
        self.connection = connection
        self.signed = SignedStream(keys)
        self.rank = rank
        self.inbox = FrameReader()
        self.outbox = bytearray()
        self.own: set[tuple[str, int]] = set()


class Server:
    """Serves the values of a job on one address, on its own thread, until ``close``.

    ``endpoint`` is what ranks need as POLYHVD_RENDEZVOUS. Usable as a context manager.

    Args:
        secret: that every peer has to prove.
        address: to listen on. :meth:`listen` adds others.
        listener: a socket that listens already, in its place; it now belongs to the server, which has no
            ``endpoint`` then.
        generation: that peers have to be of; None: any.
        on_other_secret: see :class:`polyhvd.rendezvous.handshakes.Handshakes`; on the server's thread.
        observe: called with scope, index and value of what peers write, on the server's thread; it must not
            wait.
        observe_loss: likewise, with scope and index of an own value whose connection has ended.
    """

    def __init__(
        self,
        secret: bytes,
        address: str = "127.0.0.1",
        *,
        listener: socket.socket | None = None,
        generation: int | None = None,
        on_other_secret: OnOtherSecret | None = None,
        observe: Callable[[str, int, bytes], None] | None = None,
        observe_loss: Callable[[str, int], None] | None = None,
    ) -> None:
        self.endpoint = ""
        self._generation = generation
        self._observe, self._observe_loss = observe, observe_loss
        #: Commands of other threads; appending and popping are atomic.
        self._commands: deque[Callable[[], None]] = deque()
        if listener is None:
            listener = network.listener(address)
            self.endpoint = network.endpoint_text(address, listener.getsockname()[1])
        self._values = Values[_Peer]()
        self._handshakes = Handshakes(secret, self._admit, on_other_secret=on_other_secret)
        self._handshakes.listen(listener)
        self._added: deque[socket.socket] = deque()  # for the thread; append and popleft are atomic
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

    def post(self, scope: str, index: int, value: bytes) -> None:
        """Write a value, unless there is one; from any thread, and without waiting for it."""
        self._submit(lambda: self._put(None, scope, index, value, own=False))

    def values(self, scope: str) -> dict[int, bytes]:
        """The values of a scope that have arrived, by index; from any thread."""
        return dict(self._values.scopes.get(scope, {}))  # copied in one step, while another thread may write

    def drop(self, prefix: str, *, waiters: bool = False) -> None:
        """Forget the values of all scopes that begin so; from any thread.

        With ``waiters``, requests that wait for these scopes are forgotten as well.
        """
        self._submit(lambda: self._values.drop(prefix, waiters=waiters))

    def close(self) -> None:
        """Cut all connections and end the thread; clients that wait fail at once."""
        if self._wake_write < 0:
            return
        os.close(self._wake_write)
        self._wake_write = -1
        self._thread.join()

    def listen(self, address: str) -> str:
        """Serve on a further address, and return its endpoint; raises OSError where it cannot be had."""
        listener = network.listener(address)
        endpoint = network.endpoint_text(address, listener.getsockname()[1])
        self._added.append(listener)
        self._submit(self._listen)
        return endpoint

    def _listen(self) -> None:
        self._handshakes.listen(self._added.popleft())

    def _submit(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        os.write(self._wake_write, b"+")

    def _run_commands(self) -> bool:
        """Run the commands of other threads; False: the server is to end."""
        if not os.read(self._wake_read, READ_BYTES):
            return False
        while self._commands:
            self._commands.popleft()()
        return True

    def _admit(self, greeting: Greeting) -> bool:
        wanted = self._generation in (None, greeting.generation)
        return greeting.purpose == "store" and greeting.target == NO_RANK and wanted

    def _serve(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            for peer in list(self._peers):
                self._drop(peer)
            for listener in self._added:
                listener.close()
            self._handshakes.close()
            self._selector.close()
            os.close(self._wake_read)

    def _turn(self) -> bool:
        events = self._selector.select(self._timer_s())
        for passed in self._handshakes.poll(0):
            peer = _Peer(passed.connection, passed.keys, passed.greeting.source)
            self._peers.add(peer)
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        for key, mask in events:
            if key.data is None and not self._run_commands():
                return False
            if isinstance(key.data, _Peer) and key.data in self._peers:
                self._attend(key.data, mask)
        for waiter, missing in self._values.expired(time.monotonic()):
            self._answer(waiter, {"missing": missing})
        return True

    def _timer_s(self) -> float:
        deadline = self._values.next_deadline()
        wait_s = self._handshakes.timer_s()
        return wait_s if deadline is None else max(0.0, min(wait_s, deadline - time.monotonic()))

    def _attend(self, peer: _Peer, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                self._flush(peer)
            if mask & selectors.EVENT_READ:
                data = peer.connection.recv(READ_BYTES)
                if not data:
                    raise StoreError("closed")
                peer.inbox.feed(peer.signed.unseal(data))
                while peer in self._peers and (frame := peer.inbox.take()):
                    self._perform(peer, *frame)
        except BlockingIOError:
            pass
        except TamperedError as error:
            sender = "the launcher" if peer.rank == NO_RANK else f"rank {peer.rank}"
            self._send(peer, {REFUSED: tampered(sender, "the rendezvous", error)})
            self._drop(peer)
        except (OSError, KeyError, TypeError, ValueError, ArithmeticError):
            self._drop(peer)  # gone, or it does not speak our language

    def _perform(self, peer: _Peer, header: Header, body: bytes) -> None:
        if BEAT in header:
            return self._send(peer, {BEAT: True})
        scope = str(header["scope"])
        if "forget" in header:
            self._values.forget(scope, int(header["forget"]), peer.rank)
            peer.own.discard((scope, int(header["forget"])))
        if "index" in header:
            self._put(peer, scope, int(header["index"]), body, own=bool(header["own"]))
        if "count" in header:
            self._gather(peer, header, scope)

    def _put(self, peer: _Peer | None, scope: str, index: int, value: bytes, *, own: bool) -> None:
        is_new = index not in self._values.scopes.get(scope, {})
        if own and is_new and peer is not None:
            peer.own.add((scope, index))
        if is_new and peer is not None and self._observe is not None:
            self._observe(scope, index, value)
        writer = NO_RANK if peer is None else peer.rank
        for waiters, values, sizes in self._values.put(scope, index, value, writer):
            for waiter in waiters:
                self._answer(waiter, sizes, values)

    def _gather(self, peer: _Peer, header: Header, scope: str) -> None:
        count = int(header["count"])
        if not 0 < count <= COUNT_MAX:
            raise ValueError("count")
        waiter = Waiter(peer, int(header["id"]), time.monotonic() + float(header["wait_s"]))
        if self._values.missing(scope, count):
            self._values.wait(scope, count, waiter)
        else:
            values, sizes = self._values.collect(scope, count)
            self._answer(waiter, sizes, values)

    def _answer(self, waiter: Waiter[_Peer], header: Header, body: bytes = b"") -> None:
        peer = waiter.peer
        if peer in self._peers:
            self._send(peer, {"id": waiter.request, **header}, body)

    def _send(self, peer: _Peer, header: Header, body: bytes = b"") -> None:
        try:
            peer.outbox += peer.signed.seal(pack_frame(header, body))
            self._flush(peer)
        except BlockingIOError:
            pass
        except (OSError, ValueError):  # gone, or waits for more than a frame holds
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
        self._values.remove_peer(peer)
        for scope, index in peer.own:
            self._values.forget(scope, index, peer.rank)
            if self._observe_loss is not None:
                self._observe_loss(scope, index)
