"""Elastic training on NumPy arrays: ``hvd.elastic``."""

from __future__ import annotations

from typing import Any

import numpy as np
from polyhvd.numpy.functions import functions

from polyhvd._core import DTYPES
from polyhvd.elastic import exports
from polyhvd.elastic.arrays import ArraysState
from polyhvd.elastic.exports import *
from polyhvd.elastic.loop import run, run_fn
from polyhvd.elastic.train import train

__all__ = [
    "ArrayState",
    "run",
    "run_fn",
    "train",
]
__all__ += exports.__all__


class ArrayState(ArraysState):
    """Arrays and other attributes, by name. Arrays keep their memory over all changes of the world.

    Args:
        kwargs: the attributes with their first values. Arrays of dtypes that collectives have, and those in
            dicts, lists and tuples, are broadcast in place; all else is pickled.

    Example::

        import numpy as np
        import polyhvd.numpy as hvd
        hvd.init()
        state = hvd.elastic.ArrayState(weights=np.zeros(3), step=0)
        state.weights += 1
        state.step += 1
        state.commit()
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(functions.broadcast_parameters, _is_array, **kwargs)


def _is_array(value: Any) -> bool:
    return type(value) is np.ndarray and value.dtype.isnative and value.dtype.name in DTYPES


def __dir__() -> list[str]:
    return __all__
