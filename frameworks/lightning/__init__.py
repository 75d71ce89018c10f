"""Lightning's Trainer and Fabric on the ranks of polyhvdrun, with PyTorch.

Example::

    import lightning
    import polyhvd.lightning
    trainer = lightning.Trainer(strategy="polyhvd")
"""

from __future__ import annotations

from polyhvd.installed import require as _require

_require(__name__)

from polyhvd.lightning import elastic
from polyhvd.lightning.callbacks import LogMetricsCallback
from polyhvd.lightning.environment import PolyhvdEnvironment
from polyhvd.lightning.fabric import FabricStrategy
from polyhvd.lightning.strategy import PolyhvdStrategy, register
from polyhvd.torch import Compression, allgather, allreduce, broadcast

from polyhvd import allgather_object, barrier, broadcast_object, exports
from polyhvd.exports import *

register()

__all__ = [
    "Compression",
    "FabricStrategy",
    "LogMetricsCallback",
    "PolyhvdEnvironment",
    "PolyhvdStrategy",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_object",
    "elastic",
]
__all__ += exports.__all__


def __dir__() -> list[str]:
    return __all__
