"""What the callbacks that log metrics share: when they log, and how each tool takes the numbers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from polyhvd.errors import InvalidArgumentError
from polyhvd.runtime import current, metrics

__all__ = ["MetricsLog", "log_function"]

#: Before each name, so that tools show these metrics as a group.
_PREFIX = "polyhvd/"

Log = Callable[[dict[str, float], int], object]


def log_function(writer: Any) -> Log:
    """The function that passes numbers, by their names, and the number of a step to a tool.

    Args:
        writer: that function; or a SummaryWriter of PyTorch or TensorFlow; the module mlflow, or a logger of
            Lightning, which have ``log_metrics()``; the module wandb or a run of it, which have ``log()``.

    Raises:
        InvalidArgumentError: it is none of these.
    """
    if hasattr(writer, "add_scalar"):
        return lambda values, step: _each(lambda name, value: writer.add_scalar(name, value, step), values)
    if hasattr(writer, "as_default") and hasattr(writer, "flush"):
        summary = importlib.import_module("tensorflow").summary

        def write(values: dict[str, float], step: int) -> None:
            with writer.as_default(step=step):
                _each(summary.scalar, values)

        return write
    for name in ("log_metrics", "log"):
        if callable(found := getattr(writer, name, None)):
            return lambda values, step: found(values, step=step)
    if callable(writer):
        return lambda values, step: writer(values, step)
    raise InvalidArgumentError(
        f"writer={writer!r}: expected a SummaryWriter, mlflow, a run of wandb, or a function(dict, step)"
    )


def _each(write: Callable[[str, float], object], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        write(name, value)


class MetricsLog:
    """Passes the numbers of ``hvd.metrics()`` to a tool every so many steps, on rank 0.

    Args:
        writer: see :func:`log_function`. Other ranks do not use it, and may pass None.
        every_n_steps: steps of training between two entries.

    Raises:
        InvalidArgumentError: an argument cannot be used.
    """

    def __init__(self, writer: Any, every_n_steps: int) -> None:
        if not isinstance(every_n_steps, int) or every_n_steps < 1:
            raise InvalidArgumentError(f"every_n_steps={every_n_steps!r}: expected a whole number above 0")
        self._log = None if writer is None else log_function(writer)
        self._every_n_steps = every_n_steps
        self._steps = self._logged = 0

    def add_steps(self, count: int = 1) -> None:
        """The program has taken steps; raises what the tool does.

        Args:
            count: how many.
        """
        self._steps += count
        world = current.find()
        if world is None or world.placement.rank != 0 or self._log is None:
            return
        if self._steps - self._logged >= self._every_n_steps:
            self._logged = self._steps
            self._log({_PREFIX + name: value for name, value in metrics.read(world).items()}, self._steps)
