"""Signs the parts of one call that sends objects between hosts: a pickle runs any code of its sender.

First each rank sends a new random number (a nonce) to all others. The MAC of every part then covers the
nonces of all ranks, the call, the sender and which part it is: a part that was recorded earlier, in this job
or another, belongs to another call or was moved has the wrong MAC. The key is the world's; only its ranks
have it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from polyhvd.errors import PeerLostError
from polyhvd.runtime.world import World

__all__ = ["TAG_BYTES", "Bytes", "Seals"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

TAG_BYTES = 16

_RANK = struct.Struct("<q")
_NONCE_BYTES = 16
_NONCE_ROW_BYTES = _RANK.size + _NONCE_BYTES
_ROW_BYTES = _NONCE_ROW_BYTES + TAG_BYTES


class Seals:
    """Signs and checks the messages of one rank during one call.

    Args:
        world: of the call.
        verb: what is called: "broadcast_object".
        label: names the call in messages, and matches those of the ranks.
        set_id: number of the process set.
        gather: an allgather of rows of bytes among the ranks of the call, one row of each.

    Raises:
        PeerLostError: what a rank sent was changed on its way.
        HorovodInternalError: a rank was lost, or the engine was shut down.

    Example::

        seals = Seals(world, "allgather_object", label, set_id, gather)
        row = seals.sealed("size", words + seals.tag(rank, "data", pickled.data))
    """

    def __init__(
        self, world: World, verb: str, label: str, set_id: int, gather: Callable[[Bytes], Bytes]
    ) -> None:
        self._world = world
        self._rank = world.placement.rank
        self._label = label
        name = label.encode("utf-8", "surrogatepass")
        subject = struct.pack("<qI", set_id, len(name)) + name + verb.encode()
        self._mac = _mac(world.key, b"nonces", subject)
        own = _RANK.pack(self._rank) + secrets.token_bytes(_NONCE_BYTES)
        rows = gather(np.frombuffer(own + self.tag(self._rank, "nonce", own), np.uint8)).tobytes()
        received: list[bytes] = []
        #: Ranks that take part, in the order in which they are gathered: those that have joined do not.
        self.ranks: list[int] = []
        for begin in range(0, len(rows), _ROW_BYTES):
            row, tag = (
                rows[begin : begin + _NONCE_ROW_BYTES],
                rows[begin + _NONCE_ROW_BYTES : begin + _ROW_BYTES],
            )
            (rank,) = _RANK.unpack_from(row)
            self.check(rank, "nonce", tag, row)
            if self.ranks and rank <= self.ranks[-1]:
                self.refuse(rank)
            received.append(row)
            self.ranks.append(rank)
        if own not in received:
            self.refuse(self._rank)
        self._mac = _mac(world.key, b"parts", subject + b"".join(received))

    def tag(self, sender: int, part: str, *data: bytes | memoryview) -> bytes:
        """The MAC of a part's bytes; ``part`` identifies it among the others of this call."""
        mac = self._mac.copy()
        mac.update(_RANK.pack(sender) + struct.pack("<I", len(part)) + part.encode())
        for item in data:
            mac.update(item)
        return mac.digest()

    def check(self, sender: int, part: str, tag: bytes, *data: bytes | memoryview) -> None:
        """Return if the MAC is right, and else end the job: see :meth:`refuse`."""
        if not hmac.compare_digest(self.tag(sender, part, *data), tag):
            self.refuse(sender)

    def sealed(self, part: str, words: bytes) -> Bytes:
        """The message to send for a few words of this rank: the words and their MAC."""
        return np.frombuffer(words + self.tag(self._rank, part, words), np.uint8)

    def opened(self, sender: int, part: str, data: Bytes) -> bytes:
        """The words that a rank has sealed."""
        words, tag = data[:-TAG_BYTES].tobytes(), data[-TAG_BYTES:].tobytes()
        self.check(sender, part, tag, words)
        return words

    def refuse(self, sender: int) -> None:
        """End the job on all ranks: the connection between them was tampered with.

        Raises:
            PeerLostError: always.
        """
        reason = (
            f"{self._label}: what rank {sender} sent to rank {self._rank} was changed, replayed or lost in "
            "transit: it fails its MAC, and was not unpickled; check the network between them"
        )
        self._world.engine.abort(reason)
        raise PeerLostError(reason)


def _mac(key: bytes, purpose: bytes, begin: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(begin, key=key, digest_size=TAG_BYTES, person=purpose)
