"""A number for the program of every rank, as an entry in the total order of decisions."""

from __future__ import annotations

import numpy as np
import polyhvd.numpy as hvd
import pytest

from polyhvd.runtime import current

pytestmark = pytest.mark.ranks(1, 3, framework="numpy")


def test_notice_is_seen_by_all_ranks_after_the_same_operation() -> None:
    engine = current.world().engine
    assert engine.notice == 0
    seen = []
    for step in range(200):
        if hvd.rank() == 0 and step == 100:
            engine.notify(1)
        hvd.allreduce(np.ones(3), name="x")
        seen.append(engine.notice)
    assert seen == sorted(seen)
    assert seen[99] == 0
    assert seen[-1] == 1
    assert hvd.allgather_object(seen) == hvd.size() * [seen]


def test_notice_that_has_come_is_not_seen_before_the_next_operation() -> None:
    engine = current.world().engine
    before = engine.notice
    if hvd.rank() == 0:
        engine.notify(before + 1)
    assert engine.notice == before
    hvd.barrier()
    hvd.barrier()
    assert engine.notice == before + 1


def test_later_tuning_takes_no_notice_back() -> None:
    engine = current.world().engine
    before = engine.notice
    if hvd.rank() == 0:
        tuning = engine.tuning
        engine.notify(before + 1)
        engine.tune(tuning)
        engine.notify(before)
    hvd.barrier()
    hvd.barrier()
    assert engine.notice == before + 1
    assert hvd.allgather_object(engine.tuning == engine.tuning) == hvd.size() * [True]


def test_only_rank_0_notifies() -> None:
    if hvd.rank() > 0:
        with pytest.raises(hvd.InvalidArgumentError, match=r"notify\(\): rank 0 alone does"):
            current.world().engine.notify(1)
    hvd.barrier()
