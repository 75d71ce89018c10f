"""Arrays of a state as memory of the host: many are overwritten at once, by others or by those of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polyhvd import _core
from polyhvd.collectives.adapter import OpKind
from polyhvd.collectives.operation import process_set_id
from polyhvd.collectives.process_sets import ProcessSet
from polyhvd.runtime import current

__all__ = ["like", "overwrite", "receive", "send"]

Array = np.ndarray[Any, Any]


def like(arrays: Sequence[Array], there: Sequence[Array]) -> list[Array]:
    """Dense arrays of the same shapes and dtypes, of which those that are there already are used again."""
    found = []
    for number, array in enumerate(arrays):
        known = there[number] if number < len(there) else None
        fits = known is not None and (known.shape, known.dtype) == (array.shape, array.dtype)
        found.append(known if known is not None and fits else np.empty(array.shape, array.dtype))
    return found


def overwrite(targets: Sequence[Array], values: Sequence[Array]) -> None:
    """``np.copyto`` for each, but faster."""
    for number in _core.copy(targets, values):
        np.copyto(targets[number], values[number])


def send(arrays: Sequence[Array], name: str, among: ProcessSet) -> None:
    """Give the other ranks of a set these dense arrays, which are only read; they call :func:`receive`."""
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
