"""Reductions of every framework, against NumPy: every op, element type, shape and number of ranks."""

from __future__ import annotations

import collectives
import pytest
from worlds import Ranks

from polyhvd.collectives.adapter import Capability

OPS = ("Sum", pytest.param("Average", marks=pytest.mark.every_size), "Min", "Max", "Product")


@pytest.mark.parametrize("op", OPS)
def test_allreduce_returns_the_reduction_on_every_rank(ranks: Ranks, op: str) -> None:
    ranks.run_alike(collectives.allreduce, op)


@pytest.mark.parametrize(("prescale", "postscale"), [(0.5, 1.0), (1.0, 0.25), (0.3, 0.7)])
def test_allreduce_scales_before_and_after_the_sum(ranks: Ranks, prescale: float, postscale: float) -> None:
    ranks.run_alike(collectives.allreduce, "Sum", prescale, postscale)


def test_average_is_scaled_too(ranks: Ranks) -> None:
    ranks.run_alike(collectives.allreduce, "Average", 0.5, 0.75)


@pytest.mark.parametrize("op", ["Sum", "Average", "Min", "Max", "Product"])
def test_allreduce_in_place_overwrites_its_argument(ranks: Ranks, op: str) -> None:
    ranks.needs(Capability.IN_PLACE)
    ranks.run_alike(collectives.allreduce_in_place, op)


@pytest.mark.parametrize("in_place", [False, True], ids=["new", "in_place"])
@pytest.mark.parametrize("op", ["Sum", "Average", "Max"])
def test_allreduces_in_flight_may_be_submitted_in_any_order(ranks: Ranks, op: str, in_place: bool) -> None:
    ranks.needs(Capability.ASYNC)
    if in_place:
        ranks.needs(Capability.IN_PLACE)
    ranks.run_alike(collectives.allreduce_async, op, in_place)


def test_tensors_that_are_not_dense_are_reduced_by_index_not_by_address(ranks: Ranks) -> None:
    ranks.needs(Capability.NON_CONTIGUOUS)
    ranks.run_alike(collectives.allreduce_not_dense)


def test_infinities_nans_and_signed_zeros_follow_numpy(ranks: Ranks) -> None:
    ranks.run_alike(collectives.special_values)


def test_integers_wrap_around_and_keep_their_last_digits(ranks: Ranks) -> None:
    ranks.run_alike(collectives.ends_of_ranges)


def test_numbers_of_python_and_numpy_are_reduced_as_tensors_without_dimensions(ranks: Ranks) -> None:
    ranks.run_alike(collectives.numbers)


@pytest.mark.drivers("tensorflow")  # which keeps the kernels of what runs more than once
@pytest.mark.sizes(2)
def test_tensors_are_reduced_again_in_memory_that_a_kernel_has_given_back(ranks: Ranks) -> None:
    for _ in range(3):
        ranks.run_alike(collectives.allreduce, "Max")
