"""Jobs whose ranks have different frameworks: every ordered pair, and one of each."""

from __future__ import annotations

from itertools import permutations

import collectives
import exchange
import mixed
import pytest
from worlds import Ranks

FRAMEWORKS = ("numpy", "torch", "mxnet", "tensorflow")
PAIRS = ["+".join(pair) for pair in permutations(FRAMEWORKS, 2)]
SPARSE = [*permutations(FRAMEWORKS[1:], 2), FRAMEWORKS[1:]]  # NumPy has no sparse arrays
ALL = ["+".join(FRAMEWORKS), "+".join(reversed(FRAMEWORKS))]

pytestmark = [pytest.mark.drivers(*PAIRS, *ALL), pytest.mark.not_by_mpi]


@pytest.mark.parametrize("op", ["Sum", "Average", "Max"])
def test_a_reduction_has_the_same_bits_in_every_framework(ranks: Ranks, op: str) -> None:
    ranks.run_alike(collectives.allreduce, op)


@pytest.mark.parametrize("pattern", ["growing", "one has none"])
def test_allgather_concatenates_rows_of_different_numbers(ranks: Ranks, pattern: str) -> None:
    ranks.run_alike(collectives.allgather, pattern)


def test_broadcast_returns_the_roots_values(ranks: Ranks) -> None:
    ranks.run_alike(collectives.broadcast)


@pytest.mark.parametrize("pattern", ["uneven", "all to the last"])
def test_alltoall_hands_out_rows_and_says_how_many_came(ranks: Ranks, pattern: str) -> None:
    ranks.run(exchange.alltoall, pattern, True)


def test_reducescatter_keeps_the_rows_of_each_rank(ranks: Ranks) -> None:
    ranks.run(exchange.reducescatter, "Average")


def test_groups_of_any_element_types_are_one_operation(ranks: Ranks) -> None:
    ranks.run(exchange.grouped)


def test_all_operations_may_be_in_flight_together(ranks: Ranks) -> None:
    ranks.run(exchange.everything_in_flight)


def test_ranks_without_data_stand_in_with_neutral_elements(ranks: Ranks) -> None:
    ranks.run(exchange.join)


def test_process_sets_overlap_and_come_and_go(ranks: Ranks) -> None:
    ranks.run(exchange.process_sets)


def test_calls_without_a_name_match_by_their_order(ranks: Ranks) -> None:
    ranks.run(mixed.unnamed)


def test_objects_travel_between_frameworks(ranks: Ranks) -> None:
    ranks.run(mixed.objects)


@pytest.mark.drivers(*["+".join(each) for each in SPARSE])
def test_sparse_tensors_are_summed_in_each_frameworks_form(ranks: Ranks) -> None:
    ranks.run(mixed.sparse)


def test_all_ranks_hear_of_a_disagreement(ranks: Ranks) -> None:
    ranks.run(mixed.disagreement)
