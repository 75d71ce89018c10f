"""Keras, as ``import keras``, on TensorFlow or on PyTorch.

Example::

    import polyhvd.keras as hvd
    hvd.init()
    model.compile(hvd.DistributedOptimizer(optimizer), loss)
    model.fit(data, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
"""

from __future__ import annotations

from polyhvd.installed import is_installed as _is_installed
from polyhvd.installed import missing as _missing

if not _is_installed("keras"):
    raise _missing(__name__, "Keras 3 (or 2.13 and later, with TensorFlow)", "pip install keras tensorflow")

import keras
from polyhvd.keras import callbacks
from polyhvd.keras.backend import on

from polyhvd import exports
from polyhvd.exports import *
from polyhvd.keras_optimizers import model_loader

Compression = on.Compression
DistributedOptimizer = on.DistributedOptimizer
PartialDistributedOptimizer = on.PartialDistributedOptimizer
allgather = on.allgather
allgather_object = on.allgather_object
allreduce = on.allreduce
barrier = on.barrier
broadcast = on.broadcast
broadcast_global_variables = on.broadcast_global_variables
broadcast_object = on.broadcast_object
broadcast_variables = on.broadcast_variables
join = on.join
reducescatter = on.reducescatter
SyncBatchNormalization = on.sync_batch_normalization(keras)
load_model = model_loader(keras, DistributedOptimizer, Compression.none)

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
    "join",
    "load_model",
    "reducescatter",
]
__all__ += exports.__all__
