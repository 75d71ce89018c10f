"""Fixtures of the tests of elastic jobs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fork_servers import IMPORTS, ForkServers  # tests/harness, on the path by tests/conftest.py
from launching import Launcher


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Jobs of one framework follow each other, since few fork servers live at a time."""
    places = [place for place, item in enumerate(items) if "launcher" in getattr(item, "fixturenames", ())]
    places = [place for place in places if items[place].path.parent == Path(__file__).parent]
    jobs = sorted((items[place] for place in places), key=_framework_of)
    for place, job in zip(places, jobs, strict=True):
        items[place] = job


def _framework_of(item: pytest.Item) -> str:
    """The framework in the name of a test or of its file; empty for NumPy's."""
    words = re.split(r"[\W_]+", f"{item.path.stem} {item.name}")
    found = ["tensorflow" if word == "keras" else word for word in words]
    return next((word for word in found if word in IMPORTS and word != "numpy"), "")


@pytest.fixture
def launcher(tmp_path: Path, fork_servers: ForkServers) -> Iterator[Launcher]:
    """A polyhvdrun whose ranks run in forks of the servers, unless a test chooses fresh interpreters."""
    launcher = Launcher(tmp_path, fork_servers)
    yield launcher
    if launcher.process is not None and launcher.process.poll() is None:
        launcher.process.kill()
        launcher.process.communicate()
