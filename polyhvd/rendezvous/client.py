"""A rank's client of the store that :mod:`polyhvd.rendezvous.server` serves: one authenticated connection."""

from __future__ import annotations

import contextlib
import itertools
import math
import socket
import time
from collections import deque

from polyhvd.rendezvous import network
from polyhvd.rendezvous.auth import NO_RANK, AuthError, Greeting, SessionKeys, prove
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
from polyhvd.rendezvous.store import GatherTimeoutError, Store, StoreError, check_count, check_value, job_name

__all__ = ["Client", "ConnectedStore"]

_PATIENCE_S = 10.0  # of one try to connect
_PATIENCE_EACH_S = 3.0  # where there are several addresses
#: While a reply is awaited: first and largest interval between heartbeats. A message that was removed in
#: transit is detected by the next one, in either direction.
_BEAT_S = 0.5
_BEAT_S_MAX = 30.0
#: So many abandoned requests are remembered until their replies come, if ever.
_ABANDONED_MAX = 64


class ConnectedStore(Store):
    """The store at the other end of a connection that has proved its secret.

    Args:
        connection: a TCP or Unix socket, which now belongs to this object.
        keys: of its session.
        secret: the job's.
        job: as :func:`polyhvd.rendezvous.store.job_name` makes it.
        server: what messages call the other end: "the launcher", "rank 0".
    """

    def __init__(
        self, connection: socket.socket, keys: SessionKeys, secret: bytes, *, job: str, server: str
    ) -> None:
        self._socket = connection
        self._signed = SignedStream(keys)
        self._inbox = FrameReader()
        self._replies: dict[int, tuple[Header, bytes]] = {}
        self._abandoned: deque[int] = deque(maxlen=_ABANDONED_MAX)
        self._next = 0
        self._beat_s = _BEAT_S
        self._beat_at = 0.0  # by time.monotonic(); 0: nothing was asked for yet
        self._lost = ""  # why there will be no more replies
        self._closed = False
        self._server = server
        self.secret = secret
        self.job = job
        #: Ranks in whose name processes have called that have another secret, as far as is known here.
        self.strangers: set[int] = set()
        if connection.family != socket.AF_UNIX:
            self.address = connection.getsockname()[0]  # as the server's host reaches it

    @property
    def peer_address(self) -> str:
        """The server's address, as this host reaches it; empty: it is on this host."""
        return network.peer_address(self._socket)

    def close(self) -> None:
        """Close the connection; the server forgets this rank's own values."""
        self._closed = True
        self._socket.close()

    def give_up_after(self, silence_s: float) -> None:
        """Have a server that falls silent given up after so long rather than 20 seconds; 0: after these."""
        network.give_up_after(self._socket, silence_s)

    def probe(self, silence_s: float) -> None:
        """Have a silent server asked often enough for :meth:`is_silent`; it is given up as before."""
        network.probe(self._socket, silence_s)

    def is_silent(self, silence_s: float) -> bool:
        """Return whether the server has not answered :meth:`probe` of late; from any thread."""
        return self._closed or network.is_silent(self._socket, silence_s)

    def hang_up(self) -> None:
        """Shut the connection down: calls that wait for the server fail; from any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def fileno(self) -> int:
        """The connection's descriptor; -1 once it is closed."""
        return self._socket.fileno()

    @property
    def poll_s(self) -> float:
        """Until the next heartbeat is due: the server reports timeouts."""
        return max(0.0, self._beat_at - time.monotonic()) if self._beat_at else math.inf

    def pause(self) -> None:
        """Return when something has arrived; raises StoreError where nothing will."""
        self._check_open()
        if self._lost:
            raise StoreError(self._lost)
        super().pause()

    def put(self, scope: str, index: int, value: bytes, *, own: bool = False) -> None:
        """Write a value, unless there is one already."""
        check_value(value)
        self._send({"scope": scope, "index": index, "own": own}, value)

    def forget(self, scope: str, index: int) -> None:
        """Remove a value that this rank wrote, perhaps as an earlier process in its place."""
        self._send({"scope": scope, "forget": index})

    def post_gather(
        self, scope: str, count: int, wait_s: float, *, own: tuple[int, bytes] | None = None
    ) -> int:
        """Ask for values 0 .. count-1, after writing an own one; returns the request's number."""
        check_count(count)
        check_value(b"" if own is None else own[1])
        self._next += 1
        header: Header = {"scope": scope, "count": count, "wait_s": wait_s, "id": self._next}
        if own is not None:
            header.update(index=own[0], own=True)
        self._send(header, b"" if own is None else own[1])
        self._beat_s = _BEAT_S
        self._beat_at = time.monotonic() + _BEAT_S
        return self._next

    def take(self, request: int) -> list[bytes] | None:
        """The values of a request, or None while they are not there."""
        self._check_open()
        self._receive()
        self._beat()
        reply = self._replies.pop(request, None)
        if reply is None:
            if self._lost and not self._replies:  # what came before the end still counts
                raise StoreError(self._lost)
            return None
        header, body = reply
        if "missing" in header:
            raise GatherTimeoutError([int(i) for i in header["missing"]])
        values, begin = [], 0
        for size in header["sizes"]:
            values.append(body[begin : begin + size])
            begin += size
        return values

    def abandon(self, request: int) -> None:
        """Drop the values of this request when they come."""
        if self._replies.pop(request, None) is None:
            self._abandoned.append(request)

    def _beat(self) -> None:
        """Exchange a heartbeat if nothing was sent for a while; at growing intervals."""
        now = time.monotonic()
        if not 0 < self._beat_at <= now or self._lost:
            return
        self._beat_s = min(2 * self._beat_s, _BEAT_S_MAX)
        self._beat_at = now + self._beat_s
        with contextlib.suppress(StoreError):  # it is seen where the reply is looked for
            self._send({BEAT: self._next})

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the store is closed")

    def _send(self, header: Header, body: bytes = b"") -> None:
        self._check_open()
        try:
            self._socket.setblocking(True)
            self._socket.sendall(self._signed.seal(pack_frame(header, body)))
        except OSError as error:
            self._receive()  # the server may have sent the reason
            raise StoreError(self._lost or f"{self._server} is gone: {error}") from error

    def _receive(self) -> None:
        try:
            self._socket.setblocking(False)
            while data := self._socket.recv(READ_BYTES):
                self._inbox.feed(self._signed.unseal(data))
        except BlockingIOError:
            pass
        except TamperedError as error:
            self._lost = tampered(self._server, "this process", error)
        except OSError as error:
            self._lose(str(error))
        else:
            self._lose("it closed the connection")
        while frame := self._inbox.take():
            if REFUSED in frame[0]:
                self._lost = str(frame[0][REFUSED])
            elif BEAT not in frame[0] and (number := int(frame[0]["id"])) in self._abandoned:
                self._abandoned.remove(number)
            elif BEAT not in frame[0]:
                self._replies[number] = frame

    def _lose(self, reason: str) -> None:
        self._lost = self._lost or f"{self._server} is gone: {reason}"


class Client(ConnectedStore):
    """A rank's connection to a server at a given address.

    Args:
        endpoint: ``host:port``; or several with commas, of which the first that answers is taken. Then not
            all ranks share a network, and :attr:`further_addresses` are this host's others.
        secret: the job's.
        rank: this process's.
        generation: of the world to be.
        deadline: by ``time.monotonic()``.
        server: what messages call the other end.

    Raises:
        StoreError: the server cannot be reached until ``deadline`` (``time.monotonic``), or refuses
            this rank.
    """

    def __init__(
        self,
        endpoint: str,
        secret: bytes,
        *,
        rank: int,
        generation: int,
        deadline: float,
        server: str = "the launcher",
    ) -> None:
        greeting = Greeting("store", generation, rank, NO_RANK)
        connection, keys = _connect(endpoint, secret, greeting, deadline)
        place = ",".join(sorted(endpoint.split(",")))  # each rank has its own order
        super().__init__(connection, keys, secret, job=job_name(place, secret), server=server)
        if "," in endpoint:
            own = network.own_addresses()
            self.further_addresses = [address for address in own if address != self.address]


def _connect(
    endpoint: str, secret: bytes, greeting: Greeting, deadline: float
) -> tuple[socket.socket, SessionKeys]:
    """Connect and prove the secret, trying again until the deadline; a wrong secret ends it at once."""
    try:
        addresses = network.parse_endpoints(endpoint)
    except ValueError as error:
        raise StoreError(f"POLYHVD_RENDEZVOUS: {error}") from None
    patience_s = _PATIENCE_S if len(addresses) == 1 else _PATIENCE_EACH_S
    for address in itertools.cycle(addresses):
        connection = None
        try:
            patience = min(deadline, time.monotonic() + patience_s)
            connection = socket.create_connection(address, timeout=max(0.01, patience - time.monotonic()))
            network.tune(connection)
            return connection, prove(connection, secret, greeting, patience)
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, AuthError) and len(addresses) == 1:
                raise StoreError(f"the rendezvous at {endpoint} refused this rank: {error}") from None
            if not isinstance(error, OSError):
                raise
            if time.monotonic() + 0.1 >= deadline:
                raise StoreError(f"cannot reach the rendezvous at {endpoint}: {error}") from None
        time.sleep(0.05)
    raise AssertionError("not reached")
