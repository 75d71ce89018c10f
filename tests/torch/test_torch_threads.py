"""DistributedOptimizers that threads of one rank use at the same time, each in its own loop."""

from __future__ import annotations

import pytest
import torch_threads_cases as cases

pytestmark = pytest.mark.ranks(2, 3, framework="torch")


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("kind", "other"),
    [
        ("plain", "plain"),
        ("two passes", "sum"),
        ("grouped", "unused"),
        ("idle", "clipped"),
        ("sparse", "closure"),
        ("compressed", "idle"),
    ],
)
def test_two_threads_train_like_one_process_each(kind: str, other: str, seed: int) -> None:
    cases.two_threads_train(kind, other, seed)


def test_the_main_thread_may_be_one_of_them() -> None:
    cases.one_of_them_is_the_main_thread()


def test_threads_may_make_their_optimizers() -> None:
    cases.each_thread_makes_its_optimizer()


def test_optimizers_may_go_from_thread_to_thread() -> None:
    cases.optimizers_go_from_thread_to_thread()


def test_a_loop_may_change_threads_and_differently_on_each_rank() -> None:
    cases.a_loop_changes_threads()


def test_an_optimizer_may_be_deleted_while_another_thread_goes_on() -> None:
    cases.an_optimizer_is_deleted_while_another_thread_goes_on()


@pytest.mark.ranks(3, 4)
def test_threads_may_share_process_sets_that_overlap_in_a_ring() -> None:
    cases.threads_of_overlapping_process_sets()


@pytest.mark.ranks(2, 3, 4)
def test_a_thread_may_have_an_optimizer_of_some_ranks() -> None:
    cases.a_thread_whose_optimizer_is_of_some_ranks()


def test_a_rank_may_join_while_threads_of_others_train() -> None:
    cases.a_rank_joins_while_threads_of_others_train()


def test_threads_meet_after_init() -> None:
    cases.other_threads_after_init()


@pytest.mark.parametrize("named", [True, False], ids=["same shapes", "other shapes"])
def test_optimizers_that_ranks_make_in_different_orders_are_an_error_on_every_rank(named: bool) -> None:
    cases.optimizers_made_in_different_orders(named)
