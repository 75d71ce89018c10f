"""Keras, as ``import keras``, with TensorFlow as its backend.

Example::

    import polyhvd.keras as hvd
    hvd.init()
    model.compile(hvd.DistributedOptimizer(optimizer), loss)
    model.fit(data, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
"""

from __future__ import annotations

import keras

_backend = keras.backend.backend()
if _backend != "tensorflow":
    raise ImportError(
        f"polyhvd.keras needs Keras on TensorFlow, and Keras runs on {_backend}: set KERAS_BACKEND=tensorflow"
    )

from polyhvd.keras import callbacks  # noqa: E402
from polyhvd.tensorflow.keras import (  # noqa: E402
    Adasum,
    Average,
    Compression,
    DistributedOptimizer,
    HorovodInternalError,
    InvalidArgumentError,
    Max,
    Min,
    NotInitializedError,
    PartialDistributedOptimizer,
    ProcessSet,
    Product,
    RankMismatchError,
    Sum,
    add_process_set,
    allgather,
    allgather_object,
    allreduce,
    barrier,
    broadcast,
    broadcast_global_variables,
    broadcast_object,
    broadcast_variables,
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
    join,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    reducescatter,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from polyhvd.tensorflow.keras.models import model_loader  # noqa: E402
from polyhvd.tensorflow.keras.normalization import sync_batch_normalization  # noqa: E402

SyncBatchNormalization = sync_batch_normalization(keras)
load_model = model_loader(keras)

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
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "RankMismatchError",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "counters",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
