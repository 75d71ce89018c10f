"""Lightning's Trainer on the ranks of polyhvdrun, with PyTorch.

Example::

    import lightning
    import polyhvd.lightning
    trainer = lightning.Trainer(strategy="polyhvd")
"""

from __future__ import annotations

from polyhvd.lightning.environment import PolyhvdEnvironment
from polyhvd.lightning.strategy import PolyhvdStrategy, register
from polyhvd.torch import Compression, allgather, allreduce, broadcast

from polyhvd import allgather_object, barrier, broadcast_object, exports
from polyhvd.exports import *

register()

__all__ = [
    "Compression",
    "PolyhvdEnvironment",
    "PolyhvdStrategy",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_object",
]
__all__ += exports.__all__
