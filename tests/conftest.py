"""What all tests share: warm pools of ranks, and the order of tests that keeps one at a time."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

# Test modules are imported by name, here and by the ranks of a pool.
_TESTS = Path(__file__).resolve().parent
for _folder in ("harness", "parity", "backends", "gpu"):
    if str(_TESTS / _folder) not in sys.path:
        sys.path.insert(0, str(_TESTS / _folder))

import meter  # noqa: E402
import sampling  # noqa: E402
from fork_servers import ForkServers  # noqa: E402
from pool import Pools  # noqa: E402

from polyhvd.collectives.table import generator  # noqa: E402
from polyhvd.testing.plugin import pools_of, world_of  # noqa: E402

_SERVERS: pytest.StashKey[ForkServers] = pytest.StashKey()

# A shell without job control starts what runs in the background with Ctrl-C ignored, and every
# rank would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    if _TESTS.parent == generator.ROOT:  # generated modules of a checkout may be older than the table
        generator.write(generator.ROOT / "frameworks")
    meter.register(config)
    sampling.declare(config)
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
    config.addinivalue_line("markers", "nightly: only make nightly runs it")
    config.addinivalue_line(
        "markers", "every_size: a framework's test that keeps all of its numbers of ranks"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of one pool follow each other; everything else keeps its place before them.

    Runs after the plugin, which finds out which tests run on ranks, and before pytest selects by markers.
    """
    sampling.mark_others_nightly(items)

    def pool_of(item: pytest.Item) -> tuple[object, ...]:
        world = world_of(item) or (getattr(item, "callspec", None) and item.callspec.params.get("world"))
        return (0,) if world is None else (1, *world.order)

    items.sort(key=pool_of)
    if os.environ.get("TEST_RANKS", "one") == "one":
        dropped = _other_sizes(items)
        items[:] = [item for item in items if item not in dropped]
        config.hook.pytest_deselected(items=list(dropped))


def pytest_collection_finish() -> None:
    """Exempt what is here by now from the garbage collector: some fixtures collect after every test."""
    gc.collect()
    gc.freeze()


def _other_sizes(items: list[pytest.Item]) -> set[pytest.Item]:
    """The items that are dropped so that each case of a framework runs on one of its numbers of ranks.

    A hash of the case's name chooses the number. NumPy's cases, which test the core, keep all numbers. With
    TEST_RANKS=all in the environment every framework's do.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        case = _case_without_size(item)
        if case and not item.get_closest_marker("every_size"):
            cases.setdefault(case, []).append(item)
    dropped: set[pytest.Item] = set()
    for case, sizes in cases.items():
        kept = zlib.crc32(case.encode()) % len(sizes)
        dropped.update(item for number, item in enumerate(sizes) if number != kept)
    return dropped


def _case_without_size(item: pytest.Item) -> str:
    """The name of a framework's test without its number of ranks; empty for other tests."""
    parameters = getattr(item, "callspec", None) and item.callspec.params
    if not parameters:
        return ""
    marked, parity = world_of(item), parameters.get("world")
    if marked is not None and "polyhvd_np" in parameters and marked.framework != "numpy":
        return item.nodeid.replace(f"np{parameters['polyhvd_np']}", "np")
    if parity is not None and getattr(parity, "driver", "numpy") != "numpy" and "+" not in parity.driver:
        return item.nodeid.replace(str(parity), str(parity).rpartition("-")[0])
    return ""


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


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk without room."""
    folder = tmp_path / "full"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("no file system can be mounted here")
    with (folder / "filling").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 KiB."""
    target = tmp_path / "small"
    target.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=128k,mode=0700", "polyhvd-test", str(target)]
    if os.geteuid() != 0 or subprocess.run(words, capture_output=True, check=False).returncode:
        pytest.skip("a file system can be mounted by root only, and not in every container")
    yield target
    subprocess.run(["umount", "--lazy", str(target)], check=True)
