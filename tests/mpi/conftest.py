"""Tests of jobs under MPI's launcher; without one they are skipped."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

_FOLDER = str(Path(__file__).resolve().parent)
if _FOLDER not in sys.path:
    sys.path.insert(0, _FOLDER)

import mpirun  # noqa: E402


@pytest.fixture(autouse=True)
def _launcher() -> None:
    if not mpirun.command():
        pytest.skip("there is no mpirun")


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Make a script of some source."""

    def make(source: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(source)
        return path

    return make
