"""Fixtures of the launcher's tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import Launcher, World  # tests/harness, on the path by tests/conftest.py

from polyhvd.runtime import bootstrap


@pytest.fixture(autouse=True)
def no_signal_is_ignored() -> Iterator[None]:
    """What ignores SIGINT or SIGHUP, such as a script in the background, would have polyhvdrun do so."""
    former = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number in [n for n, handler in former.items() if handler == signal.SIG_IGN]:
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in former.items():
        signal.signal(number, handler)


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
