"""Keras on TensorFlow, as ``tf.keras``; :mod:`polyhvd.keras` is the same for ``import keras``.

Example::

    import polyhvd.tensorflow.keras as hvd
    hvd.init()
    model.compile(hvd.DistributedOptimizer(optimizer), loss)
    model.fit(data, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import tensorflow as tf
from polyhvd.tensorflow import (
    Compression,
    allgather_object,
    barrier,
    broadcast_global_variables,
    broadcast_object,
    broadcast_variables,
    join,
)
from polyhvd.tensorflow.batch_norm import sync_batch_normalization
from polyhvd.tensorflow.keras import callbacks
from polyhvd.tensorflow.keras.values import allgather, allreduce, broadcast, reducescatter
from polyhvd.tensorflow.keras.wrappers import DistributedOptimizer, PartialDistributedOptimizer

from polyhvd import exports
from polyhvd.exports import *
from polyhvd.installed import lazily as _lazily
from polyhvd.training.keras.optimizers import model_loader

if TYPE_CHECKING:
    from polyhvd.tensorflow.keras import elastic

SyncBatchNormalization = sync_batch_normalization(tf.keras)
load_model = model_loader(tf.keras, DistributedOptimizer, Compression.none)

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "SyncBatchNormalization",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "join",
    "load_model",
    "reducescatter",
]
__all__ += exports.__all__

if not TYPE_CHECKING:  # a type checker would accept any name
    __getattr__ = _lazily(__name__, elastic="")


def __dir__() -> list[str]:
    return __all__
