"""What the ranks of pools do for the tests of this folder."""

from __future__ import annotations

import drivers

__all__ = ["counters"]


def counters(name: str) -> dict[str, int]:
    """Counters of this rank."""
    found: dict[str, int] = drivers.get(name).hvd.counters()
    return found
