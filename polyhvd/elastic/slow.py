"""What a program can ask about slow ranks of its elastic job."""

from __future__ import annotations

from polyhvd.elastic import process
from polyhvd.elastic.pace import SlowRank

__all__ = ["slow_ranks"]


def slow_ranks() -> list[SlowRank]:
    """The ranks that all others wait for, step after step; the slowest first.

    A step is what lies between two calls of ``commit()`` or ``check_host_updates()``. Of each rank the time
    counts in which it does not wait for others: the median of its last 20 steps, or of the last five that
    take a minute. It is slow when that is 1.5 times what it is on the typical rank, or
    ``--slow-rank-factor``, and 10 ms more, for three seconds. A single pause makes nobody slow, nor does a
    job that is slow evenly.

    It asks nobody: it returns what the launcher has told last, which one rank hears a moment earlier than
    another. So nothing that ranks have to do alike may depend on it.

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
