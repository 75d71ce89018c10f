"""Backward passes, handles and optimizers across shutdown() and init()."""

from __future__ import annotations

import pytest
from on_ranks import Functions
from pool import Pool

cases = Functions("torch_generations_cases")


@pytest.mark.parametrize(
    "kind", ["allreduce", "no name", "allgather", "broadcast", "alltoall", "reducescatter", "batch norm"]
)
def test_a_backward_of_the_old_world_is_lost(ranks: Pool, kind: str) -> None:
    ranks.run(cases.backward_of_the_old_world_is_lost, kind)


def test_a_second_derivative_of_the_old_world_is_lost(ranks: Pool) -> None:
    ranks.run(cases.second_derivative_of_the_old_world_is_lost)


def test_a_handle_of_the_old_world_fails(ranks: Pool) -> None:
    ranks.run(cases.handle_of_the_old_world_fails)


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_an_optimizer_whose_backward_was_lost_goes_on_in_the_new_world(ranks: Pool, op: str) -> None:
    ranks.run(cases.backward_across_a_rewiring_is_lost, op)


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_gradients_of_the_old_world_are_not_stepped_with(ranks: Pool, op: str) -> None:
    ranks.run(cases.gradients_of_the_old_world_are_not_stepped_with, op)


@pytest.mark.parametrize("groups", [0, 1])
def test_ranks_that_failed_at_different_places_meet_again(ranks: Pool, groups: int) -> None:
    ranks.run(cases.ranks_that_failed_at_different_places_meet_again, groups)
