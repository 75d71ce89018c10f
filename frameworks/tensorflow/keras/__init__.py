"""Keras on TensorFlow, as ``tf.keras``; :mod:`polyhvd.keras` is the same for ``import keras``.

Example::

    import polyhvd.tensorflow.keras as hvd
    hvd.init()
    model.compile(hvd.DistributedOptimizer(optimizer), loss)
    model.fit(data, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
"""

from __future__ import annotations

import tensorflow as tf
from polyhvd.tensorflow import (
    Adasum,
    Average,
    Compression,
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
    process_set_of,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from polyhvd.tensorflow.keras import callbacks
from polyhvd.tensorflow.keras.normalization import sync_batch_normalization
from polyhvd.tensorflow.keras.values import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
    allgather,
    allreduce,
    broadcast,
    reducescatter,
)

from polyhvd.keras_optimizers import model_loader

SyncBatchNormalization = sync_batch_normalization(tf.keras)
load_model = model_loader(tf.keras, DistributedOptimizer, Compression.none)

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
    "process_set_of",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
