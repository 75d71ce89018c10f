"""How sparse tensors travel: the same in every framework, so that ranks of different ones can reduce them.

A sum of sparse tensors is a grouped allgather under the name of the call, of three tensors of each rank:

- the indices, int64 [n, k]: of each nonzero, or row, its place in the first k dimensions;
- the values, [n, ...], with the dimensions that remain;
- k and the whole shape, int64 [1, 1 + ndim]; -1 stands for a dimension that the rank does not know.

Each rank then adds up what has the same index, in order of rank. Several sparse tensors may travel as one
operation, in order, three tensors each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polyhvd.errors import RankMismatchError

__all__ = ["check_shapes", "merged"]

Array = np.ndarray[Any, Any]
_HALF = ("float16", "bfloat16")


def check_shapes(name: str | None, shapes: Sequence[Sequence[int]]) -> None:
    """Raise where the ranks' tensors have different shapes.

    Args:
        name: of the call.
        shapes: of each rank, what it has sent as k and shape.

    Raises:
        RankMismatchError: they differ; the same on every rank.
    """
    for dimensions in zip(*shapes, strict=True):
        if len({size for size in dimensions if size >= 0}) > 1:
            sides = ", ".join(str(list(side[1:])) for side in shapes)
            raise RankMismatchError(
                f"Mismatched sparse_allreduce tensor shapes: {name!r} is, in order of rank, {sides}; "
                "reduce tensors of one shape"
            )


def merged(indices: Array, values: Array, factor: float = 1.0) -> tuple[Array, Array]:
    """Each row once, with the sum of the values it has, times a factor.

    Args:
        indices: of the rows of ``values``, in order of rank.
        values: of a type of floating-point or integer numbers. Half types are added up as float32, and
            rounded once; integers are multiplied as float64 and truncated, as in reductions of dense tensors.
        factor: multiplies the sums.

    Returns:
        the indices in ascending order, and their values.
    """
    dtype = values.dtype
    if dtype.name in _HALF:
        values = values.astype(np.float32)
    order = np.argsort(indices, kind="stable")  # keeps the order of ranks
    ordered = indices[order]
    begins = np.flatnonzero(np.diff(ordered, prepend=-1))
    if not begins.size:
        return ordered, values.astype(dtype)
    sums = np.add.reduceat(values[order], begins, axis=0, dtype=values.dtype)
    if factor != 1.0:
        is_floating = values.dtype.kind == "f"
        sums = sums * values.dtype.type(factor) if is_floating else np.trunc(sums.astype(np.float64) * factor)
    return ordered[begins], sums.astype(dtype)
