"""Allgather and broadcast of every framework, against NumPy."""

from __future__ import annotations

import collectives
import pytest
from worlds import Ranks

from polyhvd.collectives.adapter import Capability

#: Patterns in which some rank has no rows.
_EMPTY = ("one has none", "only the last has some", "none")


@pytest.mark.parametrize(
    "pattern", ["equal", pytest.param("growing", marks=pytest.mark.every_size), "many", *_EMPTY]
)
def test_allgather_concatenates_in_rank_order(ranks: Ranks, pattern: str) -> None:
    if pattern in _EMPTY:
        ranks.needs(Capability.EMPTY)
    ranks.run_alike(collectives.allgather, pattern)


def test_allgathers_in_flight_keep_their_rows_apart(ranks: Ranks) -> None:
    ranks.needs(Capability.ASYNC)
    ranks.run_alike(collectives.allgather_async)


def test_broadcast_returns_the_roots_values(ranks: Ranks) -> None:
    ranks.run_alike(collectives.broadcast)


def test_broadcast_in_place_overwrites_its_argument(ranks: Ranks) -> None:
    ranks.needs(Capability.IN_PLACE)
    ranks.run_alike(collectives.broadcast_in_place)


@pytest.mark.parametrize("in_place", [False, True], ids=["new", "in_place"])
def test_broadcasts_from_all_roots_may_be_in_flight(ranks: Ranks, in_place: bool) -> None:
    ranks.needs(Capability.ASYNC)
    if in_place:
        ranks.needs(Capability.IN_PLACE)
    ranks.run_alike(collectives.broadcast_async, in_place)
