"""Callbacks for rates and checkpoints, of Keras 3 and of Keras 2; see ranks_schedules.py."""

from __future__ import annotations

import pytest
from tf_jobs import LEGACY, checks_in, expect_clean_exit, expect_passed

SCRIPT, RANKS = "ranks_schedules.py", 2


@pytest.mark.parametrize("legacy", LEGACY)
@pytest.mark.parametrize("check", checks_in(SCRIPT))
def test_schedules(check: str, legacy: bool) -> None:
    expect_passed(SCRIPT, RANKS, check, legacy_keras=legacy)


@pytest.mark.parametrize("legacy", LEGACY)
def test_the_job_ends_cleanly(legacy: bool) -> None:
    expect_clean_exit(SCRIPT, RANKS, legacy_keras=legacy)
