"""Every collective on tensors of GPUs that pass through pinned memory, against NumPy and the CPU's bits."""

from __future__ import annotations

from typing import Any

import collectives
import exchange
import pytest
import staged_cases
from pool import Pool
from worlds import assert_alike


@pytest.mark.parametrize("op", ["Sum", "Average", "Min", "Max", "Product"])
def test_allreduce_returns_the_reduction_on_every_rank(pool: Pool, world: Any, op: str) -> None:
    assert_alike(pool.run(collectives.allreduce, "device", op, 0.5, 1.0, world.hosts))


def test_allreduces_may_overwrite_their_arguments_in_any_order(pool: Pool) -> None:
    assert_alike(pool.run(collectives.allreduce_async, "device", "Max", True))


@pytest.mark.sizes(2, 3)
def test_the_bits_are_those_of_the_cpus(pool: Pool) -> None:
    assert_alike(pool.run(staged_cases.same_bits_as_on_cpus))


def test_allgather_concatenates_in_rank_order(pool: Pool) -> None:
    for pattern in ("growing", "one has none"):
        assert_alike(pool.run(collectives.allgather, "device", pattern))


def test_broadcast_returns_the_roots_values(pool: Pool) -> None:
    assert_alike(pool.run(collectives.broadcast, "device"))


def test_alltoall_hands_out_rows(pool: Pool) -> None:
    for pattern in ("uneven", "some none"):
        pool.run(exchange.alltoall, "device", pattern, True)


def test_reducescatter_keeps_the_rows_of_each_rank(pool: Pool) -> None:
    for op in ("Average", "Max"):
        pool.run(exchange.reducescatter, "device", op)


def test_groups_of_any_element_types_are_one_operation(pool: Pool) -> None:
    pool.run(exchange.grouped, "device")


def test_adasum_follows_its_formula(pool: Pool) -> None:
    pool.run(exchange.adasum, "device")


@pytest.mark.sizes(2, 3)
def test_all_operations_may_be_in_flight_together(pool: Pool) -> None:
    pool.run(exchange.everything_in_flight, "device")


def test_ranks_without_data_stand_in_on_their_own_gpu(pool: Pool) -> None:
    pool.run(exchange.join, "device")


@pytest.mark.sizes(2, 3)
def test_process_sets_overlap_and_come_and_go(pool: Pool) -> None:
    pool.run(exchange.process_sets, "device")


def test_tensors_of_many_rounds_keep_their_bytes_apart(pool: Pool) -> None:
    pool.run(staged_cases.many_rounds)


@pytest.mark.sizes(2, 3)
def test_a_stream_that_reads_after_wait_finds_the_result(pool: Pool) -> None:
    pool.run(staged_cases.streams_in_a_ring)


def test_the_default_stream_takes_part_like_any_other(pool: Pool) -> None:
    pool.run(staged_cases.default_stream)


def test_another_gpu_than_the_ranks_own_is_refused(pool: Pool) -> None:
    for message in pool.run(staged_cases.second_gpu):
        assert "since its first operation" in message
        assert "set_device" in message


def test_a_consumer_of_dlpack_reads_on_a_stream_of_its_own(pool: Pool) -> None:
    pool.run(staged_cases.consumers_of_dlpack)


def test_the_bytes_that_were_staged_are_counted(pool: Pool) -> None:
    """Both ways, and nothing for tensors of the CPU."""
    assert pool.run(staged_cases.staged_bytes, 1000) == [(8000, 0)] * pool.size
