"""Collectives on MXNet arrays, ordered by MXNet's engine.

Every call returns at once; reads of the results wait for them, as after any operator of MXNet.
What goes wrong later shows at the next read, as MXNetError.

Example::

    import polyhvd.mxnet as hvd
    hvd.init()
    hvd.broadcast_parameters(net.collect_params())
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
"""

from __future__ import annotations

import numpy as _np

# Before the first import of mxnet, which needs what NumPy 1.24 to 1.26 lack.
if "bool" not in vars(_np):
    _np.bool = bool  # type: ignore[attr-defined]

from polyhvd.mxnet import estimator
from polyhvd.mxnet.ops import (
    Compression,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter,
    reducescatter_async,
    synchronize,
)
from polyhvd.mxnet.optimizer import DistributedOptimizer
from polyhvd.mxnet.state import broadcast_optimizer_state, broadcast_parameters
from polyhvd.mxnet.sync_batch_norm import SyncBatchNorm
from polyhvd.mxnet.trainer import DistributedTrainer

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
    ccl_built,
    counters,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
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
    "DistributedTrainer",
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
    "ccl_built",
    "counters",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "estimator",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
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
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
