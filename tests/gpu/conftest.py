"""Tests of tensors on GPUs, on the stand-in of the CUDA driver."""

from __future__ import annotations

from dataclasses import dataclass

import device_arrays
import pytest
from pool import Pool, Pools, PoolSpec


@dataclass(frozen=True)
class World:
    """Ranks on hosts, each with GPUs of its own."""

    name: str
    hosts: tuple[int, ...]

    @property
    def order(self) -> tuple[object, ...]:
        """Sorts tests so that those of one pool follow each other."""
        return ("gpu", self.name)

    def __str__(self) -> str:
        return self.name


WORLDS = (World("gpu-3", (3,)), World("gpu-1+1", (1, 1)))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("sizes")
        sizes = marker.args if marker else (3,)
        metafunc.parametrize("world", [world for world in WORLDS if sum(world.hosts) in sizes], ids=str)


@pytest.fixture(autouse=True, scope="session")
def stand_in() -> None:
    if not device_arrays.STAND_IN.exists():
        pytest.fail("there is no stand-in of the CUDA driver; make stand-ins builds it", pytrace=False)


@pytest.fixture
def pool(world: World, pools: Pools) -> Pool:
    return pools.get(PoolSpec("numpy", world.hosts))
