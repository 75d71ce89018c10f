"""Collectives on CuPy arrays: on the GPU, in order with the current stream.

Example::

    import polyhvd.cupy as hvd
    hvd.init()
    cupy.cuda.Device(hvd.local_rank()).use()
    gradient = hvd.allreduce(gradient)          # the average over the ranks
"""

from __future__ import annotations

from polyhvd.installed import require as _require

_require(__name__)

from polyhvd.cupy import verbs
from polyhvd.cupy.functions import Compression
from polyhvd.cupy.state import broadcast_parameters
from polyhvd.cupy.verbs import *

from polyhvd import allgather_object, barrier, broadcast_object, exports, join
from polyhvd.exports import *

__all__ = [
    "Compression",
    "allgather_object",
    "barrier",
    "broadcast_object",
    "broadcast_parameters",
    "join",
]
__all__ += exports.__all__
__all__ += verbs.__all__


def __dir__() -> list[str]:
    return __all__
