"""Data-parallel training with PyTorch.

Example::

    import polyhvd.torch as hvd
    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyhvd.installed import lazily as _lazily
from polyhvd.installed import require as _require

_require(__name__)

from polyhvd.torch import library as _library  # noqa: F401 - registers the operators of graphs
from polyhvd.torch import verbs
from polyhvd.torch.batch_norm import SyncBatchNorm, convert_sync_batchnorm
from polyhvd.torch.functions import Compression
from polyhvd.torch.sparse import sparse_allreduce_async
from polyhvd.torch.state import broadcast_optimizer_state, broadcast_parameters
from polyhvd.torch.verbs import *
from polyhvd.torch.wrappers import DistributedOptimizer

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
    __getattr__ = _lazily(__name__, elastic="")


def __dir__() -> list[str]:
    return __all__
