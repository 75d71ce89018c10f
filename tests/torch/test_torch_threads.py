"""DistributedOptimizers that threads of one rank use at the same time, each in its own loop."""

from __future__ import annotations

import signal

import pytest
from fork_servers import ForkServers
from on_ranks import Functions
from pool import Pool, PoolSpec

cases = Functions("torch_threads_cases")


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("seed", range(2))
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
def test_two_threads_train_like_one_process_each(ranks: Pool, kind: str, other: str, seed: int) -> None:
    ranks.run(cases.two_threads_train, kind, other, seed)


def test_the_main_thread_may_be_one_of_them(ranks: Pool) -> None:
    ranks.run(cases.one_of_them_is_the_main_thread)


def test_threads_may_make_their_optimizers(ranks: Pool) -> None:
    ranks.run(cases.each_thread_makes_its_optimizer)


def test_optimizers_may_go_from_thread_to_thread(ranks: Pool) -> None:
    ranks.run(cases.optimizers_go_from_thread_to_thread)


def test_a_loop_may_change_threads_and_differently_on_each_rank(ranks: Pool) -> None:
    ranks.run(cases.a_loop_changes_threads)


def test_an_optimizer_may_be_deleted_while_another_thread_goes_on(ranks: Pool) -> None:
    ranks.run(cases.an_optimizer_is_deleted_while_another_thread_goes_on)


@pytest.mark.sizes(3, 4)
def test_threads_may_share_process_sets_that_overlap_in_a_ring(ranks: Pool) -> None:
    ranks.run(cases.threads_of_overlapping_process_sets)


@pytest.mark.sizes(2, 3, 4)
def test_a_thread_may_have_an_optimizer_of_some_ranks(ranks: Pool) -> None:
    ranks.run(cases.a_thread_whose_optimizer_is_of_some_ranks)


def test_a_rank_may_join_while_threads_of_others_train(ranks: Pool) -> None:
    ranks.run(cases.a_rank_joins_while_threads_of_others_train)


def test_threads_meet_after_init(ranks: Pool) -> None:
    ranks.run(cases.other_threads_after_init)


@pytest.mark.parametrize("named", [True, False], ids=["same shapes", "other shapes"])
def test_optimizers_that_ranks_make_in_different_orders_are_an_error_on_every_rank(
    ranks: Pool, named: bool
) -> None:
    ranks.run(cases.optimizers_made_in_different_orders, named)


@pytest.mark.parametrize("size", [2, 3])
def test_a_lost_rank_is_an_error_in_both_threads(fork_servers: ForkServers, size: int) -> None:
    victim = size - 1
    with Pool(PoolSpec("torch", (size,)), fork_servers) as pool:
        pool.start(cases.threads_that_lose_a_rank, victim)
        for _ in range(2):
            pool.note(victim)
        pool.signal(victim, signal.SIGKILL)
        for rank in range(victim):
            assert all(f"rank {victim}" in text for text in pool.answer(rank))
