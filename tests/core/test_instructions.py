"""The instructions from submit to done do not become more unnoticed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # for benchmarks, which is not installed

from benchmarks import instructions  # noqa: E402


@pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in ("valgrind", "readelf")), reason="needs valgrind and binutils"
)
@pytest.mark.skipif(not instructions.PROGRAM.exists(), reason="needs what make core builds")
def test_a_small_allreduce_takes_no_more_instructions_than_before() -> None:
    kept = instructions.kept()
    found = instructions.measured(kept)
    if found["compiler"] != kept["compiler"]:
        pytest.skip(f"compiled by {found['compiler']}; the kept counts are of {kept['compiler']}")
    assert not instructions.risen(found, kept)


def test_a_count_that_has_risen_is_reported() -> None:
    before = {"by_ranks": {"1": 1000, "2": 2000}}
    assert instructions.risen({"by_ranks": {"1": 1029, "2": 2599}}, before) == []
    (line,) = instructions.risen({"by_ranks": {"1": 1031, "2": 2000}}, before)
    assert line.startswith("1031 instructions by 1 ranks, 1000 before")
