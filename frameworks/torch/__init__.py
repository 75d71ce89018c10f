"""Data-parallel training with PyTorch.

Example::

    import polyhvd.torch as hvd
    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
"""

from __future__ import annotations

from polyhvd.torch.base import Compression, poll, synchronize
from polyhvd.torch.exchange import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    join,
)
from polyhvd.torch.ops import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from polyhvd.torch.optimizer import DistributedOptimizer
from polyhvd.torch.sparse import sparse_allreduce_async
from polyhvd.torch.state import broadcast_optimizer_state, broadcast_parameters
from polyhvd.torch.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm

from polyhvd import (
    Adasum,
    Average,
    HorovodInternalError,
    InvalidArgumentError,
    Max,
    Min,
    NotInitializedError,
    ProcessSet,
    Product,
    RankMismatchError,
    Sum,
    add_process_set,
    allgather_object,
    barrier,
    broadcast_object,
    counters,
    cross_rank,
    cross_size,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "InvalidArgumentError",
    "Max",
    "Min",
    "NotInitializedError",
    "ProcessSet",
    "Product",
    "RankMismatchError",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
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
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "convert_sync_batchnorm",
    "counters",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
