"""Many process sets, at one time and one after the other; and names that are too long."""

from __future__ import annotations

import itertools

import numpy as np
import polyhvd.numpy as hvd
import pytest
from pool import Pool, PoolSpec

pytestmark = pytest.mark.slow

#: More than have a place at one time, so that each place has had several sets.
_SETS = 1100


def add_and_remove() -> None:
    """Each set has other members than the one before it at its place, and leaves no bytes behind."""
    size, rank = hvd.size(), hvd.rank()
    everyone = range(size)
    choices = [c for k in range(1, size) for c in itertools.combinations(everyone, k)]
    for i in range(_SETS):
        members = choices[i % len(choices)]
        chosen = hvd.add_process_set(list(members))
        if chosen.included():
            total = hvd.allreduce(np.full(5 + i, rank + i, np.float32), op=hvd.Sum, process_set=chosen)
            assert (total == sum(r + i for r in members)).all(), i
            sent = hvd.broadcast(np.full(3000, rank + i, np.float32), members[0], process_set=chosen)
            assert (sent == members[0] + i).all(), i
        assert hvd.remove_process_set(chosen) is True


@pytest.mark.layouts(ranks_min=2, own=True)  # one rank has no process sets but the global one
def test_process_sets_come_and_go_more_often_than_there_are_places(pool: Pool) -> None:
    pool.run(add_and_remove)


def add_a_thousand() -> None:
    """Ten ranks, whose subsets they are; each set has bytes of its own."""
    size, rank = hvd.size(), hvd.rank()
    chosen = [
        hvd.add_process_set([r for r in range(size) if bits >> r & 1]) for bits in range(1, (1 << size) - 1)
    ]
    for number, process_set in enumerate(chosen):
        if number % 100 == 0 and process_set.included():
            total = hvd.allreduce(np.full(9, rank, np.float32), op=hvd.Sum, process_set=process_set)
            assert (total == sum(process_set.ranks)).all()
    assert len(chosen) == 1022


def test_a_thousand_process_sets_exist_at_one_time() -> None:
    with Pool(PoolSpec("numpy", (10,))) as pool:
        pool.run(add_a_thousand)


def refuse_long_names() -> None:
    """Nothing is sent: the next operation works, and a name of just the length does."""
    tensor = np.ones(3, np.float32)
    with pytest.raises(hvd.InvalidArgumentError, match=r"the name has 4097 bytes; at most 4096"):
        hvd.allreduce(tensor, name="x" * 4097)
    with pytest.raises(
        hvd.InvalidArgumentError, match=r"^allreduce 'x\u00e9+\.\.\.': the name has 6001 bytes"
    ):
        hvd.allreduce_(tensor, name="x" + "\u00e9" * 3000)
    assert (hvd.allreduce(tensor, name="x" * 4096, op=hvd.Sum) == hvd.size()).all()


def test_names_over_four_kibibytes_are_refused_at_submission(pool: Pool) -> None:
    pool.run(refuse_long_names)
