"""Collectives on NumPy arrays.

Example::

    import polyhvd.numpy as hvd
    hvd.init()
    gradient = hvd.allreduce(gradient)          # the average over the ranks
"""

from __future__ import annotations

from polyhvd.numpy import verbs
from polyhvd.numpy.functions import Compression
from polyhvd.numpy.state import broadcast_parameters
from polyhvd.numpy.verbs import *

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
