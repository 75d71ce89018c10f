"""Batches of polyhvd's loaders as tensors of PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from polyhvd.data import batches
from polyhvd.data.loader import Loader

__all__ = ["Batches"]


class Batches(batches.Batches):
    """Iterates over a loader, with batches of tensors, which share the memory of the loader's arrays.

    It takes the place of a ``torch.utils.data.DataLoader``. The position is that of the loader, and a batch
    counts as with the loader: when the next one is asked for. ``hvd.elastic.train`` takes it as data.
    Strings, times and other columns of which PyTorch has no tensors stay NumPy arrays.

    Args:
        loader: an :class:`polyhvd.data.ArrayLoader` or :class:`polyhvd.data.ParquetLoader`.
        x: the column of the inputs; several inputs are a tuple, a list or a dict of columns. A column is a
            name, or a number where the loader has a sequence of arrays. None: batches have all columns, in
            the form that the loader gives them. Else a batch is a sequence of x, y and sample_weight, as far
            as they are given.
        y: the column, or columns, of the targets.
        sample_weight: the column of the weights of rows.
        pin_memory: whether tensors are in page-locked memory, from which ``to("cuda", non_blocking=True)``
            copies in the background. Without CUDA it has no effect.

    Raises:
        ValueError: an argument cannot be used; or, in the loop, a batch has no such column.

    Example::

        for x, y in Batches(loader, x="image", y="label"):
            loss = criterion(model(x), y)
    """

    def __init__(
        self,
        loader: Loader,
        x: Any = None,
        y: Any = None,
        sample_weight: Any = None,
        *,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(loader, x, y, sample_weight)
        self._is_pinned = pin_memory and torch.cuda.is_available()

    def _tensor(self, array: Any) -> Any:
        if not torch.is_tensor(array):
            array = np.asarray(array)
            if array.dtype.kind not in "biufc":
                return array
            # Tensors have no negative strides and the machine's byte order, and can be written to.
            usable = array.flags.writeable and array.dtype.isnative and min(array.strides, default=0) >= 0
            array = torch.from_numpy(array if usable else array.astype(array.dtype.newbyteorder("="), "C"))
        return array.pin_memory() if self._is_pinned else array


def __dir__() -> list[str]:
    return __all__
