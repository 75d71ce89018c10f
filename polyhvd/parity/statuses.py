"""The exit statuses of ``polyhvd parity``."""

from __future__ import annotations

__all__ = ["STATUSES"]

#: By outcome, which reports name as well.
STATUSES = {
    "agree": 0,
    "differ": 1,
    "usage": 2,
    "bad-case": 3,
    "not-installed": 4,
    "rank-died": 5,
    "models": 6,
    "nan": 7,
    "batches": 8,
    "no-room": 9,
    "precision": 10,
}
