"""Every test here runs with every framework that is installed, and on 1 to 4 ranks.

Tests that move tensors run under MPI's launcher, too: on one number of ranks for each framework, or,
with TEST_BY_MPI=all in the environment, every test on every number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import drivers
import mpirun
import pytest
from pool import Pools, PoolSpec
from worlds import Ranks, World

_BY_MPI = (*mpirun.AS_ROOT, ("POLYHVD_BACKENDS", "mpi"))
#: Each framework, and each number of ranks.
_SOME_BY_MPI = (("numpy", 1), ("numpy", 4), ("torch", 3), ("mxnet", 2), ("tensorflow", 2))
_MOVING = ("test_allreduce", "test_by_mpi", "test_exchange", "test_gather_and_broadcast")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "ranks" not in metafunc.fixturenames:
        return
    names, sizes = [driver.name for driver in drivers.DRIVERS], None
    for mark in metafunc.definition.iter_markers():
        sizes = list(mark.args) if mark.name == "sizes" else sizes
        names = list(mark.args) if mark.name == "drivers" else names
    worlds = worlds_of(names, sizes)
    below = worlds_by_mpi(worlds, metafunc.definition)
    if not metafunc.definition.get_closest_marker("only_by_mpi"):
        below = [*worlds, *below]
    metafunc.parametrize("world", below, ids=str)


def worlds_of(names: Sequence[str], sizes: Sequence[int] | None) -> list[World]:
    return [
        World(name, size)
        for name in names
        for size in drivers.get(name).sizes
        if sizes is None or size in sizes
    ]


def worlds_by_mpi(worlds: Sequence[World], test: pytest.Item) -> list[World]:
    if test.get_closest_marker("not_by_mpi"):
        return []
    if not mpirun.everything():
        moves = test.path.stem in _MOVING
        worlds = [world for world in worlds if moves and (world.driver, world.size) in _SOME_BY_MPI]
    return [replace(world, by_mpi=True) for world in worlds if world.driver != "cupy"]


@pytest.fixture
def ranks(world: World, pools: Pools) -> Ranks:
    driver = drivers.get(world.driver)
    if not driver.is_installed():
        pytest.skip(f"{driver.package} is not installed")
    settings, launcher = driver.settings, mpirun.command() if world.by_mpi else ()
    if world.by_mpi:
        settings = (*settings, *_BY_MPI)
        if not launcher:
            pytest.fail("there is no mpirun; make test installs one", pytrace=False)
    spec = PoolSpec(driver.framework, (world.size,), settings, mpirun=launcher)
    return Ranks(pools.get(spec), world.driver)
