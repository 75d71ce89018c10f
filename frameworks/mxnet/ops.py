"""The collectives on MXNet arrays, with Horovod's signatures."""

from __future__ import annotations

from collections.abc import Sequence

from mxnet.ndarray import NDArray
from polyhvd.mxnet.adapter import Handle, MxnetAdapter

from polyhvd import context
from polyhvd.adapter import OpKind
from polyhvd.api import Collectives, process_set_id, resolve_op
from polyhvd.compression import Compression as _Compression
from polyhvd.errors import InvalidArgumentError
from polyhvd.process_sets import ProcessSet, global_process_set

__all__ = [
    "Compression",
    "adapter",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "collectives",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "poll",
    "synchronize",
]

adapter = MxnetAdapter()
collectives: Collectives[NDArray] = Collectives(adapter)
Compression = _Compression(adapter)

poll = collectives.poll
synchronize = collectives.synchronize


def _name(kind: OpKind, name: str | None, process_set: ProcessSet, root_rank: int | None = None) -> str:
    """The operation's name, after the checks that MXNet's engine would otherwise make later."""
    context.engine()
    number = process_set_id(process_set)
    about = f"{kind.name.lower()} '{name or 'without a name'}'"
    if process_set is not global_process_set and not process_set.included():
        raise InvalidArgumentError(
            f"{about}: rank {context.config().rank} is not in {process_set}; call it on its members only"
        )
    ranks = process_set.ranks
    if root_rank is not None and not (
        0 <= root_rank < context.config().size and (ranks is None or root_rank in ranks)
    ):
        raise InvalidArgumentError(f"{about}: root rank {root_rank} is not in {process_set}")
    return adapter.names.next(kind, number) if name is None else name


def allreduce_async(
    tensor: NDArray,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Handle:
    """Start :func:`allreduce`; ``synchronize(handle)`` returns the new array, or raises."""
    return collectives.allreduce_async(
        tensor,
        name=_name(OpKind.ALLREDUCE, name, process_set),
        op=resolve_op(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        priority=priority,
    )


def allreduce_async_(
    tensor: NDArray,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Handle:
    """Start :func:`allreduce_`; ``synchronize(handle)`` returns the array, or raises."""
    return collectives.allreduce_async(
        tensor,
        name=_name(OpKind.ALLREDUCE, name, process_set),
        op=resolve_op(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        priority=priority,
        in_place=True,
    )


def allreduce(
    tensor: NDArray,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> NDArray:
    """Reduce an array over the ranks into a new array; see :meth:`polyhvd.api.Collectives.allreduce`.

    Returns at once; reads of the result wait. ``priority``: higher ones go first.
    """
    handle = allreduce_async(
        tensor, average, name, priority, prescale_factor, postscale_factor, process_set, op
    )
    return handle.result[0]


def allreduce_(
    tensor: NDArray,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> NDArray:
    """Reduce an array over the ranks in place, and return it; see :func:`allreduce`."""
    handle = allreduce_async_(
        tensor, average, name, priority, prescale_factor, postscale_factor, process_set, op
    )
    return handle.result[0]


def grouped_allreduce_async(
    tensors: Sequence[NDArray],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Handle:
    """Start :func:`grouped_allreduce`; ``synchronize(handle)`` returns the list of results."""
    return collectives.grouped_allreduce_async(
        list(tensors),
        name=_name(OpKind.ALLREDUCE, name, process_set),
        op=resolve_op(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        priority=priority,
    )


def grouped_allreduce_async_(
    tensors: Sequence[NDArray],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Handle:
    """Start :func:`grouped_allreduce_`; ``synchronize(handle)`` returns the list of arrays."""
    return collectives.grouped_allreduce_async(
        list(tensors),
        name=_name(OpKind.ALLREDUCE, name, process_set),
        op=resolve_op(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        priority=priority,
        in_place=True,
    )


def grouped_allreduce(
    tensors: Sequence[NDArray],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> list[NDArray]:
    """Reduce several arrays of one dtype as one operation, all or none; see :func:`allreduce`."""
    handle = grouped_allreduce_async(
        tensors, average, name, priority, prescale_factor, postscale_factor, process_set, op
    )
    results: list[NDArray] = handle.result
    return results


def grouped_allreduce_(
    tensors: Sequence[NDArray],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> list[NDArray]:
    """Reduce several arrays of one dtype in place as one operation; see :func:`allreduce`."""
    handle = grouped_allreduce_async_(
        tensors, average, name, priority, prescale_factor, postscale_factor, process_set, op
    )
    results: list[NDArray] = handle.result
    return results


def allgather_async(
    tensor: NDArray,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`allgather`; ``synchronize(handle)`` returns the new array, or raises."""
    return collectives.allgather_async(
        tensor,
        name=_name(OpKind.ALLGATHER, name, process_set),
        process_set=process_set,
        priority=priority,
    )


def allgather(
    tensor: NDArray,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray:
    """Concatenate the ranks' arrays along the first dimension, in order of rank, into a new array.

    First dimensions may differ: the call waits until all ranks have told theirs, not for the data.
    """
    return allgather_async(tensor, name, priority, process_set).result[0]


def broadcast_async(
    tensor: NDArray,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`broadcast`; ``synchronize(handle)`` returns the array, or raises."""
    return collectives.broadcast_async(
        tensor,
        root_rank,
        name=_name(OpKind.BROADCAST, name, process_set, root_rank),
        process_set=process_set,
        priority=priority,
    )


def broadcast_async_(
    tensor: NDArray,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`broadcast_`; ``synchronize(handle)`` returns the array, or raises."""
    return collectives.broadcast_async(
        tensor,
        root_rank,
        name=_name(OpKind.BROADCAST, name, process_set, root_rank),
        process_set=process_set,
        priority=priority,
        in_place=True,
    )


def broadcast(
    tensor: NDArray,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray:
    """Return the root's array as a new array on every rank; reads of it wait."""
    return broadcast_async(tensor, root_rank, name, priority, process_set).result[0]


def broadcast_(
    tensor: NDArray,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> NDArray:
    """Overwrite an array with the root's, and return it; see :func:`broadcast`."""
    return broadcast_async_(tensor, root_rank, name, priority, process_set).result[0]
