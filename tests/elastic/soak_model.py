"""What soak_job.py trains in integers, and soak.py computes again from the rows alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

INTEGERS = 257
_PRIME = (1 << 31) - 1


def integers(rows: Sequence[int]) -> Any:
    """What rows contribute to a step."""
    numbers = np.asarray(rows, np.int64)[:, None] + 1
    return (numbers * (numbers + np.arange(INTEGERS)) % 1009).sum(0).astype(np.int64)


def advanced(w: Any, total: Any) -> Any:
    """The weights after a step whose rows have contributed so much: they depend on the order of steps."""
    return (31 * w + total) % _PRIME
