"""Collectives on NumPy arrays.

Example::

    import polyhvd.numpy as hvd
    hvd.init()
    gradient = hvd.allreduce(gradient)          # the average over the ranks
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

    def __getattr__(name: str) -> Any:
        if name == "elastic":  # which few programs need
            return import_module(f"{__name__}.elastic")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
