"""The functions of polyhvd.numpy that differ from those of other frameworks."""

from __future__ import annotations

from typing import Any

import numpy as np
from polyhvd.numpy.adapter import Array, NumpyAdapter

from polyhvd.runtime.world import World
from polyhvd.training.arrays import ArrayFunctions

__all__ = ["Compression", "NumpyFunctions", "functions"]


class NumpyFunctions(ArrayFunctions[Array]):
    """See :class:`polyhvd.collectives.functions.Functions`.

    Args:
        world: in which they are; None: in the current one of the process.
    """

    def __init__(self, world: World | None = None) -> None:
        super().__init__(NumpyAdapter(), np.asarray, world)

    def checked(self, tensor: Any) -> Array:
        """The array itself; raises TypeError for what is none."""
        if not isinstance(tensor, np.ndarray):
            raise TypeError(f"expected a numpy array, found {type(tensor).__name__}; use np.asarray()")
        return tensor


functions = NumpyFunctions()
Compression = functions.Compression
