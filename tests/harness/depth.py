"""How many examples and repetitions tests run: more if TEST_DEPTH is nightly."""

from __future__ import annotations

import os

__all__ = ["NIGHTLY", "repeats"]

NIGHTLY = os.environ.get("TEST_DEPTH") == "nightly"


def repeats(usually: int, nightly: int) -> int:
    """The number of examples or repetitions of a test in this run."""
    return nightly if NIGHTLY else usually
