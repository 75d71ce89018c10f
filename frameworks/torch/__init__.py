"""Data-parallel training with PyTorch.

Example::

    import polyhvd.torch as hvd
    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

from polyhvd.installed import is_installed as _is_installed
from polyhvd.installed import missing as _missing

if not _is_installed("torch"):
    raise _missing(__name__, "PyTorch 2.1 to 2.13", "pip install torch")

from polyhvd.torch import library as _library  # noqa: F401 - registers the operators of graphs
from polyhvd.torch import verbs
from polyhvd.torch.batch_norm import SyncBatchNorm, convert_sync_batchnorm
from polyhvd.torch.functions import Compression
from polyhvd.torch.optimizer import DistributedOptimizer
from polyhvd.torch.sparse import sparse_allreduce_async
from polyhvd.torch.state import broadcast_optimizer_state, broadcast_parameters
from polyhvd.torch.verbs import *

from polyhvd import allgather_object, barrier, broadcast_object, exports
from polyhvd.exports import *

if TYPE_CHECKING:
    from polyhvd.torch import elastic

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "SyncBatchNorm",
    "allgather_object",
    "barrier",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "convert_sync_batchnorm",
    "elastic",
    "sparse_allreduce_async",
]
__all__ += exports.__all__
__all__ += verbs.__all__

if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> _Any:
        if name == "elastic":  # which few programs need
            return _import_module(f"{__name__}.elastic")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
