"""CuPy itself, without a GPU: what the adapter uses of it exists and means what its stand-in means."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("cupy_names.py")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("part", ["arrays", "names"])
def test_what_is_used_of_cupy_is_there_and_means_the_same(part: str) -> None:
    """In a process of its own, which has no driver: nothing may ask for one."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), part],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{part} compared" in done.stdout
