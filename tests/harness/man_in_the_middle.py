"""Somebody who can rewrite what hosts send each other, and does not know the job's secret.

He stands before listeners as a proxy. Handshakes pass; of what follows he sees each signed message, or the
bytes as they come where nothing is signed, and sends on what he likes.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from polyhvd.rendezvous import network
from polyhvd.rendezvous.auth import Greeting
from polyhvd.rendezvous.server import Server

__all__ = ["Attack", "ManInTheMiddle", "Message", "dropped", "flipped", "replayed", "server_behind"]

_MAGIC_BYTES, _GREETING_BYTES, _HELLO_BYTES, _ANSWER_BYTES, _PROOF_BYTES = 8, 32, 72, 72, 32
_LENGTH = struct.Struct("<I")
_TAG_BYTES = 16
_SIGNED = ("store", "agent", "control")


@dataclass(frozen=True)
class Message:
    """What is under way: a signed message with its MACs, or some bytes."""

    greeting: Greeting  # of the connection
    from_caller: bool
    number: int  # in its direction
    data: bytes

    @property
    def payload(self) -> bytes:
        """Of a signed message."""
        return self.data[_LENGTH.size + _TAG_BYTES : -_TAG_BYTES]


#: What to send on instead.
Attack = Callable[[Message], bytes]


def flipped(message: Message) -> bytes:
    """With one bit turned over, in the middle of the payload."""
    data = bytearray(message.data)
    data[(len(data) + _LENGTH.size) // 2] ^= 1
    return bytes(data)


def replayed(message: Message) -> bytes:
    """Twice."""
    return 2 * message.data


def dropped(message: Message) -> bytes:
    """Not at all."""
    return b""


@dataclass
class _Link:
    greeting: Greeting | None = None
    known: threading.Event = field(default_factory=threading.Event)


class ManInTheMiddle:
    """Proxies on the loopback; ``attack`` is called on threads of theirs."""

    def __init__(self) -> None:
        self.attack: Attack = lambda message: message.data
        self._sockets: list[socket.socket] = []

    def before(self, address: str, port: int) -> int:
        """The port, at the same address, of a proxy for a listener."""
        listener = socket.create_server((address, 0), backlog=64)
        self._sockets.append(listener)
        threading.Thread(target=self._serve, args=(listener, (address, port)), daemon=True).start()
        return int(listener.getsockname()[1])

    def close(self) -> None:
        """Cut all connections."""
        for item in self._sockets:
            with contextlib.suppress(OSError):
                item.shutdown(socket.SHUT_RDWR)
            item.close()

    def _serve(self, listener: socket.socket, target: tuple[str, int]) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                try:
                    far = socket.create_connection(target)
                except OSError:
                    near.close()
                    continue
                for end in (near, far):
                    network.tune(end)
                self._sockets += [near, far]
                link = _Link()
                for from_caller, source, sink in ((True, near, far), (False, far, near)):
                    pump = threading.Thread(
                        target=self._pump, args=(link, from_caller, source, sink), daemon=True
                    )
                    pump.start()

    def _pump(self, link: _Link, from_caller: bool, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            inbox = bytearray()
            number = 0
            for handshake in (_HELLO_BYTES, _PROOF_BYTES) if from_caller else (_ANSWER_BYTES,):
                while len(inbox) < handshake:
                    if not (data := source.recv(handshake - len(inbox))):
                        return
                    inbox += data
                if link.greeting is None and from_caller:
                    greeting = bytes(inbox[_MAGIC_BYTES : _MAGIC_BYTES + _GREETING_BYTES])
                    link.greeting = Greeting.unpack(greeting)
                    link.known.set()
                sink.sendall(inbox)
                inbox.clear()
            link.known.wait()
            assert link.greeting is not None
            while data := source.recv(1 << 16):
                inbox += data
                for part in _cut(inbox, link.greeting.purpose):
                    sink.sendall(self.attack(Message(link.greeting, from_caller, number, part)))
                    number += 1
            sink.shutdown(socket.SHUT_WR)


def _cut(inbox: bytearray, purpose: str) -> Iterator[bytes]:
    while inbox:
        whole = len(inbox)
        if purpose in _SIGNED:
            if len(inbox) < _LENGTH.size + _TAG_BYTES:
                return
            (length,) = _LENGTH.unpack_from(inbox)
            whole = _LENGTH.size + _TAG_BYTES + (length + _TAG_BYTES if length else 0)
            if len(inbox) < whole:
                return
        yield bytes(inbox[:whole])
        del inbox[:whole]


def server_behind(man: ManInTheMiddle) -> type[Server]:
    """A launcher's store: he stands before it, and before the listeners of all ranks that meet there."""

    class Behind(Server):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            address, port = network.parse_endpoint(self.endpoint)
            self.endpoint = network.endpoint_text(address, man.before(address, port))

        def _put(self, peer: Any, scope: str, index: int, value: bytes, *, own: bool) -> None:
            if scope.endswith("/hello"):
                card = json.loads(value)
                card["port"] = man.before(card["address"], card["port"])
                value = json.dumps(card).encode()
            super()._put(peer, scope, index, value, own=own)

    return Behind
