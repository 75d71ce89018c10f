"""What polyhvd.keras is made of, with Keras on TensorFlow."""

from __future__ import annotations

from polyhvd.tensorflow.keras import (
    Compression,
    DistributedOptimizer,
    PartialDistributedOptimizer,
    allgather,
    allgather_object,
    allreduce,
    barrier,
    broadcast,
    broadcast_global_variables,
    broadcast_object,
    broadcast_variables,
    join,
    reducescatter,
)
from polyhvd.tensorflow.keras._callbacks import BroadcastGlobalVariables, MetricAverage
from polyhvd.tensorflow.keras.normalization import sync_batch_normalization

__all__ = [
    "BroadcastGlobalVariables",
    "Compression",
    "DistributedOptimizer",
    "MetricAverage",
    "PartialDistributedOptimizer",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "join",
    "reducescatter",
    "sync_batch_normalization",
]
