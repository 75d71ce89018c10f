"""Collectives on MXNet arrays, ordered by MXNet's engine.

Every call returns at once; reads of the results wait for them, as after any operator of MXNet.
What goes wrong later shows at the next read, as MXNetError.

Example::

    import polyhvd.mxnet as hvd
    hvd.init()
    hvd.broadcast_parameters(net.collect_params())
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyhvd.installed import lazily as _lazily
from polyhvd.installed import make_mxnet_importable as _make_mxnet_importable
from polyhvd.installed import require as _require

_require(__name__)
_make_mxnet_importable()
try:
    import mxnet as _mxnet  # noqa: F401
except OSError as error:  # it opens its library, which needs two that slim systems lack
    if not {"libgomp.so.1", "libquadmath.so.0"} & {*str(error).split(":")}:
        raise
    raise ImportError(
        f"MXNet cannot open a library of the system: {error}. Install it, on Debian and Ubuntu as root with: "
        "apt-get install libgomp1 libquadmath0",
        name="mxnet",
    ) from None

from polyhvd.mxnet import estimator, kvstore, verbs
from polyhvd.mxnet.base import Compression
from polyhvd.mxnet.batch_norm import SyncBatchNorm
from polyhvd.mxnet.optimizer import DistributedOptimizer
from polyhvd.mxnet.state import broadcast_optimizer_state, broadcast_parameters
from polyhvd.mxnet.trainer import DistributedTrainer
from polyhvd.mxnet.verbs import *

from polyhvd import allgather_object, barrier, broadcast_object, exports
from polyhvd.exports import *

if TYPE_CHECKING:
    from polyhvd.mxnet import elastic

kvstore.install()

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "DistributedTrainer",
    "SyncBatchNorm",
    "allgather_object",
    "barrier",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "estimator",
]
__all__ += exports.__all__
__all__ += verbs.__all__

if not TYPE_CHECKING:  # a type checker would accept any name
    __getattr__ = _lazily(__name__, elastic="")


def __dir__() -> list[str]:
    return __all__
