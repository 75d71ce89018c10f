"""The functions of polyhvd.cupy that differ from those of other frameworks."""

from __future__ import annotations

from typing import Any

import cupy  # type: ignore[import-untyped, import-not-found, unused-ignore]
from polyhvd.cupy.adapter import Array, CupyAdapter

from polyhvd.training.arrays import ArrayFunctions

__all__ = ["Compression", "CupyFunctions", "functions"]


class CupyFunctions(ArrayFunctions[Array]):
    """See :class:`polyhvd.collectives.functions.Functions`."""

    def __init__(self) -> None:
        super().__init__(CupyAdapter(), cupy.asarray)

    def checked(self, tensor: Any) -> Array:
        """The array itself; raises TypeError for what is none."""
        if not isinstance(tensor, cupy.ndarray):
            raise TypeError(
                f"expected a cupy array, found {type(tensor).__name__}; use cupy.asarray(), or polyhvd.numpy"
            )
        return tensor


functions = CupyFunctions()
Compression = functions.Compression
