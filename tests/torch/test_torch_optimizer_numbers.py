"""DistributedOptimizer where wrong numbers would go unnoticed: closures, hooks, leftover gradients."""

from __future__ import annotations

import pytest
import torch_optimizer_numbers_cases as cases

import polyhvd

pytestmark = pytest.mark.ranks(2, 3, framework="torch")


@pytest.mark.parametrize("kind", ["average", "sum", "grouped", "double"])
def test_line_searches_take_the_same_steps_on_every_rank(kind: str) -> None:
    cases.line_searches_branch_alike(kind)


@pytest.mark.parametrize("kind", ["tensor", "sum", "number", "none on one rank", "none", "no loss", "half"])
def test_a_closure_returns_the_joint_loss(kind: str) -> None:
    cases.closures_return_the_joint_loss(kind)


def test_a_closure_outside_of_the_process_set_keeps_its_loss() -> None:
    cases.closures_outside_of_the_process_set_keep_their_loss()


@pytest.mark.parametrize("kind", ["in place", "replaced", "removed", "grouped", "compressed", "on one rank"])
def test_a_hook_that_changes_a_gradient_on_its_way_is_an_error(kind: str) -> None:
    cases.hooks_registered_later_are_seen(kind)


def test_hooks_that_were_there_before_take_part_in_the_reduction() -> None:
    cases.hooks_registered_before_are_reduced()


def test_gradients_may_be_parts_of_one_buffer() -> None:
    cases.gradients_may_lie_in_one_buffer()


@pytest.mark.parametrize("used_by", ["nobody", "the first", "the last", "all but the first", "everyone"])
@pytest.mark.parametrize("kind", ["sum", "average", "two passes", "grouped", "compressed"])
def test_a_gradient_that_is_left_over_counts_once(kind: str, used_by: str) -> None:
    cases.gradients_are_left_over(kind, used_by)


@pytest.mark.parametrize("how", ["replaced", "overwritten"])
def test_a_gradient_that_is_written_by_hand_in_each_step_is_added_up(how: str) -> None:
    cases.gradients_written_by_hand_are_sums(how)


def test_leftovers_count_once_in_a_process_set() -> None:
    cases.leftovers_in_a_process_set()


def test_sparse_leftovers_count_once() -> None:
    cases.sparse_leftovers()


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("kind", ["average", "sum", "grouped"])
def test_process_sets_may_overlap_in_a_ring(kind: str) -> None:
    cases.process_sets_in_a_ring(kind)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("gone_bytes_max", [0, 8192])
def test_a_rank_that_only_joins_knows_as_many_optimizers_as_the_others(gone_bytes_max: int) -> None:
    cases.a_rank_that_only_joins_keeps_the_same_books(gone_bytes_max)


@pytest.mark.parametrize("joined", [0, -1], ids=["the first", "the last"])
@pytest.mark.ranks(2, 3, 4)
def test_process_sets_can_be_added_while_a_rank_has_joined(joined: int) -> None:
    cases.process_sets_are_added_while_a_rank_has_joined(joined % polyhvd.size())


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_compiled_autograd_trains_like_one_process(op: str) -> None:
    cases.compiled_autograd_trains(op)


@pytest.mark.parametrize("kind", ["average", "sum", "grouped"])
def test_sparse_gradients_that_travel_dense_come_back_sparse(kind: str) -> None:
    cases.sparse_gradients_come_back_sparse(kind)


def test_a_frozen_parameter_may_be_of_integers() -> None:
    cases.frozen_integers_are_left_alone()


def test_leftovers_are_clipped_with_the_others() -> None:
    cases.leftovers_are_clipped_with_the_others()
