"""Collectives on NumPy arrays.

Example::

    import polyhvd.numpy as hvd
    hvd.init()
    gradient = hvd.allreduce(gradient)          # the average over the ranks
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from polyhvd.numpy.adapter import NumpyAdapter

from polyhvd import (
    Average,
    ProcessSet,
    allgather_object,
    barrier,
    broadcast_object,
    exports,
    global_process_set,
    join,
)
from polyhvd.adapter import Handle
from polyhvd.api import Collectives, resolve_op
from polyhvd.compression import Compression as _Compression
from polyhvd.compression import Compressor
from polyhvd.exports import *
from polyhvd.state_sync import broadcast_named

Array = np.ndarray[Any, Any]

_adapter = NumpyAdapter()
_collectives: Collectives[Array] = Collectives(_adapter)
Compression = _Compression(_adapter)

poll = _collectives.poll
synchronize = _collectives.synchronize


def _checked(tensor: Array) -> Array:
    if not isinstance(tensor, np.ndarray):
        raise TypeError(f"expected a numpy array, found {type(tensor).__name__}; use np.asarray()")
    return tensor


def allreduce(
    tensor: Array,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Reduce an array over the ranks into a new array; see :meth:`polyhvd.api.Collectives.allreduce`."""
    sent, context = compression.compress(_checked(tensor))
    result = _collectives.allreduce(
        sent,
        name=name,
        op=resolve_op(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )
    restored: Array = compression.decompress(result, context)
    return restored


def allreduce_(
    tensor: Array,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Reduce an array over the ranks in place; see :meth:`polyhvd.api.Collectives.allreduce`."""
    return _collectives.allreduce(
        _checked(tensor),
        name=name,
        op=resolve_op(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        in_place=True,
    )


def allreduce_async(
    tensor: Array,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`allreduce`; ``synchronize(handle)`` returns the new array."""
    return _collectives.allreduce_async(
        _checked(tensor),
        name=name,
        op=resolve_op(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


def allreduce_async_(
    tensor: Array,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`allreduce_`; leave the array alone until ``synchronize(handle)``."""
    return _collectives.allreduce_async(
        _checked(tensor),
        name=name,
        op=resolve_op(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        in_place=True,
    )


def _all_checked(tensors: Sequence[Array]) -> list[Array]:
    return [_checked(tensor) for tensor in tensors]


def grouped_allreduce(
    tensors: Sequence[Array],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """Reduce several arrays as one operation, into new arrays: all or none."""
    packed = [compression.compress(tensor) for tensor in _all_checked(tensors)]
    results = _collectives.grouped_allreduce(
        [sent for sent, _ in packed],
        name=name,
        op=resolve_op(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )
    return [
        compression.decompress(result, context) for result, (_, context) in zip(results, packed, strict=True)
    ]


def grouped_allreduce_(
    tensors: Sequence[Array],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """Reduce several arrays as one operation, in place."""
    return list(
        synchronize(
            grouped_allreduce_async_(
                tensors, average, name, op, prescale_factor, postscale_factor, process_set
            )
        )
    )


def grouped_allreduce_async(
    tensors: Sequence[Array],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`grouped_allreduce`; ``synchronize(handle)`` returns the new arrays."""
    return _collectives.grouped_allreduce_async(
        _all_checked(tensors),
        name=name,
        op=resolve_op(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


def grouped_allreduce_async_(
    tensors: Sequence[Array],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`grouped_allreduce_`; leave the arrays alone until ``synchronize(handle)``."""
    return _collectives.grouped_allreduce_async(
        _all_checked(tensors),
        name=name,
        op=resolve_op(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        in_place=True,
    )


def allgather(tensor: Array, name: str | None = None, process_set: ProcessSet = global_process_set) -> Array:
    """Concatenate the ranks' arrays; see :meth:`polyhvd.api.Collectives.allgather`."""
    return _collectives.allgather(_checked(tensor), name=name, process_set=process_set)


def allgather_async(
    tensor: Array, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start :func:`allgather`."""
    return _collectives.allgather_async(_checked(tensor), name=name, process_set=process_set)


def grouped_allgather(
    tensors: Sequence[Array], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Array]:
    """Gather several arrays as one operation: all or none."""
    return _collectives.grouped_allgather(_all_checked(tensors), name=name, process_set=process_set)


def grouped_allgather_async(
    tensors: Sequence[Array], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start :func:`grouped_allgather`."""
    return _collectives.grouped_allgather_async(_all_checked(tensors), name=name, process_set=process_set)


def alltoall(
    tensor: Array,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Exchange rows with all ranks; see :meth:`polyhvd.api.Collectives.alltoall`."""
    return _collectives.alltoall(_checked(tensor), splits, name=name, process_set=process_set)


def alltoall_async(
    tensor: Array,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`alltoall`."""
    return _collectives.alltoall_async(_checked(tensor), splits, name=name, process_set=process_set)


def reducescatter(
    tensor: Array,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """Reduce an array and keep this rank's rows; see :meth:`polyhvd.api.Collectives.reducescatter`."""
    sent, context = compression.compress(_checked(tensor))
    result = _collectives.reducescatter(
        sent,
        name=name,
        op=resolve_op(op),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )
    restored: Array = compression.decompress(result, context)
    return restored


def reducescatter_async(
    tensor: Array,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start :func:`reducescatter`."""
    return _collectives.reducescatter_async(
        _checked(tensor),
        name=name,
        op=resolve_op(op),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


def grouped_reducescatter(
    tensors: Sequence[Array],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Array]:
    """Reduce several arrays and keep this rank's rows, as one operation: all or none."""
    packed = [compression.compress(tensor) for tensor in _all_checked(tensors)]
    results = _collectives.grouped_reducescatter(
        [sent for sent, _ in packed],
        name=name,
        op=resolve_op(op),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )
    return [
        compression.decompress(result, context) for result, (_, context) in zip(results, packed, strict=True)
    ]


def grouped_reducescatter_async(
    tensors: Sequence[Array],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start :func:`grouped_reducescatter`."""
    return _collectives.grouped_reducescatter_async(
        _all_checked(tensors),
        name=name,
        op=resolve_op(op),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


def broadcast(
    tensor: Array,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Return the root's array as a new array; see :meth:`polyhvd.api.Collectives.broadcast`."""
    return _collectives.broadcast(_checked(tensor), root_rank, name=name, process_set=process_set)


def broadcast_(
    tensor: Array,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Overwrite an array with the root's."""
    return _collectives.broadcast(
        _checked(tensor), root_rank, name=name, process_set=process_set, in_place=True
    )


def broadcast_async(
    tensor: Array,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`broadcast`."""
    return _collectives.broadcast_async(_checked(tensor), root_rank, name=name, process_set=process_set)


def broadcast_async_(
    tensor: Array,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`broadcast_`."""
    return _collectives.broadcast_async(
        _checked(tensor), root_rank, name=name, process_set=process_set, in_place=True
    )


def broadcast_parameters(
    params: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite a dict of arrays, or a list of (name, array) pairs, with the root's."""
    broadcast_named(_collectives, list(_adapter.named_parameters(params)), root_rank, process_set)


__all__ = [
    "Compression",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_parameters",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "synchronize",
]
__all__ += exports.__all__
