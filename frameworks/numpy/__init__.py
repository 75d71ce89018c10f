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

from polyhvd import allgather_object, barrier, broadcast_object, exports, join
from polyhvd.exports import *
from polyhvd.runtime.world import World
from polyhvd.training.arrays import ArrayFunctions


def _checked(tensor: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if not isinstance(tensor, np.ndarray):
        raise TypeError(f"expected a numpy array, found {type(tensor).__name__}; use np.asarray()")
    return tensor


def functions_of(world: World) -> ArrayFunctions[np.ndarray[Any, Any]]:
    """The functions of this module, in a given world instead of the current one; for ``world.numpy``."""
    return ArrayFunctions(NumpyAdapter(), _checked, np.asarray, world)


_functions = ArrayFunctions(NumpyAdapter(), _checked, np.asarray)
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
