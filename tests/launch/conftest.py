"""Fixtures of the launcher's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import Launcher, World  # tests/harness, on the path by tests/conftest.py

from polyhvd import bootstrap


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    if launcher.process is not None and launcher.process.poll() is None:
        launcher.process.kill()
        launcher.process.communicate()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(bootstrap, "_segment_bytes", lambda ranks: 4096 * ranks)
    world = World()
    yield world
    world.close()
