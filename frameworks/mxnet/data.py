"""Batches of polyhvd's loaders as arrays of MXNet."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np

from polyhvd.data import batches

__all__ = ["Batches"]


class Batches(batches.Batches):
    """Iterates over a loader, with batches of arrays of MXNet, as Gluon's ``DataLoader`` gives them.

    Their dtypes are those of the loader's arrays. They are ``mx.np`` arrays after ``mx.npx.set_np()``. The
    position is that of the loader, and a batch counts as with the loader: when the next one is asked for.
    ``hvd.elastic.train`` takes it as data. Strings, times and other columns of which MXNet has no arrays stay
    NumPy arrays.

    Args:
        loader: an :class:`polyhvd.data.ArrayLoader` or :class:`polyhvd.data.ParquetLoader`.
        x: the column of the inputs; several inputs are a tuple, a list or a dict of columns. A column is a
            name, or a number where the loader has a sequence of arrays. None: batches have all columns, in
            the form that the loader gives them. Else a batch is a sequence of x, y and sample_weight, as far
            as they are given.
        y: the column, or columns, of the targets.
        sample_weight: the column of the weights of rows.

    Raises:
        ValueError: an argument cannot be used; or, in the loop, a batch has no such column.

    Example::

        for x, y in Batches(loader, x="image", y="label"):
            with autograd.record():
                loss = criterion(net(x), y)
    """

    def _tensor(self, array: Any) -> Any:
        if isinstance(array, mx.nd.NDArray):
            return array
        array = np.asarray(array)
        if array.dtype.kind not in "biuf":
            return array
        make = mx.np.array if mx.util.is_np_array() else mx.nd.array
        try:
            return make(array, dtype=array.dtype)
        except KeyError:  # MXNet has no such dtype
            return array


def __dir__() -> list[str]:
    return __all__
