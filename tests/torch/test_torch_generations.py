"""Backward passes, handles and optimizers across shutdown() and init()."""

from __future__ import annotations

import pytest
import torch_generations_cases as cases

pytestmark = pytest.mark.ranks(2, 3, framework="torch")


@pytest.mark.parametrize(
    "kind", ["allreduce", "no name", "allgather", "broadcast", "alltoall", "reducescatter", "batch norm"]
)
def test_a_backward_of_the_old_world_is_lost(kind: str) -> None:
    cases.backward_of_the_old_world_is_lost(kind)


def test_a_second_derivative_of_the_old_world_is_lost() -> None:
    cases.second_derivative_of_the_old_world_is_lost()


def test_a_handle_of_the_old_world_fails() -> None:
    cases.handle_of_the_old_world_fails()


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_an_optimizer_whose_backward_was_lost_goes_on_in_the_new_world(op: str) -> None:
    cases.backward_across_a_rewiring_is_lost(op)


@pytest.mark.parametrize("shared", [False, True], ids=["one optimizer", "two that share parameters"])
@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_gradients_of_the_old_world_are_not_stepped_with(op: str, shared: bool) -> None:
    cases.gradients_of_the_old_world_are_not_stepped_with(op, shared)


@pytest.mark.parametrize("groups", [0, 1])
def test_ranks_that_failed_at_different_places_meet_again(groups: int) -> None:
    cases.ranks_that_failed_at_different_places_meet_again(groups)
