"""What all tests share: warm pools of ranks, and the order of tests that keeps one at a time."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

# Test modules are imported by name, here and by the ranks of a pool.
_TESTS = Path(__file__).resolve().parent
for _folder in ("harness", "parity", "backends", "gpu"):
    if str(_TESTS / _folder) not in sys.path:
        sys.path.insert(0, str(_TESTS / _folder))

from fork_servers import ForkServers  # noqa: E402
from pool import Pools  # noqa: E402

from polyhvd.testing.plugin import pools_of, world_of  # noqa: E402

_SERVERS: pytest.StashKey[ForkServers] = pytest.StashKey()

# A shell without job control starts what runs in the background with Ctrl-C ignored, and every
# rank would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "sizes(*numbers): run on these numbers of ranks, or what a driver shares"
    )
    config.addinivalue_line(
        "markers", "layouts(ranks_min, ordered, own): backends' tests on these layouts only"
    )
    config.addinivalue_line("markers", "not_by_mpi: never under MPI's launcher")
    config.addinivalue_line("markers", "only_by_mpi: under MPI's launcher only")
    config.addinivalue_line("markers", "drivers(*names): run with these drivers only")
    config.addinivalue_line("markers", "slow: make slow runs it, and make test does not")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one pool follow each other; everything else keeps its place before them."""

    def pool_of(item: pytest.Item) -> tuple[object, ...]:
        world = world_of(item) or (getattr(item, "callspec", None) and item.callspec.params.get("world"))
        return (0,) if world is None else (1, *world.order)

    items.sort(key=pool_of)


def pytest_polyhvd_pools(config: pytest.Config) -> Pools:
    """Marked tests run in forks of the servers, and share their pools with tests that drive these."""
    return Pools(_servers(config))


def _servers(config: pytest.Config) -> ForkServers:
    if _SERVERS not in config.stash:
        config.stash[_SERVERS] = ForkServers()
        config.add_cleanup(config.stash[_SERVERS].close)  # after the pools' end
    return config.stash[_SERVERS]


@pytest.fixture(scope="session")
def fork_servers(pytestconfig: pytest.Config) -> ForkServers:
    """Servers in whose forks ranks begin with their framework imported."""
    return _servers(pytestconfig)


@pytest.fixture(scope="session")
def pools(pytestconfig: pytest.Config) -> Pools:
    """The ranks that stay from test to test."""
    pools = pools_of(pytestconfig)
    assert isinstance(pools, Pools)
    return pools
