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

from polyhvd.installed import lazily as _lazily
from polyhvd.installed import require as _require

_require(__name__)

from typing import TYPE_CHECKING

from polyhvd.tensorflow import derivatives as _derivatives  # noqa: F401
from polyhvd.tensorflow import vectorized as _vectorized  # noqa: F401
from polyhvd.tensorflow import verbs, wrappers
from polyhvd.tensorflow.compression import Compression
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
from polyhvd.tensorflow.verbs import *
from polyhvd.tensorflow.wrappers import *

from polyhvd import exports
from polyhvd.exports import *

if TYPE_CHECKING:
    from polyhvd.tensorflow import elastic
    from polyhvd.tensorflow.keras import SyncBatchNormalization

__all__ = [
    "BroadcastGlobalVariablesHook",
    "Compression",
    "SyncBatchNormalization",
    "allgather_object",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "elastic",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "size_op",
]
__all__ += exports.__all__
__all__ += verbs.__all__
__all__ += wrappers.__all__


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # a type checker would accept any name
    __getattr__ = _lazily(__name__, elastic="", SyncBatchNormalization="keras")
