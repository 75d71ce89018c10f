"""Every test here runs with every framework that is installed, and on 1 to 4 ranks."""

from __future__ import annotations

from collections.abc import Sequence

import drivers
import pytest
from pool import Pools, PoolSpec
from worlds import Ranks, World


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "ranks" not in metafunc.fixturenames:
        return
    names, sizes = [driver.name for driver in drivers.DRIVERS], None
    for mark in metafunc.definition.iter_markers():
        sizes = list(mark.args) if mark.name == "sizes" else sizes
        names = list(mark.args) if mark.name == "drivers" else names
    metafunc.parametrize("world", worlds_of(names, sizes), ids=str)


def worlds_of(names: Sequence[str], sizes: Sequence[int] | None) -> list[World]:
    return [
        World(name, size)
        for name in names
        for size in drivers.get(name).sizes
        if sizes is None or size in sizes
    ]


@pytest.fixture
def ranks(world: World, pools: Pools) -> Ranks:
    driver = drivers.get(world.driver)
    if not driver.is_installed():
        pytest.skip(f"{driver.package} is not installed")
    return Ranks(pools.get(PoolSpec(driver.framework, (world.size,), driver.settings)), world.driver)
