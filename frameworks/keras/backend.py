"""Which framework Keras runs on, and what polyhvd offers there."""

from __future__ import annotations

import importlib
from typing import Any

import keras

__all__ = ["on"]

_MODULES = {"tensorflow": "polyhvd.keras.on_tensorflow", "torch": "polyhvd.keras.on_torch"}


def _module() -> Any:
    backend = keras.backend.backend()
    if backend not in _MODULES:
        raise ImportError(
            f"polyhvd.keras needs Keras on TensorFlow or PyTorch, and Keras runs on {backend}: set "
            "KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch"
        )
    return importlib.import_module(_MODULES[backend])


#: The other framework is not imported.
on: Any = _module()
