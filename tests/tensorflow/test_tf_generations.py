"""What is left of a world that has ended, as three ranks; the properties stand in ranks_generations.py."""

from __future__ import annotations

import pytest
from tf_jobs import checks_in, expect_clean_exit, expect_passed

SCRIPT, RANKS = "ranks_generations.py", 3


@pytest.mark.parametrize("check", checks_in(SCRIPT))
def test_generations(check: str) -> None:
    expect_passed(SCRIPT, RANKS, check)


def test_the_job_ends_cleanly() -> None:
    expect_clean_exit(SCRIPT, RANKS)
