"""The network of the fault test: proxies between ranks that damage bytes, and strangers.

Ranks enter the proxies by themselves: the rendezvous hands out the proxies' addresses for theirs. One
thread moves all bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fault_cases import Fault

from polyhvd.rendezvous import network
from polyhvd.rendezvous.server import Server

__all__ = ["Crowd", "Rendezvous", "Wire"]

_HELLO = struct.Struct("!8s16sQii")  # as polyhvd/rendezvous/auth.py has it
_CHUNK = 1 << 16
_OUTBOX_MAX = 1 << 20

Address = tuple[str, int]


class Rendezvous(Server):
    """The launcher's store, which shows each rank's card to ``on_card`` before it hands it out."""

    def __init__(self, secret: bytes, on_card: Callable[[dict[str, Any]], None]) -> None:
        self._on_card = on_card
        super().__init__(secret)

    def _put(self, peer: Any, scope: str, index: int, value: bytes, *, own: bool) -> None:
        if scope.endswith("/hello"):
            card = json.loads(value)
            self._on_card(card)
            value = json.dumps(card).encode()
        super()._put(peer, scope, index, value, own=own)


# Strangers -------------------------------------------------------------------------------------


class Crowd:
    """Peers that do not know the secret, on every listener that they are shown."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._connections: list[socket.socket] = []

    def visit(self, family: int, address: Any, count: int) -> None:
        """Connect, and stay silent, talk nonsense, begin a handshake, or go away."""
        for _ in range(count):
            connection = socket.socket(family, socket.SOCK_STREAM)
            connection.setblocking(False)
            with contextlib.suppress(OSError):
                connection.connect_ex(address)
                connection.send(self._words())
            if self._chance.random() < 0.25:
                connection.close()
            else:
                self._connections.append(connection)

    def _words(self) -> bytes:
        chance = self._chance
        hello = _HELLO.pack(b"polyhvd\x02", b"data", 1, chance.randrange(4), chance.randrange(4)) + bytes(32)
        return chance.choice(
            [b"", chance.randbytes(chance.randint(1, 2000)), hello, hello[: chance.randint(1, 60)]]
        )

    def close(self) -> None:
        """Go home."""
        for connection in self._connections:
            connection.close()


# Proxies ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Flow:
    """One direction of a connection."""

    source: socket.socket
    sink: socket.socket
    link: _Link
    outbox: bytearray = field(default_factory=bytearray)
    passed: int = 0  # bytes that were read
    faults: list[tuple[int, Fault]] = field(default_factory=list)  # where in the stream
    swallowing: int = 0  # bytes that are still to be dropped
    held_until: float = 0.0
    ended: bool = False  # the source sends no more
    shut: bool = False  # and the sink knows


@dataclass(eq=False)
class _Link:
    """A connection between two ranks."""

    target: int
    source: int = -1
    purpose: str = ""
    flows: list[_Flow] = field(default_factory=list)
    is_open: bool = True


class Wire:
    """Stands before the listeners of all ranks, on a thread of its own."""

    def __init__(self, early: list[Fault]) -> None:
        self._early = early  # for the first connections of their kind
        self._selector = selectors.DefaultSelector()
        self._links: list[_Link] = []
        self._orders: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._closing = False
        self.done: list[str] = []  # what has in fact happened
        self._thread = threading.Thread(target=self._serve, name="wire", daemon=True)
        self._thread.start()

    def stand_before(self, card: dict[str, Any]) -> None:
        """Put a proxy's address into a rank's card. Any thread."""
        listener = socket.create_server((card["address"], 0), backlog=64)
        listener.setblocking(False)
        target, address = card["rank"], (card["address"], card["port"])
        card["port"] = listener.getsockname()[1]
        self._order(
            lambda: self._selector.register(listener, selectors.EVENT_READ, (listener, target, address))
        )

    def strike(self, fault: Fault) -> None:
        """Let a fault happen on a connection of its victim, soon. Any thread."""
        self._order(lambda: self._arm(fault))

    def close(self) -> None:
        """Close everything and end the thread."""
        self._closing = True
        self._order(lambda: None)
        self._thread.join()

    def _order(self, call: Callable[[], None]) -> None:
        with self._lock:
            self._orders.append(call)
        os.write(self._wake_write, b"!")

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._turn()
        finally:
            for key in list(self._selector.get_map().values()):
                if isinstance(key.fileobj, socket.socket):
                    key.fileobj.close()
            for link in self._links:
                self._close(link)
            self._selector.close()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _turn(self) -> None:
        now = time.monotonic()
        held = [flow.held_until for link in self._links for flow in link.flows if flow.held_until > now]
        for key, _ in self._selector.select(min(held) - now if held else None):
            if key.data is None:
                os.read(self._wake_read, 4096)
                with self._lock:
                    orders, self._orders = self._orders, []
                for order in orders:
                    order()
            elif isinstance(key.data, tuple):
                self._accept(*key.data)
            elif key.data.is_open:
                self._receive(key.data)
        for link in self._links:
            if link.is_open:
                self._send(link)

    def _accept(self, listener: socket.socket, target: int, address: Address) -> None:
        with contextlib.suppress(BlockingIOError):
            near, _ = listener.accept()
            far = socket.socket(near.family, socket.SOCK_STREAM)
            try:
                far.connect(address)
            except OSError:  # the rank has gone
                near.close()
                far.close()
                return
            link = _Link(target)
            link.flows = [_Flow(near, far, link), _Flow(far, near, link)]
            self._links.append(link)
            for end in (near, far):
                end.setblocking(False)
                network.tune(end)
                self._selector.register(end, selectors.EVENT_READ, link)

    def _receive(self, link: _Link) -> None:
        for flow in link.flows:
            if flow.ended or len(flow.outbox) > _OUTBOX_MAX or not link.is_open:
                continue
            try:
                data = flow.source.recv(_CHUNK)
            except BlockingIOError:
                continue
            except OSError:
                self._reset(link)
                return
            flow.ended = not data
            self._take(flow, data)

    def _take(self, flow: _Flow, data: bytes) -> None:
        if flow.passed == 0 and flow is flow.link.flows[0] and len(data) >= _HELLO.size:
            _, purpose, _, flow.link.source, _ = _HELLO.unpack_from(data)
            flow.link.purpose = purpose.rstrip(b"\0").decode("ascii", "replace")
            for fault in [f for f in self._early if f.purpose == flow.link.purpose]:
                if fault.victim in (flow.link.source, flow.link.target):
                    self._early.remove(fault)
                    self._place(fault, flow.link)
        begin = flow.passed
        flow.passed += len(data)
        swallowed = min(flow.swallowing, len(data))
        flow.swallowing -= swallowed
        changed = bytearray(data[swallowed:])
        shift = -swallowed  # between places in what was read and in what is left
        for position, fault in [f for f in flow.faults if f[0] < flow.passed]:
            flow.faults.remove((position, fault))
            shift += self._damage(flow, changed, max(position - begin + shift, 0), fault)
        flow.outbox += changed

    def _damage(self, flow: _Flow, data: bytearray, at: int, fault: Fault) -> int:
        """Change bytes from ``at`` on as the fault says; returns by how much they have grown."""
        self.done.append(f"{fault.kind} from {flow.link.purpose} {flow.link.source}-{flow.link.target}")
        chance = random.Random(fault.pick)
        size = len(data)
        hit = data[at : at + fault.count]
        if fault.kind == "cut":
            del data[at:]
            if fault.pick % 2:  # a reset, which takes what is under way along
                self._reset(flow.link)
            for each in flow.link.flows:
                each.ended = True
        elif fault.kind == "garble":
            for k in range(len(hit)):
                data[at + k] ^= chance.randint(1, 255) if chance.random() < 0.3 or k == 0 else 0
        elif fault.kind == "swallow":
            del data[at : at + fault.count]
            flow.swallowing = fault.count - len(hit)
        elif fault.kind == "repeat":
            data[at:at] = hit
        elif fault.kind == "insert":
            data[at:at] = chance.randbytes(fault.count)
        elif fault.kind == "delay":
            flow.held_until = time.monotonic() + fault.hold_s
        return len(data) - size

    def _arm(self, fault: Fault) -> None:
        links = [
            link
            for link in self._links
            if link.is_open and link.purpose == fault.purpose and fault.victim in (link.source, link.target)
        ]
        if links:
            self._place(fault, links[fault.pick // 2 % len(links)])

    def _place(self, fault: Fault, link: _Link) -> None:
        flow = link.flows[fault.pick // 16 % 2]
        flow.faults.append((flow.passed + fault.after_bytes, fault))
        flow.faults.sort(key=lambda item: item[0])

    def _send(self, link: _Link) -> None:
        for flow in link.flows:
            if not link.is_open or time.monotonic() < flow.held_until:
                continue
            try:
                while flow.outbox:
                    del flow.outbox[: flow.sink.send(flow.outbox[:_CHUNK], socket.MSG_NOSIGNAL)]
                if flow.ended and not flow.shut:
                    flow.shut = True
                    flow.sink.shutdown(socket.SHUT_WR)
            except BlockingIOError:
                pass
            except OSError:
                self._reset(link)
                return
        if all(flow.shut for flow in link.flows):
            self._close(link)
        elif link.is_open:
            self._watch(link)

    def _watch(self, link: _Link) -> None:
        """Wait for what an end can give, and for what it can take."""
        for flow, back in (link.flows, link.flows[::-1]):
            events = 0
            if not flow.ended and len(flow.outbox) <= _OUTBOX_MAX:
                events |= selectors.EVENT_READ
            if back.outbox and time.monotonic() >= back.held_until:
                events |= selectors.EVENT_WRITE
            known = flow.source in self._selector.get_map()
            if events and known:
                self._selector.modify(flow.source, events, link)
            elif events:
                self._selector.register(flow.source, events, link)
            elif known:
                self._selector.unregister(flow.source)

    def _reset(self, link: _Link) -> None:
        for flow in link.flows:
            with contextlib.suppress(OSError):
                flow.sink.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._close(link)

    def _close(self, link: _Link) -> None:
        link.is_open = False
        for flow in link.flows:
            if flow.source.fileno() >= 0:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(flow.source)
                flow.source.close()
