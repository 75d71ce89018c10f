"""Calls without names belong together by the order of submission alone, in every framework."""

from __future__ import annotations

import pytest
import unnamed
from worlds import Ranks

from polyhvd.collectives.adapter import Capability


@pytest.mark.sizes(2, 3)
def test_unnamed_calls_pair_by_submission_whatever_is_synchronized_first(ranks: Ranks) -> None:
    ranks.needs(Capability.ASYNC)
    ranks.run(unnamed.poll_loop)


@pytest.mark.sizes(2, 3)
def test_four_threads_with_alike_unnamed_calls_do_not_hang(ranks: Ranks) -> None:
    ranks.needs(Capability.ASYNC)
    ranks.run(unnamed.four_threads)


@pytest.mark.sizes(2, 3)
def test_unnamed_calls_of_each_kind_pair_by_themselves(ranks: Ranks) -> None:
    ranks.needs(Capability.ASYNC)
    ranks.run(unnamed.mixed_kinds)


@pytest.mark.sizes(3, 4)
def test_unnamed_calls_of_each_process_set_pair_by_themselves(ranks: Ranks) -> None:
    ranks.needs(Capability.ASYNC)
    ranks.run(unnamed.overlapping_process_sets)


@pytest.mark.sizes(2, 3)
def test_a_mismatched_unnamed_call_fails_on_all_ranks_and_no_other_does(ranks: Ranks) -> None:
    ranks.needs(Capability.ASYNC)
    for shape, dtype in ranks.run(unnamed.mismatch_in_the_middle):
        assert "Mismatched allreduce tensor shapes" in shape
        assert "float32 [3]" in shape
        assert "float32 [5]" in shape
        assert "Mismatched data types" in dtype
        assert "int32 [3]" in dtype


@pytest.mark.sizes(2, 3)
def test_unnamed_calls_are_known_in_the_second_step(ranks: Ranks) -> None:
    ranks.needs(Capability.ASYNC)
    for hits, calls in ranks.run(unnamed.warm_cache):
        assert hits >= calls, f"{hits} hits for {calls} calls"


@pytest.mark.sizes(2, 3)
def test_handles_that_are_dropped_change_no_pairing(ranks: Ranks) -> None:
    ranks.needs(Capability.ASYNC)
    ranks.run(unnamed.dropped_handles)


@pytest.mark.sizes(2, 3)
def test_four_threads_with_alike_objects_bring_the_same_ones_together_on_all_ranks(ranks: Ranks) -> None:
    first, *others = ranks.run(unnamed.four_threads_with_objects)
    assert all(other == first for other in others)


@pytest.mark.sizes(2, 3)
def test_objects_pair_after_a_rank_had_joined_and_missed_some(ranks: Ranks) -> None:
    first, *others = ranks.run(unnamed.objects_without_the_last)
    assert all(other == first for other in others)


@pytest.mark.sizes(2, 3)
def test_four_threads_may_broadcast_parameters_of_the_same_names(ranks: Ranks) -> None:
    ranks.run(unnamed.four_threads_with_models)


@pytest.mark.slow
@pytest.mark.sizes(2)
@pytest.mark.drivers("numpy")
def test_ten_thousand_objects_leave_no_memory_behind(ranks: Ranks) -> None:
    assert max(ranks.run(unnamed.objects_without_memory, deadline_s=300)) < 4 << 20
