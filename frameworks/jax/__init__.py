"""Collectives on JAX's arrays, outside of ``jax.jit`` and in it, and data-parallel training with them.

Example::

    import polyhvd.jax as hvd
    hvd.init()
    params = hvd.broadcast_parameters(params, root_rank=0)
    step = jax.jit(hvd.value_and_grad(loss))
    value, gradients = step(params, batch)
"""

from __future__ import annotations

from polyhvd.installed import require as _require

_require(__name__)

from polyhvd.jax import verbs
from polyhvd.jax.errors import translated_errors
from polyhvd.jax.functions import Compression
from polyhvd.jax.reducer import DistributedGradients, grad, value_and_grad
from polyhvd.jax.state import broadcast_parameters
from polyhvd.jax.verbs import *

from polyhvd import allgather_object, broadcast_object, exports
from polyhvd.exports import *

__all__ = [
    "Compression",
    "DistributedGradients",
    "allgather_object",
    "broadcast_object",
    "broadcast_parameters",
    "grad",
    "translated_errors",
    "value_and_grad",
]
__all__ += exports.__all__
__all__ += verbs.__all__


def __dir__() -> list[str]:
    return __all__
