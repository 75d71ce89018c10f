"""Every test here runs with NumPy on 1 to 4 ranks, and with every framework that is installed on 2 and 3.

Tests that move tensors run under MPI's launcher, too: with NumPy, on two numbers of ranks, and a few of
them with each framework. With TEST_BY_MPI=all in the environment every test does, on every number.
With TEST_RANKS=fewest each test runs on one number of ranks, the least of its own that is above 1.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import drivers
import mpirun
import pytest
from pool import Pools, PoolSpec
from worlds import Ranks, World

_BY_MPI = (*mpirun.AS_ROOT, ("POLYHVD_BACKENDS", "mpi"))
#: All tests that move tensors, and those of the way of a framework's tensors to MPI.
_NUMPY_BY_MPI = (("numpy", 1), ("numpy", 4))
_FRAMEWORKS_BY_MPI = (("torch", 3), ("mxnet", 2), ("tensorflow", 2))
#: Of each two frameworks those that are rank 0 and rank 1: each framework is both in some pair.
_PAIRS = (
    "numpy+torch",
    "torch+mxnet",
    "mxnet+tensorflow",
    "tensorflow+numpy",
    "mxnet+numpy",
    "tensorflow+torch",
)
_MOVING = ("test_allreduce", "test_by_mpi", "test_exchange", "test_gather_and_broadcast")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "ranks" not in metafunc.fixturenames:
        return
    names, sizes = [driver.name for driver in drivers.DRIVERS], None
    for mark in reversed(list(metafunc.definition.iter_markers())):  # a test's own come after its module's
        sizes = list(mark.args) if mark.name == "sizes" else sizes
        names = list(mark.args) if mark.name == "drivers" else names
    worlds = worlds_of(names, sizes)
    below = worlds_by_mpi(worlds, metafunc.definition)
    if not metafunc.definition.get_closest_marker("only_by_mpi"):
        below = [*worlds, *below]
    metafunc.parametrize("world", [pytest.param(world, marks=_marks(world)) for world in below], ids=str)


def _marks(world: World) -> list[pytest.MarkDecorator]:
    """Of two frameworks one order is tested every night only."""
    return [pytest.mark.nightly] if world.driver.count("+") == 1 and world.driver not in _PAIRS else []


def worlds_of(names: Sequence[str], sizes: Sequence[int] | None) -> list[World]:
    """Of each driver its own numbers of ranks that are the test's; if there is none, the test's."""
    worlds = []
    for name in names:
        own = drivers.get(name).sizes
        common = [size for size in own if sizes is None or size in sizes]
        common = common or list(sizes or own)
        if os.environ.get("TEST_RANKS") == "fewest":
            common = [min([size for size in common if size > 1] or common)]
        worlds += [World(name, size) for size in common]
    return worlds


def worlds_by_mpi(worlds: Sequence[World], test: pytest.Item) -> list[World]:
    if test.get_closest_marker("not_by_mpi"):
        return []
    if not mpirun.everything():
        some = _NUMPY_BY_MPI if test.path.stem in _MOVING else ()
        if test.get_closest_marker("only_by_mpi"):
            some += _FRAMEWORKS_BY_MPI
        worlds = [world for world in worlds if (world.driver, world.size) in some]
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
