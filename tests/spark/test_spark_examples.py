"""The examples for Spark, each in a new session on this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"  # copied beside the tests
BUSY_S = 400.0


@pytest.mark.parametrize("name", ["run", pytest.param("elastic", marks=pytest.mark.nightly)])
def test_example_trains_with_a_falling_loss(name: str) -> None:
    script = [sys.executable, str(EXAMPLES / f"spark_{name}.py"), "--epochs", "10"]
    env = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(script, capture_output=True, text=True, timeout=BUSY_S, env=env)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    lines = done.stdout.splitlines()
    losses = [float(found[1]) for line in lines if (found := re.search(r"^epoch .*loss ([\d.]+)", line))]
    assert len(losses) == 10
    assert losses[-1] < losses[0] / 2
    last = re.match(r"test accuracy ([\d.]+)", lines[-1])
    assert last, lines
    assert float(last[1]) > 0.93
