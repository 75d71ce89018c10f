"""Python objects from one rank to all, and from all to all, in any framework."""

from __future__ import annotations

import io
import pickle
from contextlib import nullcontext
from typing import Any

import cloudpickle
import numpy as np

from polyhvd import _core
from polyhvd.collectives.adapter import OpKind
from polyhvd.collectives.operation import process_set_id
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.collectives.seals import TAG_BYTES, Bytes, Seals
from polyhvd.errors import InvalidArgumentError
from polyhvd.runtime import current
from polyhvd.runtime.prologue import not_recorded
from polyhvd.runtime.world import World

__all__ = ["allgather_object", "broadcast_object", "gather_objects"]

# From this size on the memory of an array travels by itself, without a copy in a pickle.
_LARGE_BYTES = 1 << 20
_ALL = 0  # the process set of all ranks


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's object on every rank (pickled with cloudpickle).

    The memory of large arrays is sent from where it lies, and received where it will lie: a rank needs
    little more than the object itself. What leaves a host carries a MAC, and nothing is unpickled whose MAC
    is not right.

    Args:
        obj: anything that can be pickled; only the root's matters.
        root_rank: world rank of the sender.
        name: matches the calls of the ranks. Without one the n-th such call of a rank on the process set
            matches the n-th of the others, also where several threads make them.
        process_set: the ranks that take part.

    Raises:
        InvalidArgumentError: the root's object cannot be pickled; on every rank.
        PeerLostError: the root's data was changed on the way; raised on every rank, and no rank can continue.
        HorovodInternalError: a rank was lost, or the engine was shut down.

    Example::

        epoch = hvd.broadcast_object(epoch, root_rank=0)
    """
    world = process_set.world or current.world()
    set_id = process_set_id(process_set)
    if world.engine.behind:
        return _recorded(world, "broadcast_object", name, set_id)[0]
    wire = _Broadcast(world, name or "broadcast_object", root_rank, set_id)
    line = world.line("broadcast_object", set_id) if not name else nullcontext()
    if world.placement.rank == root_rank:
        pickled, buffers, error = _pickled(obj)
        with line:
            wire.open()
            _send(wire, pickled, buffers, error)
            _record(world, "broadcast_object", name, set_id, [pickled, *buffers])
        return obj
    with line:
        wire.open()
        pickled, buffers = _receive(wire)
        _record(world, "broadcast_object", name, set_id, [pickled, *buffers])
    return pickle.loads(pickled.data, buffers=buffers)


def _send(wire: _Broadcast, pickled: Bytes, buffers: list[Bytes], error: Exception | None) -> None:
    wire.send_numbers("size", [_signed(pickled, error), len(buffers)], {"data": pickled})
    wire.send("data", pickled)
    if error is not None:
        raise _not_sent(wire.label, {wire.root: pickled}) from error
    arrays = {f"buffer.{number}": view for number, view in enumerate(buffers)}
    if arrays:
        wire.send_numbers("sizes", [len(view) for view in buffers], arrays)
    for part, view in arrays.items():
        wire.send(part, view)


def _receive(wire: _Broadcast) -> tuple[Bytes, list[Bytes]]:
    """The message of the root: a pickle, and the arrays that are not in it."""
    size, count = wire.receive_numbers("size", 2, ["data"])
    pickled = wire.receive("data", _length(size))
    if size < 0:
        raise _not_sent(wire.label, {wire.root: pickled})
    parts = [f"buffer.{number}" for number in range(count)]
    lengths = wire.receive_numbers("sizes", count, parts) if count else []
    return pickled, [wire.receive(part, length) for part, length in zip(parts, lengths, strict=True)]


class _Broadcast:
    """Arrays of bytes from the root to the others, one after the other, under a common name.

    Between hosts, numbers that are sent ahead carry the MACs of the arrays that follow, and their own MAC. An
    array is only returned if it is the one that the root has sent.
    """

    def __init__(self, world: World, label: str, root: int, set_id: int) -> None:
        self._world = world
        self.label = label
        self.root = root
        self._set_id = set_id
        self._seals: Seals | None = None
        self._tags: dict[str, bytes] = {}  # that the root has sent

    def open(self) -> None:
        """On all ranks, before the first array."""
        self._seals = _seals(self._world, "broadcast_object", self.label, self._set_id)

    def send_numbers(self, part: str, numbers: list[int], following: dict[str, Bytes]) -> None:
        """Numbers of 64 bits, ahead of the arrays that they are about."""
        words = np.array(numbers, dtype=np.int64).tobytes()
        data = np.frombuffer(words, np.uint8)
        if self._seals is not None:
            tags = [self._seals.tag(self.root, name, array.data) for name, array in following.items()]
            data = self._seals.sealed(part, words + b"".join(tags))
        self.send(part, data)

    def receive_numbers(self, part: str, count: int, following: list[str]) -> list[int]:
        size = 8 * count
        if self._seals is None:
            words = self._received(part, size).tobytes()
        else:
            received = self._received(part, size + TAG_BYTES * (len(following) + 1))
            words = self._seals.opened(self.root, part, received)
            tags = (words[begin : begin + TAG_BYTES] for begin in range(size, len(words), TAG_BYTES))
            self._tags = dict(zip(following, tags, strict=True))
        return [int(number) for number in np.frombuffer(words[:size], dtype=np.int64)]

    def send(self, part: str, array: Bytes) -> None:
        # By address: the root's memory is only read, and may be read-only.
        self._run(part, _core.TensorRef(array.ctypes.data, array.shape, str(array.dtype), array))

    def receive(self, part: str, length: int) -> Bytes:
        array = self._received(part, length)
        if self._seals is not None:
            self._seals.check(self.root, part, self._tags[part], array.data)
        return array

    def _received(self, part: str, length: int) -> Bytes:
        array: Bytes = np.empty(length, dtype=np.uint8)
        self._run(part, array)
        return array

    def _run(self, part: str, tensor: Any) -> None:
        self._world.engine.submit(
            OpKind.BROADCAST,
            f"{self.label}.{part}",
            (tensor,),
            (tensor,),
            root=self.root,
            process_set=self._set_id,
            blocking=True,
        ).wait()


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the list of all ranks' objects, in order of rank, on every rank.

    What leaves a host carries a MAC, and nothing is unpickled whose MAC is not right.

    Args:
        obj: anything that can be pickled.
        name: matches the calls of the ranks. Without one the n-th such call of a rank on the process set
            matches the n-th of the others, also where several threads make them.
        process_set: the ranks that take part.

    Raises:
        InvalidArgumentError: a rank's object cannot be pickled; on every rank.
        PeerLostError: a rank's data was changed on the way; raised on every rank, and no rank can continue.
        HorovodInternalError: a rank was lost, or the engine was shut down.

    Example::

        losses = hvd.allgather_object({"loss": loss, "host": socket.gethostname()})
    """
    world = process_set.world or current.world()
    number = process_set_id(process_set)
    if world.engine.behind:
        return _recorded(world, "allgather_object", name, number)
    with world.line("allgather_object", number) if not name else nullcontext():
        pickles = _gathered_pickles(world, number, obj, name or "allgather_object")
        _record(world, "allgather_object", name, number, pickles)
    return [pickle.loads(part.data) for part in pickles]


def gather_objects(world: World, number: int, obj: Any, label: str) -> list[Any]:
    """:func:`allgather_object` in a world, on the process set of that number; ``label`` is the name."""
    return [pickle.loads(part.data) for part in _gathered_pickles(world, number, obj, label)]


def _gathered_pickles(world: World, number: int, obj: Any, label: str) -> list[Bytes]:
    pickled, _, error = _pickled(obj, keep_together=True)
    rank, words = world.placement.rank, _signed(pickled, error).to_bytes(8, "little", signed=True)
    seals = _seals(world, "allgather_object", label, number)
    # With its rank: those that have joined send nothing.
    words = rank.to_bytes(8, "little") + words
    row = np.frombuffer(words, np.uint8)
    if seals is not None:
        row = seals.sealed("size", words + seals.tag(rank, "data", pickled.data))
    rows = _gathered(world, number, f"{label}.size", row).reshape(-1, len(row))
    announced = _announced(rows, seals)
    everything = _gathered(world, number, f"{label}.data", pickled)
    ends = np.cumsum([_length(size) for _, size, _ in announced])
    parts = [
        everything[int(end) - _length(size) : int(end)]
        for end, (_, size, _) in zip(ends, announced, strict=True)
    ]
    if seals is not None:
        for part, (sender, _, tag) in zip(parts, announced, strict=True):
            seals.check(sender, "data", tag, part.data)
    failed = {sender: part for part, (sender, size, _) in zip(parts, announced, strict=True) if size < 0}
    if failed:
        raise _not_sent(label, failed) from error
    return parts


def _record(world: World, call: str, name: str | None, set_id: int, pickles: list[Bytes]) -> None:
    """Keep a result for processes that join an elastic job after this call; see :class:`Prologue`."""
    if world.prologue is not None and set_id == _ALL:
        world.prologue.record(call, name, [item.data for item in pickles])


def _recorded(world: World, call: str, name: str | None, set_id: int) -> list[Any]:
    """The result of a call that the other ranks are past."""
    if world.prologue is None or set_id != _ALL:
        raise not_recorded(call, name, "calls on a process set are not recorded")
    return world.prologue.result(call, name)


def _announced(rows: Bytes, seals: Seals | None) -> list[tuple[int, int, bytes]]:
    """The announcements of all ranks: rank, size of its data, and the MAC."""
    announced = []
    for index, row in enumerate(rows):
        words = row.tobytes() if seals is None else seals.opened(seals.ranks[index], "size", row)
        sender, size = np.frombuffer(words[:16], dtype=np.int64)
        announced.append((int(sender), int(size), words[16:]))
    return announced


def _gathered(world: World, number: int, name: str, array: Bytes) -> Bytes:
    handle = world.engine.submit(OpKind.ALLGATHER, name, (array,), None, process_set=number, blocking=True)
    handle.wait()
    return np.frombuffer(memoryview(handle.buffers()[0]), dtype=np.uint8)


def _seals(world: World, verb: str, label: str, number: int) -> Seals | None:
    """The key that signs a call; None if nothing leaves a host."""
    if not world.spans_hosts(number):
        return None
    return Seals(world, verb, label, number, lambda row: _gathered(world, number, f"{label}.nonce", row))


def _pickled(obj: Any, *, keep_together: bool = False) -> tuple[Bytes, list[Bytes], Exception | None]:
    """An object's pickle and the large arrays that are not in it; or a text with the error."""
    buffers: list[Bytes] = []

    def stays_inside(buffer: pickle.PickleBuffer) -> bool:
        try:
            view = buffer.raw()
        except BufferError:  # not dense
            return True
        if view.nbytes < _LARGE_BYTES:
            return True
        buffers.append(np.frombuffer(view, dtype=np.uint8))
        return False

    file = io.BytesIO()
    try:
        cloudpickle.dump(obj, file, buffer_callback=None if keep_together else stays_inside)
    except Exception as error:
        text = f"a {type(obj).__qualname__}: {type(error).__name__}: {error}".encode(errors="replace")
        return np.frombuffer(text, dtype=np.uint8), [], error
    return np.frombuffer(file.getbuffer(), dtype=np.uint8), buffers, None


def _signed(pickled: Bytes, error: Exception | None) -> int:
    """The length that is sent to the others: below zero for a text with the error."""
    return len(pickled) if error is None else -len(pickled)


def _length(signed: Any) -> int:
    return abs(int(signed))


def _not_sent(label: str, failed: dict[int, Any]) -> InvalidArgumentError:
    reasons = "; ".join(
        f"rank {rank} cannot pickle {bytes(text).decode(errors='replace')}" for rank, text in failed.items()
    )
    return InvalidArgumentError(
        f"{label}: {reasons}. Send objects that can be pickled, such as a state_dict or plain values"
    )
