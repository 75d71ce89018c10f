"""Collectives for TensorFlow 2.13 and later, eager and in ``tf.function``.

Example::

    import polyhvd.tensorflow as hvd
    hvd.init()
    hvd.broadcast_variables(model.variables, root_rank=0)
    with tf.GradientTape() as tape:
        loss = compute(model, batch)
    gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
"""

from __future__ import annotations

from typing import Any

from polyhvd.tensorflow import derivatives as _derivatives  # noqa: F401
from polyhvd.tensorflow.compression import Compression
from polyhvd.tensorflow.functions import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    reducescatter,
)
from polyhvd.tensorflow.gradient_tape import DistributedGradientTape, PartialDistributedGradientTape
from polyhvd.tensorflow.handles import (
    allgather_async,
    allreduce_async,
    alltoall_async,
    broadcast_async,
    grouped_allgather_async,
    grouped_allreduce_async,
    grouped_reducescatter_async,
    poll,
    reducescatter_async,
    synchronize,
)
from polyhvd.tensorflow.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from polyhvd.tensorflow.runtime_ops import (
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from polyhvd.tensorflow.state import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)

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
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "InvalidArgumentError",
    "Max",
    "Min",
    "NotInitializedError",
    "PartialDistributedGradientTape",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "RankMismatchError",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "counters",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]


def __getattr__(name: str) -> Any:
    """Keras takes seconds to import: only who asks for its layer waits."""
    if name == "SyncBatchNormalization":
        from polyhvd.tensorflow.keras import SyncBatchNormalization

        return SyncBatchNormalization
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
