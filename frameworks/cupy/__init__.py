"""Collectives on CuPy arrays: on the GPU, in order with the current stream.

Example::

    import polyhvd.cupy as hvd
    hvd.init()
    cupy.cuda.Device(hvd.local_rank()).use()
    gradient = hvd.allreduce(gradient)          # the average over the ranks
"""

from __future__ import annotations

from polyhvd.installed import is_installed as _is_installed
from polyhvd.installed import missing as _missing

if not _is_installed("cupy"):
    raise _missing(__name__, "CuPy 13", "pip install cupy-cuda12x")

from typing import Any

import cupy  # type: ignore[import-untyped, import-not-found, unused-ignore]
from polyhvd.cupy.adapter import CupyAdapter

from polyhvd import allgather_object, barrier, broadcast_object, exports, join
from polyhvd.exports import *
from polyhvd.training.arrays import ArrayFunctions


def _checked(tensor: Any) -> Any:
    if not isinstance(tensor, cupy.ndarray):
        raise TypeError(
            f"expected a cupy array, found {type(tensor).__name__}; use cupy.asarray(), or polyhvd.numpy"
        )
    return tensor


_functions = ArrayFunctions(CupyAdapter(), _checked, cupy.asarray)
Compression = _functions.Compression
allgather = _functions.allgather
allgather_async = _functions.allgather_async
allreduce = _functions.allreduce
allreduce_ = _functions.allreduce_
allreduce_async = _functions.allreduce_async
allreduce_async_ = _functions.allreduce_async_
alltoall = _functions.alltoall
alltoall_async = _functions.alltoall_async
broadcast = _functions.broadcast
broadcast_ = _functions.broadcast_
broadcast_async = _functions.broadcast_async
broadcast_async_ = _functions.broadcast_async_
broadcast_parameters = _functions.broadcast_parameters
grouped_allgather = _functions.grouped_allgather
grouped_allgather_async = _functions.grouped_allgather_async
grouped_allreduce = _functions.grouped_allreduce
grouped_allreduce_ = _functions.grouped_allreduce_
grouped_allreduce_async = _functions.grouped_allreduce_async
grouped_allreduce_async_ = _functions.grouped_allreduce_async_
grouped_reducescatter = _functions.grouped_reducescatter
grouped_reducescatter_async = _functions.grouped_reducescatter_async
poll = _functions.poll
reducescatter = _functions.reducescatter
reducescatter_async = _functions.reducescatter_async
synchronize = _functions.synchronize

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
