"""Tests of the backends over each transport: NumPy's ranks, laid out over hosts, or as MPI starts them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mpirun
import netns
import pytest
from fork_servers import ForkServers
from netns import Namespace
from pool import Pool, Pools, PoolSpec

_TCP = (("POLYHVD_SHARED_MEMORY", "0"),)
_CMA = (("POLYHVD_CMA", "1"),)
_MPI = (*mpirun.AS_ROOT, ("POLYHVD_BACKENDS", "mpi"))


@dataclass(frozen=True)
class Layout:
    """How ranks are laid out, and so which transports carry their data."""

    name: str
    hosts: tuple[int, ...]
    settings: tuple[tuple[str, str], ...] = ()
    shm: bool = True
    tcp: bool = True
    cma: bool = False  # sums are made in other ranks' memory
    namespaces: bool = False
    mpi: bool = False  # started by MPI's launcher, and it carries the data
    ordered: bool = True  # sums are associated in a way that is known
    #: Whether its code paths are in no other layout, nor in the parity suite's worlds. The others have the
    #: tests of what is done in many ways at once, and none of each operation by itself.
    own: bool = True

    @property
    def order(self) -> tuple[object, ...]:
        """Sorts tests so that those of one pool follow each other."""
        return ("backends", self.mpi, self.namespaces, self.name)

    @property
    def groups(self) -> Sequence[int]:
        """Numbers of ranks that share memory: what a sum's association depends on."""
        return self.hosts if self.shm else [1] * sum(self.hosts)

    def __str__(self) -> str:
        return self.name


LAYOUTS = (
    Layout("shm-2", (2,), tcp=False, own=False),  # parity's numpy-2
    Layout("shm-4", (4,), tcp=False, own=False),  # parity's numpy-4
    Layout("cma-2", (2,), _CMA, tcp=False, cma=True),
    Layout("cma-3", (3,), _CMA, tcp=False, cma=True),
    Layout("tcp-3", (3,), _TCP, shm=False, own=False),  # hosts-1+1+1 once it is connected
    Layout("hosts-1+1+1", (1, 1, 1), shm=False),
    Layout("hosts-2+1", (2, 1)),
    Layout("hosts-2+2", (2, 2)),
    Layout("hosts-3+1", (3, 1)),
    Layout("netns-1+1", (1, 1), shm=False, namespaces=True, own=False),
    Layout("netns-2+2", (2, 2), namespaces=True, own=False),
    *(
        # With everything by MPI, so is parity's numpy.
        Layout(f"mpi-{size}", (size,), _MPI, False, False, mpi=True, ordered=False, own=size == 3)
        for size in ((1, 2, 3, 4) if mpirun.everything() else (3,))
    ),
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("layouts")
        metafunc.parametrize("world", layouts(**marker.kwargs) if marker else LAYOUTS, ids=str)


def layouts(*, ranks_min: int = 1, ordered: bool = False, own: bool = False) -> list[Layout]:
    """Those of so many ranks or more, and those alone that are ``ordered``, or have code of their ``own``."""
    return [
        each
        for each in LAYOUTS
        if sum(each.hosts) >= ranks_min and each.ordered >= ordered and each.own >= own
    ]


@pytest.fixture(scope="session")
def two_hosts(pools: Pools) -> Iterator[tuple[Namespace, ...]]:
    if not netns.available():
        pytest.skip("network namespaces need root and iproute2")
    with netns.two_hosts() as hosts:
        yield hosts
        pools.close()  # before the hosts are gone


@pytest.fixture
def start(pools: Pools, fork_servers: ForkServers) -> Iterator[Callable[[PoolSpec], Pool]]:
    """Starts pools only for this test, which may damage them."""
    pools.close()  # so that nothing else runs here
    started: list[Pool] = []

    def start(spec: PoolSpec) -> Pool:
        started.append(Pool(spec, fork_servers))
        return started[-1]

    yield start
    for pool in started:
        pool.kill()


@pytest.fixture
def pool(world: Layout, pools: Pools, request: pytest.FixtureRequest) -> Pool:
    namespaces = request.getfixturevalue("two_hosts") if world.namespaces else ()
    if world.mpi and not mpirun.command():
        pytest.skip("there is no mpirun")
    below = mpirun.command() if world.mpi else ()
    return pools.get(PoolSpec("numpy", world.hosts, world.settings, namespaces, below))
