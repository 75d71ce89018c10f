"""What the scripts of checks share: every rank runs all checks, in order; the first failure ends the job."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import faulthandler
import time
from collections.abc import Callable
from typing import Any

import numpy as np

_CHECKS: list[Callable[[], None]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    _CHECKS.append(function)
    return function


def run_checks(module: str = "__main__") -> None:
    """Run the checks of one script, by the name under which it was imported."""
    faulthandler.dump_traceback_later(300, exit=True)
    for function in [function for function in _CHECKS if function.__module__ == module]:
        started = time.monotonic()
        function()
        print(f"took {time.monotonic() - started:.1f} s", flush=True)
        print(f"PASSED {module}.{function.__name__}", flush=True)
    faulthandler.cancel_dump_traceback_later()


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
