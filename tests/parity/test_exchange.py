"""Exchange, scatter, groups, Adasum, join and process sets of every framework, against NumPy."""

from __future__ import annotations

import exchange
import pytest
from worlds import Ranks

from polyhvd.collectives.adapter import Capability

#: Patterns in which some rank sends or gets nothing.
_EMPTY = ("all to the last", "some none")


@pytest.mark.parametrize("pattern", [pytest.param("uneven", marks=pytest.mark.every_size), "many", *_EMPTY])
def test_alltoall_with_splits_hands_out_rows_and_says_how_many_came(ranks: Ranks, pattern: str) -> None:
    if pattern in _EMPTY:
        ranks.needs(Capability.EMPTY)
    ranks.run(exchange.alltoall, pattern, True)


def test_alltoall_without_splits_hands_out_equal_parts(ranks: Ranks) -> None:
    ranks.run(exchange.alltoall, "equal", False)


@pytest.mark.parametrize(
    "op", ["Sum", pytest.param("Average", marks=pytest.mark.every_size), "Min", "Max", "Product"]
)
def test_reducescatter_keeps_the_rows_of_each_rank(ranks: Ranks, op: str) -> None:
    ranks.run(exchange.reducescatter, op)


def test_reducescatter_scales_before_and_after_the_sum(ranks: Ranks) -> None:
    ranks.run(exchange.reducescatter, "Sum", 0.3, 0.7)


def test_groups_of_any_element_types_are_one_operation(ranks: Ranks) -> None:
    ranks.run(exchange.grouped)


@pytest.mark.every_size
def test_adasum_follows_its_formula(ranks: Ranks) -> None:
    ranks.run(exchange.adasum)


def test_all_operations_may_be_in_flight_together(ranks: Ranks) -> None:
    ranks.needs(Capability.ASYNC)
    ranks.run(exchange.everything_in_flight)


def test_many_small_gathers_and_scatters_in_flight_keep_apart(ranks: Ranks) -> None:
    ranks.needs(Capability.ASYNC)
    ranks.run_alike(exchange.many_small)


def test_ranks_without_data_stand_in_with_neutral_elements(ranks: Ranks) -> None:
    ranks.run(exchange.join)


@pytest.mark.every_size
def test_join_may_be_called_again(ranks: Ranks) -> None:
    ranks.run(exchange.join_again)


@pytest.mark.every_size
def test_process_sets_overlap_and_come_and_go(ranks: Ranks) -> None:
    ranks.run(exchange.process_sets)
