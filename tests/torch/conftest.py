"""Tests of polyhvd.torch alone; what every framework has in common stands in tests/parity."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import pytest
from pool import Pool, Pools, PoolSpec

_SIZES = (2, 3)


@dataclass(frozen=True)
class World:
    """A number of ranks."""

    size: int

    @property
    def order(self) -> tuple[object, ...]:
        """Sorts tests so that those of one pool follow each other."""
        return ("torch", self.size)

    def __str__(self) -> str:
        return f"{self.size} ranks"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "ranks" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("sizes")
        metafunc.parametrize("world", [World(size) for size in (mark.args if mark else _SIZES)], ids=str)


@pytest.fixture
def ranks(world: World, pools: Pools) -> Pool:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:  # this folder could be taken for it
        pytest.skip("torch is not installed")
    return pools.get(PoolSpec("torch", (world.size,)))
