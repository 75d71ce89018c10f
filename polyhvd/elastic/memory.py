"""Arrays of a state in host memory: many are overwritten at once, locally or by another rank's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from polyhvd import _core
from polyhvd.collectives.adapter import OpKind
from polyhvd.collectives.operation import process_set_id
from polyhvd.collectives.process_sets import ProcessSet
from polyhvd.runtime import current

__all__ = ["form", "like", "overwrite", "pieces", "receive", "send"]

Array = np.ndarray[Any, Any]
_LINE = 64  # bytes of a cache line, with which tensors begin


def like(arrays: Sequence[Any], there: Sequence[Array]) -> list[Array]:
    """Dense arrays of the same forms; reuses given arrays that fit."""
    known = dict(enumerate(there))
    fits = [number in known and form(known[number]) == form(array) for number, array in enumerate(arrays)]
    lacking = [array for array, fit in zip(arrays, fits, strict=True) if not fit]
    parts = pieces([math.prod(array.shape) * np.dtype(array.dtype).itemsize for array in lacking])
    made = (_formed(part, array) for part, array in zip(parts, lacking, strict=True))
    return [known[number] if fit else next(made) for number, fit in enumerate(fits)]


def form(array: Any) -> tuple[Any, ...]:
    """Shape, dtype and order: NumPy adds up elements as they lie in memory, and so to other last bits."""
    by_columns = isinstance(array, np.ndarray) and np.isfortran(array)
    return array.shape, np.dtype(array.dtype), "F" if by_columns else "C"


def _formed(part: Array, array: Any) -> Array:
    """An array of the same form, in these bytes if it may be: objects may not."""
    shape, dtype, order = form(array)
    if dtype.hasobject:
        return np.empty(shape, dtype, order)
    formed: Array = part.view(dtype).reshape(shape, order=order)
    return formed


def pieces(sizes: Sequence[int]) -> list[Array]:
    """Arrays of so many bytes each, side by side.

    NumPy asks the system for huge pages for what is large, as it does not for many small arrays: these are
    had in a fifth of the time, and written faster.
    """
    ends = list(itertools.accumulate(-(-size // _LINE) * _LINE for size in sizes))
    block = np.empty((ends[-1] if ends else 0) + _LINE, np.uint8)
    first = -block.ctypes.data % _LINE
    starts = [first + end for end in (0, *ends)]
    return [block[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def overwrite(targets: Sequence[Array], values: Sequence[Array]) -> None:
    """``np.copyto`` for each, but faster."""
    for number in _core.copy(targets, values):
        np.copyto(targets[number], values[number])


def send(arrays: Sequence[Array], name: str, among: ProcessSet) -> None:
    """Send dense arrays, which are only read, to the other ranks of a set; they call :func:`receive`."""
    root = current.world().placement.rank
    # By address: they may be read-only.
    tensors = [_core.TensorRef(a.ctypes.data, a.shape, a.dtype.name, a) for a in arrays]
    _run(tensors, root, name, among)


def receive(arrays: Sequence[Array], root: int, name: str, among: ProcessSet) -> None:
    """Overwrite dense arrays with those of the rank that calls :func:`send`, of the same forms."""
    _run(arrays, root, name, among)


def _run(tensors: Sequence[Any], root: int, name: str, among: ProcessSet) -> None:
    engine, number = current.world().engine, process_set_id(among)
    engine.submit(
        OpKind.BROADCAST, name, tensors, tensors, root=root, process_set=number, blocking=True
    ).wait()
