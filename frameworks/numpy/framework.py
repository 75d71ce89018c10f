"""Facts about NumPy that are read without importing it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from polyhvd.installed import Framework, Parity

__all__ = ["FRAMEWORK"]


def _ones(numpy: Any, count: int, dtype: str) -> Any:
    return numpy.ones(count, import_module("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype)


FRAMEWORK = Framework(
    title="NumPy",
    packages=("numpy",),
    versions="1.21 or later",
    install="pip install numpy",
    distributions=("numpy",),
    companions=("ml_dtypes",),
    place=7,
    ones=_ones,
    parity=Parity(models="NumPy", packages=("numpy",), session="NumpySession", made_by=""),
)
