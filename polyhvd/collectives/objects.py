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
from polyhvd.errors import InvalidArgumentError
from polyhvd.runtime import current
from polyhvd.runtime.world import World

__all__ = ["allgather_object", "broadcast_object"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# From this size on the memory of an array travels by itself, without a copy in a pickle.
_LARGE_BYTES = 1 << 20


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's object on every rank (pickled with cloudpickle).

    The memory of large arrays is sent from where it lies, and received where it will lie: a rank needs
    little more than the object itself.

    Args:
        obj: anything that can be pickled; only the root's matters.
        root_rank: world rank of the sender.
        name: matches the calls of the ranks. Without one the n-th such call of a rank on the process set
            matches the n-th of the others, also where several threads make them.
        process_set: the ranks that take part.

    Raises:
        InvalidArgumentError: the root's object cannot be pickled; on every rank.
        HorovodInternalError: a rank was lost, or the engine was shut down.

    Example::

        epoch = hvd.broadcast_object(epoch, root_rank=0)
    """
    world = process_set.world or current.world()
    set_id = process_set_id(process_set)
    wire = _Broadcast(world, name or "broadcast_object", root_rank, set_id)
    line = world.line("broadcast_object", set_id) if not name else nullcontext()
    if world.placement.rank == root_rank:
        pickled, buffers, error = _pickled(obj)
        with line:
            _send(wire, pickled, buffers, error)
        return obj
    with line:
        pickled, buffers = _receive(wire)
    return pickle.loads(pickled.data, buffers=buffers)


def _send(wire: _Broadcast, pickled: Bytes, buffers: list[Bytes], error: Exception | None) -> None:
    lengths = np.array([len(view) for view in buffers], dtype=np.int64)
    wire.send("size", np.array([_signed(pickled, error), len(buffers)], dtype=np.int64))
    wire.send("data", pickled)
    if error is not None:
        raise _not_sent(wire.label, {wire.root: pickled}) from error
    if buffers:
        wire.send("sizes", lengths)
    for number, view in enumerate(buffers):
        wire.send(f"buffer.{number}", view)


def _receive(wire: _Broadcast) -> tuple[Bytes, list[Bytes]]:
    """What the root sends: a pickle, and the arrays that are not in it."""
    size, count = wire.receive("size", 2, np.int64)
    pickled = wire.receive("data", _length(size), np.uint8)
    if size < 0:
        raise _not_sent(wire.label, {wire.root: pickled})
    lengths = wire.receive("sizes", int(count), np.int64) if count else ()
    return pickled, [wire.receive(f"buffer.{i}", int(length), np.uint8) for i, length in enumerate(lengths)]


class _Broadcast:
    """Arrays of bytes or numbers from the root to the others, one after the other, under a common name."""

    def __init__(self, world: World, label: str, root: int, set_id: int) -> None:
        self._world = world
        self.label = label
        self.root = root
        self._set_id = set_id

    def send(self, part: str, array: np.ndarray[Any, Any]) -> None:
        # By address: the root's memory is only read, and may be read-only.
        self._run(part, _core.TensorRef(array.ctypes.data, array.shape, str(array.dtype), array))

    def receive(self, part: str, length: int, dtype: type[np.generic]) -> np.ndarray[Any, Any]:
        array: np.ndarray[Any, Any] = np.empty(length, dtype=dtype)
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

    Args:
        obj: anything that can be pickled.
        name: matches the calls of the ranks. Without one the n-th such call of a rank on the process set
            matches the n-th of the others, also where several threads make them.
        process_set: the ranks that take part.

    Raises:
        InvalidArgumentError: a rank's object cannot be pickled; on every rank.
        HorovodInternalError: a rank was lost, or the engine was shut down.

    Example::

        losses = hvd.allgather_object({"loss": loss, "host": socket.gethostname()})
    """
    world = process_set.world or current.world()
    label = name or "allgather_object"
    number = process_set_id(process_set)

    def gather(array: np.ndarray[Any, Any], part: str) -> np.ndarray[Any, Any]:
        handle = world.engine.submit(
            OpKind.ALLGATHER, f"{label}.{part}", (array,), None, process_set=number, blocking=True
        )
        handle.wait()
        gathered: np.ndarray[Any, Any] = np.frombuffer(memoryview(handle.buffers()[0]), dtype=array.dtype)
        return gathered

    pickled, _, error = _pickled(obj, keep_together=True)
    rank = world.placement.rank
    with world.line("allgather_object", number) if not name else nullcontext():
        # With its rank: those that have joined send nothing.
        told = gather(np.array([[rank, _signed(pickled, error)]], dtype=np.int64), "size").reshape(-1, 2)
        everything = gather(pickled, "data").data
    ends = np.cumsum([_length(size) for _, size in told])
    parts = [
        everything[int(end) - _length(size) : int(end)] for end, (_, size) in zip(ends, told, strict=True)
    ]
    failed = {int(sender): part for part, (sender, size) in zip(parts, told, strict=True) if size < 0}
    if failed:
        raise _not_sent(label, failed) from error
    return [pickle.loads(part) for part in parts]


def _pickled(obj: Any, *, keep_together: bool = False) -> tuple[Bytes, list[Bytes], Exception | None]:
    """An object's pickle and the large arrays that are not in it; or a text that says why there is none."""
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
    """The length that the others are told: below zero for a text that says what went wrong."""
    return len(pickled) if error is None else -len(pickled)


def _length(signed: Any) -> int:
    return abs(int(signed))


def _not_sent(label: str, failed: dict[int, Any]) -> InvalidArgumentError:
    told = "; ".join(
        f"rank {rank} cannot pickle {bytes(text).decode(errors='replace')}" for rank, text in failed.items()
    )
    return InvalidArgumentError(
        f"{label}: {told}. Send what can be pickled, such as a state_dict or plain values"
    )
