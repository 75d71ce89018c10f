"""Values that differ by rank, each with a copy on the next rank, so that they outlive their rank.

They are sent in the background, as bytes without pickles. The replacement of a lost rank receives its values.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from polyhvd.collectives.adapter import OpKind
from polyhvd.collectives.objects import allgather_object, broadcast_object
from polyhvd.elastic import process
from polyhvd.elastic.checkpoint import pack, unpack
from polyhvd.runtime import current

__all__ = ["LocalParts", "Part", "random_states"]

#: How a part is read, and how it is put back.
Part = tuple[Callable[[], Any], Callable[[Any], None]]

_LENGTH = struct.Struct("<q")
_PADDED_TO = 1024  # sizes that stay the same are agreed on faster


def random_states() -> dict[str, Part]:
    """The global random number generators of Python and NumPy."""

    def of_python() -> Any:
        version, words, gauss = random.getstate()
        return version, np.array(words, np.uint64), gauss

    def to_python(value: Any) -> None:
        version, words, gauss = value
        random.setstate((version, tuple(words.tolist()), gauss))

    return {"python": (of_python, to_python), "numpy": (np.random.get_state, np.random.set_state)}


def encoded(value: Any) -> bytes:
    """A value as :func:`pack` takes it, as bytes."""
    tree, arrays = pack(value, "local part")
    shapes = [(array.dtype.str, array.shape) for array in arrays]
    head = json.dumps([tree, shapes]).encode()
    return b"".join([_LENGTH.pack(len(head)), head, *(array.tobytes() for array in arrays)])


def decoded(data: bytes) -> Any:
    """The value that :func:`encoded` was given; bytes after it are ignored."""
    (length,) = _LENGTH.unpack_from(data)
    begin = _LENGTH.size + length
    tree, shapes = json.loads(data[_LENGTH.size : begin])
    arrays = []
    for text, shape in shapes:
        dtype = np.dtype(text)
        count = int(np.prod(shape, dtype=np.int64))
        arrays.append(np.frombuffer(data, dtype, count, begin).reshape(shape).copy())
        begin += count * dtype.itemsize
    return unpack(tree, arrays.__getitem__)


class LocalParts:
    """The parts of this rank as of the last commit, and those of the rank before it.

    Args:
        parts: by name; more may come until the first commit.
    """

    def __init__(self, parts: dict[str, Part]) -> None:
        self._parts = parts
        self._own: bytes | None = None  # as of the last commit
        self._held: dict[int, tuple[int, bytes]] = {}  # of other members, with the ranks that they had
        self._handle: Any = None  # of the exchange in progress

    def keep(self) -> None:
        """Keep a copy here, and send one to the next rank while the program continues.

        Raises:
            HorovodInternalError: a rank was lost or has shut down.
            CheckpointError: a part has a type that cannot be encoded.
        """
        self._own = self._encoded()
        self._send(self._own)

    def hand_over(self) -> None:
        """Send the present values to the next rank, before all leave the world; raises as :meth:`keep`."""
        self._send(self._encoded())
        self.finish()

    def _encoded(self) -> bytes:
        return encoded({name: get() for name, (get, _) in self._parts.items()})

    def _send(self, own: bytes) -> None:
        world, member = current.world(), process.find()
        rank, size = world.placement.rank, world.placement.size
        if member is None or size == 1:
            return
        self.finish()
        message = _LENGTH.pack(member.launcher.member) + _LENGTH.pack(rank) + own
        message += bytes(-len(message) % _PADDED_TO)
        splits = [len(message) if other == (rank + 1) % size else 0 for other in range(size)]
        array = np.frombuffer(message, np.uint8)
        name = "elastic.train.local"
        self._handle = world.engine.submit(OpKind.ALLTOALL, name, (array,), None, numbers=splits)

    def finish(self) -> None:
        """Wait for the exchange in progress, if there is one; raises HorovodInternalError."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        handle.wait()
        data = bytes(memoryview(handle.buffers()[0]))
        member, rank = (_LENGTH.unpack_from(data, place)[0] for place in (0, _LENGTH.size))
        lost = {number: held for number, held in self._held.items() if number not in _members()}
        self._held = {**lost, member: (rank, data[2 * _LENGTH.size :])}

    def restore(self) -> None:
        """Put the parts back as of the last commit."""
        if self._own is not None:
            for name, value in decoded(self._own).items():
                if name in self._parts:
                    self._parts[name][1](value)

    def abandon(self) -> None:
        """The world has ended: keep an exchange that has completed, and drop any other."""
        handle, self._handle = self._handle, None
        try:
            if handle is not None and handle.done():
                self._handle = handle
                self.finish()
        except Exception:  # it has failed with the world
            self._handle = None

    def settle(self) -> None:
        """In the next world, send the parts of lost ranks to new ranks. Every rank calls it.

        Raises:
            HorovodInternalError: a rank was lost or has shut down.
        """
        self._handle = None  # of a world that has ended
        if process.find() is None:
            return
        held = {number: rank for number, (rank, _) in self._held.items()}
        gathered = allgather_object((self._own is None, held), name="elastic.train.parts")
        present = _members()
        lost = {
            number: (old, holder)
            for holder, (_, others) in enumerate(gathered)
            for number, old in others.items()
            if number not in present
        }
        new_ranks = [rank for rank, (is_new, _) in enumerate(gathered) if is_new]
        rank = current.world().placement.rank
        for (number, (_, holder)), new_rank in zip(
            sorted(lost.items(), key=lambda item: item[1]), new_ranks, strict=False
        ):
            part = self._held[number][1] if rank == holder else None
            part = broadcast_object(part, holder, name="elastic.train.part")
            self._held.pop(number, None)
            if rank == new_rank:
                self._own = part
                self.restore()
        self._own = self._encoded()  # a rank that stays keeps its own, at a commit or not
        self._send(self._own)


def _members() -> list[int]:
    member = process.find()
    return [] if member is None else member.launcher.reply.members
