"""Keras 2, as two ranks, where it is installed; the properties stand in ranks_keras2.py."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest
from tf_jobs import checks_in, expect_clean_exit, expect_passed

SCRIPT, RANKS = "ranks_keras2.py", 2

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tf_keras") is None and not importlib.metadata.version("keras").startswith("2."),
    reason="Keras 2 (tf_keras) is not installed",
)


@pytest.mark.parametrize("check", checks_in(SCRIPT))
def test_keras2(check: str) -> None:
    expect_passed(SCRIPT, RANKS, check, legacy_keras=True)


def test_the_job_ends_cleanly() -> None:
    expect_clean_exit(SCRIPT, RANKS, legacy_keras=True)
