"""What the tests on ranks share: values that differ between ranks, and errors that calls must raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["data", "raises"]


def data(rank: int, shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> np.ndarray[Any, Any]:
    """What a rank contributes: different on every rank, known to all, small enough to add exactly."""
    numbers = np.random.default_rng([seed, rank, *shape])
    if dtype == "bool":
        return numbers.integers(0, 2, shape).astype(bool)
    low = 0 if dtype.startswith("uint") else -3
    return np.asarray(numbers.integers(low, 4, shape)).astype(_np(dtype))


def _np(dtype: str) -> Any:
    if dtype == "bfloat16":
        import tensorflow as tf

        return tf.bfloat16.as_numpy_dtype
    return dtype


def raises(expected: type[BaseException], function: Callable[..., Any], *arguments: Any) -> str:
    """The message of the error that a call must raise."""
    try:
        function(*arguments)
    except expected as error:
        return str(error)
    raise AssertionError(f"{expected.__name__} was not raised")
