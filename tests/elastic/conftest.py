"""Fixtures of the tests of elastic jobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import Launcher  # tests/harness, on the path by tests/conftest.py


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    if launcher.process is not None and launcher.process.poll() is None:
        launcher.process.kill()
        launcher.process.communicate()
