"""NumPy as the conformance tests use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polyhvd.parity.driver import Driver

__all__ = ["DRIVERS"]

Array = np.ndarray[Any, Any]


class _NumPy(Driver):
    sizes = (1, 2, 3, 4)
    tests_kernels = True

    def from_numpy(self, array: Array) -> Any:
        return array.copy()

    def to_numpy(self, tensor: Any) -> Array:
        assert isinstance(tensor, np.ndarray), type(tensor)
        return tensor

    def transposed(self, tensor: Any) -> Any:
        return tensor.transpose()

    def unsupported(self) -> Sequence[Any]:
        big_endian = np.ones(4, np.dtype(np.float32).newbyteorder(">"))
        names = ("complex64", "datetime64[s]", "object", "U3")
        return [big_endian, *(np.zeros(4, name) for name in names)]


DRIVERS = (_NumPy,)
