"""Keras and tapes, as two ranks; the properties stand in ranks_keras.py."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
from tf_jobs import checks_in, expect_clean_exit, expect_passed

SCRIPT, RANKS = "ranks_keras.py", 2


@pytest.mark.parametrize("check", checks_in(SCRIPT))
def test_keras(check: str) -> None:
    expect_passed(SCRIPT, RANKS, check)


def test_the_job_ends_cleanly() -> None:
    expect_clean_exit(SCRIPT, RANKS)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_keras_on_another_backend_is_refused_with_advice() -> None:
    job = subprocess.run(
        [sys.executable, "-c", "import polyhvd.keras"],
        env={**os.environ, "KERAS_BACKEND": "torch", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert job.returncode != 0
    assert "KERAS_BACKEND=tensorflow" in job.stderr
