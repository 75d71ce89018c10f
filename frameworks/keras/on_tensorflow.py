"""The parts of polyhvd.keras with Keras on TensorFlow."""

from __future__ import annotations

from polyhvd.tensorflow.adapter import memory_of
from polyhvd.tensorflow.batch_norm import sync_batch_normalization
from polyhvd.tensorflow.data import Batches
from polyhvd.tensorflow.errors import as_polyhvd
from polyhvd.tensorflow.gradients import TensorflowOptions as Options
from polyhvd.tensorflow.keras import (
    Compression,
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
from polyhvd.tensorflow.optimizer import distribute

__all__ = [
    "Batches",
    "BroadcastGlobalVariables",
    "Compression",
    "MetricAverage",
    "Options",
    "allgather",
    "allgather_object",
    "allreduce",
    "as_polyhvd",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "distribute",
    "join",
    "memory_of",
    "reducescatter",
    "sync_batch_normalization",
]
