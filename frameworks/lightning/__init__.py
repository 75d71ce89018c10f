"""Lightning's Trainer on the ranks of polyhvdrun, with PyTorch.

Example::

    import lightning
    import polyhvd.lightning
    trainer = lightning.Trainer(strategy="polyhvd")
"""

from __future__ import annotations

from polyhvd.installed import is_installed as _is_installed
from polyhvd.installed import missing as _missing

if not (_is_installed("lightning") or _is_installed("pytorch_lightning")):
    raise _missing(__name__, "Lightning 2", "pip install lightning")

from polyhvd.lightning import elastic
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
    "elastic",
]
__all__ += exports.__all__


def __dir__() -> list[str]:
    return __all__
