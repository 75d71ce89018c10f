"""Keras and tapes, as two ranks; the properties stand in ranks_keras.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tf_jobs import checks_in, expect_clean_exit, expect_passed

SCRIPT, RANKS = "ranks_keras.py", 2


@pytest.mark.parametrize("check", checks_in(SCRIPT))
def test_keras(check: str) -> None:
    expect_passed(SCRIPT, RANKS, check)


def test_the_job_ends_cleanly() -> None:
    expect_clean_exit(SCRIPT, RANKS)


def test_keras_on_another_backend_is_refused_with_advice(tmp_path: Path) -> None:
    """With a stand-in for Keras, since JAX is not installed here."""
    (tmp_path / "keras.py").write_text("class backend:\n    backend = staticmethod(lambda: 'jax')\n")
    job = subprocess.run(
        [sys.executable, "-c", "import polyhvd.keras"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert job.returncode != 0
    assert "runs on jax: set KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch" in job.stderr
