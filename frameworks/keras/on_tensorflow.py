"""What polyhvd.keras is made of, with Keras on TensorFlow."""

from __future__ import annotations

from polyhvd.tensorflow.adapter import memory_of
from polyhvd.tensorflow.batch_norm import sync_batch_normalization
from polyhvd.tensorflow.errors import as_polyhvd
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

__all__ = [
    "BroadcastGlobalVariables",
    "Compression",
    "DistributedOptimizer",
    "MetricAverage",
    "PartialDistributedOptimizer",
    "allgather",
    "allgather_object",
    "allreduce",
    "as_polyhvd",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "join",
    "memory_of",
    "reducescatter",
    "sync_batch_normalization",
]
