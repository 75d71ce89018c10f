"""Batches of polyhvd's loaders for models of ``keras``, on TensorFlow or on PyTorch."""

from __future__ import annotations

from polyhvd.keras.backend import on

__all__ = ["Batches"]


class Batches(on.Batches):  # noqa: D101
    __doc__ = on.Batches.__doc__


def __dir__() -> list[str]:
    return __all__
