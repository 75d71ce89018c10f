"""Signs a connection after its handshake: each message carries MACs that prove sender, place and bytes.

A message is a length, the length's MAC, the bytes and their MAC; one without bytes ends with its length's.
Both MACs cover the message's number in its direction, which is not sent, so that what was changed,
replayed, put elsewhere or left out is noticed at once, or with the message that follows. The MAC is keyed
BLAKE2b (RFC 7693) of 16 bytes. ``csrc/control/signed_framing.h`` has the same, for control messages between
ranks. Nothing is encrypted.

The store's protocol sends frames through it: a header in JSON and a raw body, both bounded.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from typing import Any

from polyhvd.rendezvous.auth import SessionKeys
from polyhvd.rendezvous.store import VALUE_BYTES_MAX, StoreError

__all__ = [
    "BEAT",
    "MESSAGE_BYTES_MAX",
    "READ_BYTES",
    "REFUSED",
    "FrameReader",
    "Header",
    "SignedStream",
    "TamperedError",
    "pack_frame",
    "tampered",
]

#: Longer ones are sent as several.
MESSAGE_BYTES_MAX = 1 << 20

_LENGTH = struct.Struct("<I")
_CONTEXT = struct.Struct("<QI")  # the message's number and length
_TAG_BYTES = 16
_HEADER_BYTES = _LENGTH.size + _TAG_BYTES


#: How much of a stream is worth reading at once.
READ_BYTES = 1 << 18

#: In the header of the server's last frame to a client: why it closes the connection.
REFUSED = "refused"

#: In the header of a heartbeat of a client that waits, and of the server's answer to it.
BEAT = "beat"

_FRAME = struct.Struct("!II")
_HEADER_BYTES_MAX = 1 << 20
_BODY_BYTES_MAX = VALUE_BYTES_MAX

Header = dict[str, Any]


class TamperedError(OSError):
    """The received bytes are not those that the peer sent next: they were changed, replayed or removed."""


def tampered(sender: str, receiver: str, error: OSError) -> str:
    """The error text for a connection whose bytes were tampered with."""
    return (
        f"what {sender} sent to {receiver} was changed, replayed or lost in transit: {error}; look at the "
        "network between them"
    )


class SignedStream:
    """Both directions of one connection; does no input or output itself. Not thread-safe.

    What goes in at one end with ``seal`` comes out at the other from ``unseal``, as a stream of bytes:
    the boundaries of messages are not those of calls.

    Example::

        stream = SignedStream(prove(connection, secret, greeting, deadline))
        connection.sendall(stream.seal(b"hello"))
        received = stream.unseal(connection.recv(65536))
    """

    def __init__(self, keys: SessionKeys) -> None:
        self._own = hashlib.blake2b(key=keys.send, digest_size=_TAG_BYTES)
        self._theirs = hashlib.blake2b(key=keys.receive, digest_size=_TAG_BYTES)
        self._sent = self._received = 0  # messages
        self._inbox = bytearray()
        self._length: int | None = None  # of the message that is coming, once its header is proved

    def seal(self, data: bytes) -> bytes:
        """The bytes to send for ``data``, after all that was sealed before."""
        parts: list[bytes | memoryview] = []
        view = memoryview(data)
        for begin in range(0, len(view), MESSAGE_BYTES_MAX):
            part = view[begin : begin + MESSAGE_BYTES_MAX]
            context = _CONTEXT.pack(self._sent, len(part))
            parts += (_LENGTH.pack(len(part)), _tag(self._own, context), part, _tag(self._own, context, part))
            self._sent += 1
        return b"".join(parts)

    def unseal(self, data: bytes) -> bytes:
        """The bytes that the other side has sealed, as far as they are proved with ``data``, just received.

        Memory grows with what has come, and never beyond one message more.

        Raises:
            TamperedError: it is not what the other side has sent. The connection is of no use any more.
        """
        self._inbox += data
        proved: list[bytes] = []
        while (part := self._take()) is not None:
            proved.append(part)
        return b"".join(proved)

    def _take(self) -> bytes | None:
        inbox = self._inbox
        if len(inbox) < _HEADER_BYTES:
            return None
        if self._length is None:
            # Check the length before using it: waiting for bytes that are never sent has no end.
            (length,) = _LENGTH.unpack_from(inbox)
            self._check(length, b"", inbox[_LENGTH.size : _HEADER_BYTES])
            if length > MESSAGE_BYTES_MAX:
                raise TamperedError(f"message {self._received} is too long: {length} bytes")
            self._length = length
        end = _HEADER_BYTES + self._length
        whole = end + (_TAG_BYTES if self._length else 0)
        if len(inbox) < whole:
            return None
        part = bytes(inbox[_HEADER_BYTES:end])
        if part:
            self._check(self._length, part, inbox[end:whole])
        del inbox[:whole]
        self._length = None
        self._received += 1
        return part

    def _check(self, length: int, part: bytes, tag: bytearray) -> None:
        context = _CONTEXT.pack(self._received, length)
        if not hmac.compare_digest(_tag(self._theirs, context, part), tag):
            raise TamperedError(f"message {self._received} of the connection fails its MAC")


def _tag(mac: hashlib.blake2b, context: bytes, part: bytes | memoryview = b"") -> bytes:
    mac = mac.copy()
    mac.update(context)
    mac.update(part)
    return mac.digest()


# Frames of the store's protocol ---------------------------------------------------


def pack_frame(header: Header, body: bytes = b"") -> bytes:
    """A frame's bytes; raises ValueError where it is too large."""
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > _HEADER_BYTES_MAX or len(body) > _BODY_BYTES_MAX:
        raise ValueError(f"too large for the rendezvous: {len(text)} + {len(body)} bytes")
    return _FRAME.pack(len(text), len(body)) + text + body


class FrameReader:
    """Cuts a stream into frames; memory grows with what has arrived, not with what was announced."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Add what has arrived."""
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
        except (ValueError, RecursionError):
            raise StoreError("a frame is not JSON") from None
        if not isinstance(header, dict):
            raise StoreError("a frame is not a JSON object")
        return header, body
