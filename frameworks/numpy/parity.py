"""Arrays of NumPy as the weights of a model, for jobs and comparisons with frameworks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from polyhvd.errors import InvalidArgumentError
from polyhvd.training.layouts import Layout
from polyhvd.training.mapping import Weight

__all__ = ["to_numpy", "weights_of"]


def weights_of(model: Any) -> list[Weight]:
    """Arrays by name, or a list of them, in an order that is the same on every rank; all are trained.

    Args:
        model: arrays that can be written to, in common form: see :class:`polyhvd.parity.Layout`.

    Raises:
        InvalidArgumentError: there are none, or one of them is not an array.
    """
    items = model.items() if isinstance(model, Mapping) else enumerate(model)
    found = [_weight(str(name), array) for name, array in items]
    if not found:
        raise InvalidArgumentError("the model has no arrays; pass those that are trained")
    return found


def to_numpy(tensor: Any) -> Any:
    """The array, or number, itself."""
    return np.asarray(tensor)


def _weight(name: str, array: Any) -> Weight:
    if not isinstance(array, np.ndarray) or not array.flags.writeable:
        raise InvalidArgumentError(
            f"weight {name!r}: expected an array of NumPy that can be written to, found "
            f"{type(array).__name__}"
        )

    def write(values: Any) -> None:
        array[...] = values

    return Weight(
        name=name,
        role="",
        source=array,
        layout=Layout(array.shape),
        dtype=array.dtype.name,
        trainable=True,
        read=array.copy,
        write=write,
    )
