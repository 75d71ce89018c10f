"""How the collectives are called for JAX; ``make verbs`` makes verbs.py of it."""

from __future__ import annotations

from polyhvd.collectives.table import Dialect

__all__ = ["DIALECT"]

_COMPILED = (
    "May be called in ``jax.jit``, where it is a callback on the host that runs in its place among the "
    "collectives of the program, exactly once each time."
)
_GRADIENT = (
    "Differentiable for Average and Sum, in reverse, where every rank runs the same backward. " + _COMPILED
)
_COPIES = _GRADIENT.replace(" for Average and Sum", "")
_SAME_ROWS = (
    "There all ranks have the same number of rows, since the shape of a result is fixed when the function "
    "is compiled."
)
_EQUAL_PARTS = (
    "There the parts are equal, since the shape of a result is fixed when the function is compiled."
)

DIALECT = Dialect(
    title="JAX",
    module="polyhvd.jax",
    tensor="array",
    type="jax.Array",
    imports=("import jax", "from polyhvd.jax.functions import Compression, functions"),
    example_import="import jax.numpy as jnp",
    ones="jnp.ones",
    array="jnp.array",
    dtypes="float16, bfloat16, float32, integers of 8 to 32 bits, or bool, on one device; with "
    "jax_enable_x64 float64 and integers of 64 bits, too",
    lacks=frozenset(
        {
            *("allreduce_", "allreduce_async_", "grouped_allreduce_", "grouped_allreduce_async_"),
            *("broadcast_", "broadcast_async_"),
        }
    ),
    without=frozenset({"priority"}),
    async_without=frozenset({"exact_gradient"}),
    notes={
        "allreduce*": _GRADIENT,
        "allgather*": f"{_COPIES} {_SAME_ROWS}",
        "broadcast*": _COPIES,
        "alltoall*": f"{_COPIES} {_EQUAL_PARTS}",
        "reducescatter*": _GRADIENT,
        "barrier": _COMPILED,
        "join": f"{_COMPILED} There the result is an array of int32 without dimensions.",
        "*_async": "For arrays outside of ``jax.jit``; the result is unknown to ``jax.grad``.",
    },
    types={"join.return": "int | jax.Array"},
)
