"""Models of Keras, for migrations from and to other frameworks: their files."""

from __future__ import annotations

from typing import Any

import keras

from polyhvd.errors import InvalidArgumentError
from polyhvd.training.keras.weights import outputs_of, to_numpy, weights_of

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
