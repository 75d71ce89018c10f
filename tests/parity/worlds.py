"""A test's ranks: a pool, and the driver that they use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import drivers
import pytest
from pool import Pool

from polyhvd.collectives.adapter import Capability

__all__ = ["Ranks", "World", "assert_alike"]

_NAMES = [driver.name for driver in drivers.DRIVERS]
_FRAMEWORKS = [driver.framework for driver in drivers.DRIVERS]


@dataclass(frozen=True)
class World:
    """A driver and a number of ranks."""

    driver: str
    size: int
    by_mpi: bool = False  # whose launcher starts them, and which moves what it can

    @property
    def order(self) -> tuple[object, ...]:
        """Sorts tests so that those of one pool follow each other."""
        if "+" in self.driver:
            return ("parity", len(_FRAMEWORKS), False, self.size, self.driver)
        framework = drivers.get(self.driver).framework
        return ("parity", _FRAMEWORKS.index(framework), self.by_mpi, self.size, _NAMES.index(self.driver))

    def __str__(self) -> str:
        if "+" in self.driver:
            return self.driver
        return f"{self.driver}-by-mpi-{self.size}" if self.by_mpi else f"{self.driver}-{self.size}"


class Ranks:
    """What the ``ranks`` fixture gives to a test."""

    def __init__(self, pool: Pool, driver: str) -> None:
        self.pool = pool
        self.driver = driver
        self.size = pool.size

    def needs(self, capability: Capability) -> None:
        """Skip the test where the adapter does not declare this."""
        __tracebackhide__ = True
        if capability not in self.pool.run(drivers.capabilities, self.driver)[0]:
            pytest.skip(f"{self.driver} does not declare {capability.name}")

    def run(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        """Call ``function(driver's name, *arguments)`` on every rank; see Pool.run, which has the options."""
        __tracebackhide__ = True
        return self.pool.run(function, self.driver, *arguments, **options)

    def run_alike(self, function: Callable[..., dict[str, int]], *arguments: Any) -> None:
        """The same, for functions that return digests by case, which must be equal on all ranks."""
        __tracebackhide__ = True
        assert_alike(self.run(function, *arguments))


def assert_alike(digests: Sequence[dict[str, int]]) -> None:
    """Fail, naming the cases, unless all ranks have the same bits."""
    __tracebackhide__ = True
    assert digests[0], "no case was run"
    for rank, found in enumerate(digests):
        assert found.keys() == digests[0].keys(), f"rank {rank} ran other cases than rank 0"
        differ = [case for case in found if found[case] != digests[0][case]]
        assert not differ, f"rank {rank} has other bits than rank 0 in: {', '.join(differ)}"
