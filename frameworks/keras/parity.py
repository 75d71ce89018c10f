"""Models of Keras, for migrations from and to other frameworks: their files and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from polyhvd.errors import InvalidArgumentError
from polyhvd.training.keras.weights import to_numpy, weights_of

__all__ = ["load_file", "outputs_of", "save_file", "to_numpy", "weights_of"]


def load_file(model: Any, path: str) -> None:
    """Give a model the weights of a file, which has to have all of them and no other.

    Args:
        model: to be overwritten, built.
        path: as ``save_weights`` or ``save`` have written it.

    Raises:
        InvalidArgumentError: the weights are not those of the model.
    """
    try:
        if path.endswith(".keras"):
            stored = keras.models.load_model(path, compile=False)
            model.set_weights(stored.get_weights())
        else:
            model.load_weights(path)
    except ValueError as error:
        raise InvalidArgumentError(f"{path}: {str(error).strip().splitlines()[0]}") from None


def save_file(model: Any, path: str) -> None:
    """Write a model, or its weights where the name of the file ends in ``.h5``.

    Args:
        model: that is written.
        path: of the file.
    """
    if path.endswith(".keras"):
        model.save(path)
    else:
        model.save_weights(path)


def outputs_of(model: Any, inputs: Sequence[Any]) -> tuple[Any, bool]:
    """What a model makes of arrays of NumPy, not as in training: an array, or a list of them.

    Args:
        model: that is run once.
        inputs: as the other frameworks take them. A model whose images have their channels last gets them so.

    Returns:
        the outputs, and whether images in them have their channels last.
    """
    expected = getattr(model, "input_shape", None)
    shapes = list(expected) if isinstance(expected, list) else [expected]
    given, last = [], False
    for number, array in enumerate(inputs):
        shape = shapes[number] if number < len(shapes) else None
        if array.ndim > 2 and isinstance(shape, tuple):
            moved = np.moveaxis(array, 1, -1)
            if not _fits(array.shape, shape) and _fits(moved.shape, shape):
                array, last = np.ascontiguousarray(moved), True
        given.append(array)
    made = model(given if len(given) > 1 else given[0], training=False)
    return [to_numpy(each) for each in made] if isinstance(made, (list, tuple)) else to_numpy(made), last


def _fits(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    pairs = zip(shape, expected, strict=False)
    return len(shape) == len(expected) and all(e is None or e == s for s, e in pairs)
