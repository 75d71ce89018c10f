"""Keras, as ``import keras``, on TensorFlow or on PyTorch.

Example::

    import polyhvd.keras as hvd
    hvd.init()
    model.compile(hvd.DistributedOptimizer(optimizer), loss)
    model.fit(data, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyhvd.installed import lazily as _lazily
from polyhvd.installed import require as _require

_require(__name__)

import keras
from polyhvd.keras import callbacks
from polyhvd.keras.backend import on
from polyhvd.keras.wrappers import DistributedOptimizer, PartialDistributedOptimizer

from polyhvd import exports
from polyhvd.exports import *
from polyhvd.training.keras.optimizers import model_loader

if TYPE_CHECKING:
    from polyhvd.keras import elastic

Compression = on.Compression
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
