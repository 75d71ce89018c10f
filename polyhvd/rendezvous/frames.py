"""Frames of the store's protocol: a header in JSON and a raw body, both bounded. They travel signed."""

from __future__ import annotations

import json
import struct
from typing import Any

from polyhvd.rendezvous.store import VALUE_BYTES_MAX, StoreError

__all__ = ["BEAT", "READ_BYTES", "REFUSED", "FrameReader", "Header", "pack_frame", "tampered"]

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


def pack_frame(header: Header, body: bytes = b"") -> bytes:
    """A frame's bytes; raises ValueError where it is too large."""
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > _HEADER_BYTES_MAX or len(body) > _BODY_BYTES_MAX:
        raise ValueError(f"too large for the rendezvous: {len(text)} + {len(body)} bytes")
    return _FRAME.pack(len(text), len(body)) + text + body


def tampered(sender: str, receiver: str, error: OSError) -> str:
    """The error text for a connection whose bytes were tampered with."""
    return (
        f"what {sender} sent to {receiver} was changed, replayed or lost on its way: {error}; look at the "
        "network between them"
    )


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
