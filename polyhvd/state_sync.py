"""Python objects and named tensors from one rank to all, in any framework."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import cloudpickle  # type: ignore[import-untyped]
import numpy as np

from polyhvd import context
from polyhvd.adapter import OpKind
from polyhvd.api import Collectives, process_set_id
from polyhvd.process_sets import ProcessSet, global_process_set

__all__ = ["allgather_object", "broadcast_named", "broadcast_object", "put_tensors", "take_tensors"]

T = TypeVar("T")


def _world_rank() -> int:
    return context.config().rank


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's object on every rank (pickled with cloudpickle).

    Args:
        obj: anything that can be pickled; only the root's matters.
        root_rank: world rank of the sender.
        name: matches the calls of the ranks.
        process_set: the ranks that take part.

    Example::

        epoch = hvd.broadcast_object(epoch, root_rank=0)
    """
    engine = context.engine()
    label = name or "broadcast_object"
    number = process_set_id(process_set)
    is_root = _world_rank() == root_rank
    payload = np.frombuffer(cloudpickle.dumps(obj), dtype=np.uint8) if is_root else None
    size = np.array([0 if payload is None else payload.size], dtype=np.int64)
    engine.submit(
        OpKind.BROADCAST, f"{label}.size", (size,), (size,), root=root_rank, process_set=number, blocking=True
    ).wait()
    data = np.empty(int(size[0]), dtype=np.uint8) if payload is None else payload.copy()
    engine.submit(
        OpKind.BROADCAST, f"{label}.data", (data,), (data,), root=root_rank, process_set=number, blocking=True
    ).wait()
    return obj if is_root else cloudpickle.load(io.BytesIO(data.tobytes()))


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the list of all ranks' objects, in order of rank, on every rank.

    Args:
        obj: anything that can be pickled.
        name: matches the calls of the ranks.
        process_set: the ranks that take part.
    """
    engine = context.engine()
    label = name or "allgather_object"
    number = process_set_id(process_set)

    def gather(array: np.ndarray[Any, Any], part: str) -> np.ndarray[Any, Any]:
        handle = engine.submit(
            OpKind.ALLGATHER, f"{label}.{part}", (array,), None, process_set=number, blocking=True
        )
        handle.wait()
        gathered: np.ndarray[Any, Any] = np.frombuffer(memoryview(handle.buffers()[0]), dtype=array.dtype)
        return gathered

    data = np.frombuffer(cloudpickle.dumps(obj), dtype=np.uint8)
    sizes = gather(np.array([data.size], dtype=np.int64), "size")
    ends = np.cumsum(sizes)
    everything = gather(data, "data")
    return [
        cloudpickle.loads(everything[end - size : end].tobytes())
        for end, size in zip(ends, sizes, strict=True)
    ]


def broadcast_named(
    collectives: Collectives[T],
    named: list[tuple[str, T]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    prefix: str = "parameter",
) -> None:
    """Overwrite tensors with the root's, in place; names are the same on every rank.

    When one fails, the others are waited for all the same, and the first error is raised.
    """
    handles = [
        collectives.broadcast_async(
            tensor, root_rank, name=f"{prefix}.{name}", process_set=process_set, in_place=True
        )
        for name, tensor in named
    ]
    first_error: Exception | None = None
    for handle in handles:
        try:
            collectives.synchronize(handle)
        except Exception as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error


class _Place:
    """Stands for a tensor in a state that is sent without them."""

    def __init__(self, number: int) -> None:
        self.number = number


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of nested dicts, lists and tuples in which ``change`` was applied to what they hold."""
    if type(value) is dict:
        return {key: _changed(item, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_changed(item, change) for item in value)
    return change(value)


def take_tensors(state: Any, is_tensor: Callable[[Any], bool]) -> tuple[Any, list[Any]]:
    """A copy of a state of nested dicts, lists and tuples without its tensors, and these in order."""
    tensors: list[Any] = []

    def take(value: Any) -> Any:
        if not is_tensor(value):
            return value
        tensors.append(value)
        return _Place(len(tensors) - 1)

    return _changed(state, take), tensors


def put_tensors(state: Any, tensors: Sequence[Any]) -> Any:
    """The state that :func:`take_tensors` has taken apart, with these tensors in their places."""
    return _changed(state, lambda value: tensors[value.number] if isinstance(value, _Place) else value)
