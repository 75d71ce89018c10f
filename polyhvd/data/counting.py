"""Counters of this process's data in the current world; without a world nothing is counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic_ns

from polyhvd.runtime import current

__all__ = ["count", "waiting"]


def count(**numbers: int) -> None:
    """Add to counters of ``hvd.counters()``.

    Args:
        numbers: by the names of ``DATA_COUNTERS`` of :mod:`polyhvd.runtime.world`.
    """
    if (world := current.find()) is not None:
        world.count(**numbers)


@contextmanager
def waiting() -> Iterator[None]:
    """Within, a step waits for its batch."""
    began = monotonic_ns()
    yield
    if (world := current.find()) is not None:
        world.count_data_wait(began, monotonic_ns())
