"""Collectives on NumPy arrays.

Example::

    import polyhvd.numpy as hvd
    hvd.init()
    gradient = hvd.allreduce(gradient)          # the average over the ranks
"""

from __future__ import annotations

from typing import Any

import numpy as np
from polyhvd.numpy.adapter import NumpyAdapter

from polyhvd import (
    Average,
    HorovodInternalError,
    InvalidArgumentError,
    Max,
    Min,
    NotInitializedError,
    ProcessSet,
    Product,
    RankMismatchError,
    Sum,
    allgather_object,
    barrier,
    broadcast_object,
    counters,
    cross_rank,
    cross_size,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from polyhvd.adapter import Handle
from polyhvd.api import Collectives, resolve_op
from polyhvd.compression import Compression as _Compression
from polyhvd.compression import Compressor
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


def allgather(tensor: Array, name: str | None = None, process_set: ProcessSet = global_process_set) -> Array:
    """Concatenate the ranks' arrays; see :meth:`polyhvd.api.Collectives.allgather`."""
    return _collectives.allgather(_checked(tensor), name=name, process_set=process_set)


def allgather_async(
    tensor: Array, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start :func:`allgather`."""
    return _collectives.allgather_async(_checked(tensor), name=name, process_set=process_set)


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
    "Average",
    "Compression",
    "HorovodInternalError",
    "InvalidArgumentError",
    "Max",
    "Min",
    "NotInitializedError",
    "ProcessSet",
    "Product",
    "RankMismatchError",
    "Sum",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_parameters",
    "counters",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
