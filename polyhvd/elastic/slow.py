"""The slow ranks of an elastic job, for its program."""

from __future__ import annotations

from polyhvd.elastic import process
from polyhvd.elastic.pace import SlowRank

__all__ = ["slow_ranks"]


def slow_ranks() -> list[SlowRank]:
    """The ranks that all others wait for, step after step; the slowest first.

    A step is the time between two calls of ``commit()`` or ``check_host_updates()``. The time of a rank in
    which it does not wait for others counts: the median of its last 20 steps, or of the last five if they
    take a minute. A rank is slow if that is at least 1.5 times (``--slow-rank-factor``) that of the typical
    rank, and 10 ms more, for three seconds. A single pause makes no rank slow.

    The function returns the launcher's last report without communication. Ranks receive reports at slightly
    different times, so do not use the result for decisions that must be the same on all ranks.

    Returns:
        A list of values with ``rank``, ``host``, ``own_s`` and ``typical_s``, the seconds that a step takes
        it and the others, ``factor``, the one by the other, ``data_s``, of the first the seconds in which it
        waits for data, ``waits_for_data``, whether that is half of its excess, and ``since``, as of
        ``time.time()``. It is empty in jobs that are not elastic, and for the first steps of each world.

    Example::

        for slow in hvd.elastic.slow_ranks():
            print(f"rank {slow.rank} on {slow.host} takes {slow.factor:.1f} times as long as others")
    """
    member = process.find()
    return [] if member is None else member.slow_ranks()
