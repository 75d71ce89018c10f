"""Keras, as ``import keras``, on TensorFlow or on PyTorch.

Example::

    import polyhvd.keras as hvd
    hvd.init()
    model.compile(hvd.DistributedOptimizer(optimizer), loss)
    model.fit(data, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

from polyhvd.installed import is_installed as _is_installed
from polyhvd.installed import missing as _missing

if not _is_installed("keras"):
    raise _missing(__name__, "Keras 3 (or 2.13 and later, with TensorFlow)", "pip install keras tensorflow")

import keras
from polyhvd.keras import callbacks
from polyhvd.keras.backend import on

from polyhvd import exports
from polyhvd.exports import *
from polyhvd.training.compression import Compressor as _Compressor
from polyhvd.training.keras.optimizers import model_loader

if TYPE_CHECKING:
    from polyhvd.keras import elastic

Compression = on.Compression
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


def DistributedOptimizer(
    optimizer: _Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: _Compressor = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    num_groups: int = 0,
    groups: _Any = None,
    *,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    mapping: _Any = None,
) -> _Any:
    """Wrap an optimizer of Keras so that it applies gradients reduced over the ranks.

    Args:
        optimizer: of Keras. The result shares its state.
        name: begins the names of the operations; the default is the optimizer's class.
        device_dense, device_sparse: accepted for Horovod's sake; collectives run on the host.
        compression: of the gradients on the wire: ``Compression.none``, ``.fp16``, ``.bf16``, one of your
            own, or a :class:`polyhvd.training.compression.KeyedCompressor`.
        sparse_as_dense: reduce sparse gradients (of embeddings) as dense ones.
        gradient_predivide_factor: splits the division of an average around the sum.
        op: Average, Sum or Adasum.
        num_groups, groups: into how many operations gradients are split, or a list of lists of variables.
        backward_passes_per_step: how many calls make a step; the gradients of all of them are added up.
        average_aggregated_gradients: divide their sum by that number.
        process_set: the ranks that take part. On others, the optimizer works by itself.
        scale_local_gradients: divide gradients of ``register_local_var()`` by the number of ranks.
        mapping: of the model, by :func:`polyhvd.parity.mapping`, where ranks have different frameworks.

    Raises:
        InvalidArgumentError: an argument that cannot be used.

    Example::

        model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size())), loss)
    """
    return on.DistributedOptimizer(**locals())


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

    def __getattr__(name: str) -> _Any:
        if name == "elastic":  # which few programs need
            return _import_module(f"{__name__}.elastic")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
