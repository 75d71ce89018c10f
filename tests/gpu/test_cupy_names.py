"""CuPy itself, without a GPU: what the adapter uses of it exists and means what its stand-in means."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("cupy_names.py")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="cupy is not installed")
def test_the_adapter_reads_arrays_of_cupy_and_makes_them() -> None:
    """In a process of its own, which has no driver: nothing may ask for one."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "dense, strided, made" in done.stdout


def test_the_stand_in_has_no_name_that_cupy_lacks() -> None:
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("cupy is not installed")
    names = subprocess.run(
        [sys.executable, str(SCRIPT), "names"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert names.returncode == 0, names.stdout + names.stderr
