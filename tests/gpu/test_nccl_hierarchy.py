"""Allreduce that NCCL does within hosts, and CPUs between them: on the stand-ins, two hosts of two ranks."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import exchange
import nccl_cases as cases
import oracle
import pytest
import staged_cases
from launching import wait_until
from pool import Pool, Pools, PoolSpec
from test_nccl import REAL, SETTINGS, Job, job, library

__all__ = ["job", "library"]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(REAL, reason="several hosts would have to share one GPU")]

BY_LEVELS = ("POLYHVD_HIERARCHICAL_ALLREDUCE", "1")
HOSTS = (2, 2)
RANKS = sum(HOSTS)
#: Of 1000 floats, with what fills a multiple of 128 bytes a rank: a half goes up and comes back.
BYTES = {"nccl_bytes": 4000, "staged_bytes": 4096}


@pytest.fixture
def pool(pools: Pools) -> Pool:
    pool = pools.get(PoolSpec("numpy", HOSTS, (*SETTINGS, BY_LEVELS)))
    pool.run(oracle.allow_rounding_of_partial_sums)
    return pool


@pytest.fixture
def uneven(job: Job) -> Iterator[Pool]:
    with job(BY_LEVELS, hosts=(2, 1)) as pool:
        yield pool


def test_allreduce_follows_numpy_for_every_element_type_and_operation(pool: Pool) -> None:
    pool.run(cases.allreduce)


def test_each_rank_moves_its_part_between_hosts(pool: Pool) -> None:
    assert pool.run(cases.routes) == [BYTES] * RANKS


def test_tensors_of_any_size_travel_together(pool: Pool) -> None:
    pool.run(cases.groups)


def test_tensors_of_many_megabytes_keep_their_bytes_apart(pool: Pool) -> None:
    pool.run(staged_cases.many_rounds)


def test_what_nccl_reduces_otherwise_is_staged_beside_it(pool: Pool) -> None:
    assert pool.run(cases.integers_are_staged) == [[0] * 6] * RANKS
    pool.run(exchange.grouped, "device")


def test_operations_in_flight_follow_each_other_on_the_gpu(pool: Pool) -> None:
    pool.run(cases.many_in_flight)


def test_other_collectives_take_the_way_of_all_ranks_together_with_it(pool: Pool) -> None:
    pool.run(exchange.everything_in_flight, "device")


def test_ranks_without_data_stand_in_on_their_own_gpu(pool: Pool) -> None:
    pool.run(exchange.join, "device")


def test_process_sets_have_levels_where_their_ranks_lie_so(pool: Pool) -> None:
    pool.run(exchange.process_sets, "device")


def test_a_stream_that_reads_after_wait_finds_the_result(pool: Pool) -> None:
    pool.run(staged_cases.streams_in_a_ring)
    pool.run(staged_cases.default_stream)


def test_bits_do_not_change_from_run_to_run(pool: Pool) -> None:
    first, *others = pool.run(cases.bits_of_sums)
    assert others == [first] * (RANKS - 1)
    assert pool.run(cases.bits_of_sums) == [first] * RANKS


def test_sums_of_the_reproducible_mode_are_the_hosts(job: Job) -> None:
    with job(BY_LEVELS, ("POLYHVD_REPRODUCIBLE", "1"), hosts=HOSTS) as pool:
        for same, routes in pool.run(cases.same_bits_in_reproducible_mode):
            assert same
            assert routes["nccl_bytes"] == 0


def test_hosts_of_different_size_are_connected_by_nccl_and_told_so(uneven: Pool) -> None:
    assert uneven.run(cases.routes) == [{"nccl_bytes": 4000, "staged_bytes": 0}] * 3
    said = "POLYHVD_HIERARCHICAL_ALLREDUCE has no effect"
    wait_until(lambda: said in uneven._ranks[0].shown_log(), "the warning, which the mailbox's thread writes")
    logs = [rank.shown_log() for rank in uneven._ranks]
    assert not any("HIERARCHICAL" in log for log in logs[1:])


def test_the_ranks_of_one_host_need_no_levels(job: Job) -> None:
    with job(BY_LEVELS, hosts=(2,)) as pool:
        assert pool.run(cases.routes) == [{"nccl_bytes": 4000, "staged_bytes": 0}] * 2


def test_the_death_of_a_rank_on_another_host_frees_the_streams(job: Job) -> None:
    with job(BY_LEVELS, hosts=HOSTS) as pool:
        pool.start(cases.die_between_operations, 3)
        for rank in range(4):
            pool.note(rank)
        killed = time.monotonic()
        pool.signal(3, signal.SIGKILL)
        for rank in range(3):
            message, raised = pool.answer(rank)
            assert "rank 3" in message
            assert "was lost" in message
            assert raised - killed < 10


@pytest.mark.parametrize(
    ("fault", "word"), [("hang:1:3", "did not finish the earlier work"), ("error:1:3", "NCCL_DEBUG=WARN")]
)
def test_a_fault_of_nccl_within_hosts_is_told_on_every_rank(job: Job, fault: str, word: str) -> None:
    with job(BY_LEVELS, ("POLYHVD_DATA_TIMEOUT_SECONDS", "3"), hosts=HOSTS) as pool:
        for _, message, seconds in pool.run(cases.fail_in_operation, fault):
            assert word in message
            assert seconds < 15
