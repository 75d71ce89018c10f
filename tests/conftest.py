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

import ranks_plugin  # noqa: E402

# A shell without job control starts what runs in the background with Ctrl-C ignored, and every
# rank would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ranks_plugin, "ranks")
    config.addinivalue_line(
        "markers", "sizes(*numbers): run on these numbers of ranks, or what a driver shares"
    )
    config.addinivalue_line(
        "markers", "layouts(ranks_min, ordered, own): backends' tests on these layouts only"
    )
    config.addinivalue_line("markers", "not_by_mpi: never under MPI's launcher")
    config.addinivalue_line("markers", "only_by_mpi: under MPI's launcher only")
    config.addinivalue_line("markers", "drivers(*names): run with these drivers only")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one pool follow each other; everything else keeps its place before them."""

    def pool_of(item: pytest.Item) -> tuple[object, ...]:
        world = getattr(item, "callspec", None) and item.callspec.params.get("world")
        return (0,) if world is None else (1, *world.order)

    items.sort(key=pool_of)
