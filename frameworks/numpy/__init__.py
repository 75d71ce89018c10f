"""Collectives on NumPy arrays.

Example::

    import polyhvd.numpy as hvd
    hvd.init()
    gradient = hvd.allreduce(gradient)          # the average over the ranks
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyhvd.installed import lazily as _lazily
from polyhvd.installed import require as _require

_require(__name__)

from polyhvd.numpy import verbs
from polyhvd.numpy.functions import Compression
from polyhvd.numpy.state import broadcast_parameters
from polyhvd.numpy.verbs import *

from polyhvd import allgather_object, barrier, broadcast_object, exports, join
from polyhvd.exports import *

if TYPE_CHECKING:
    from polyhvd.numpy import elastic

__all__ = [
    "Compression",
    "allgather_object",
    "barrier",
    "broadcast_object",
    "broadcast_parameters",
    "elastic",
    "join",
]
__all__ += exports.__all__
__all__ += verbs.__all__

if not TYPE_CHECKING:  # a type checker would accept any name
    __getattr__ = _lazily(__name__, elastic="")


def __dir__() -> list[str]:
    return __all__
