"""Every collective on tensors of GPUs that NCCL moves.

On the stand-ins; with POLYHVD_TEST_GPU=1, which `make test-gpu` sets, on a real GPU, which all ranks share.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import collectives
import device_arrays
import exchange
import nccl_cases as cases
import oracle
import pytest
import staged_cases
from fork_servers import ForkServers
from pool import Pool, Pools, PoolSpec
from worlds import assert_alike

LIBRARY = str(device_arrays.STAND_IN.with_name("libnccl.so.2"))
RANKS = 3
REAL = os.environ.get("POLYHVD_TEST_GPU", "0") == "1"
#: Three or four ranks of the stand-ins have a GPU each.
SETTINGS: tuple[tuple[str, str], ...] = (
    ("POLYHVD_NCCL_LIBRARY", LIBRARY),
    ("POLYHVD_STAND_IN_CUDA_DEVICES", "4"),
)
if REAL:
    SETTINGS = (
        ("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0")),
        ("NCCL_MULTI_RANK_GPU_ENABLE", "1"),
        (device_arrays.LIBRARY, "libcuda.so.1"),
    )


@pytest.fixture(autouse=True, scope="module")
def library() -> None:
    if not REAL and not Path(LIBRARY).exists():
        pytest.fail("there is no stand-in of NCCL; make stand-ins builds it", pytrace=False)


@pytest.fixture
def pool(pools: Pools) -> Pool:
    pool = pools.get(PoolSpec("numpy", (RANKS,), (*SETTINGS, ("POLYHVD_BACKENDS", "nccl"))))
    pool.run(oracle.allow_rounding_of_partial_sums)
    return pool


class Job(Protocol):
    """Starts a pool that only one test uses."""

    def __call__(self, *settings: tuple[str, str], hosts: tuple[int, ...] = (2,)) -> Pool: ...


@pytest.fixture
def job(fork_servers: ForkServers) -> Job:
    def start(*settings: tuple[str, str], hosts: tuple[int, ...] = (2,)) -> Pool:
        return Pool(PoolSpec("numpy", hosts, (*SETTINGS, *settings)), fork_servers)

    return start


@pytest.fixture
def fallback(job: Job) -> Iterator[Pool]:
    """One whose ranks have one GPU between them."""
    with job(("POLYHVD_STAND_IN_CUDA_DEVICES", "1")) as pool:
        yield pool


def test_allreduce_follows_numpy_for_every_element_type_and_operation(pool: Pool) -> None:
    pool.run(cases.allreduce)


def test_reducescatter_follows_numpy_also_where_rows_do_not_divide(pool: Pool) -> None:
    pool.run(cases.reducescatter)


def test_small_tensors_of_a_group_are_packed_and_large_ones_not(pool: Pool) -> None:
    pool.run(cases.groups)


def test_allgather_concatenates_in_rank_order(pool: Pool) -> None:
    for pattern in ("growing", "many", "one has none", "none"):
        assert_alike(pool.run(collectives.allgather, "device", pattern))


def test_broadcast_returns_the_roots_values(pool: Pool) -> None:
    assert_alike(pool.run(collectives.broadcast, "device"))


def test_alltoall_hands_out_rows(pool: Pool) -> None:
    for pattern in ("uneven", "many", "some none"):
        pool.run(exchange.alltoall, "device", pattern, True)


def test_groups_of_any_element_types_are_one_operation(pool: Pool) -> None:
    pool.run(exchange.grouped, "device")


def test_adasum_follows_its_formula(pool: Pool) -> None:
    pool.run(exchange.adasum, "device")


def test_operations_in_flight_follow_each_other_on_the_gpu(pool: Pool) -> None:
    pool.run(cases.many_in_flight)


def test_all_operations_may_be_in_flight_together(pool: Pool) -> None:
    pool.run(exchange.everything_in_flight, "device")


def test_ranks_without_data_stand_in_on_their_own_gpu(pool: Pool) -> None:
    pool.run(exchange.join, "device")


def test_process_sets_overlap_and_come_and_go(pool: Pool) -> None:
    pool.run(exchange.process_sets, "device")


def test_a_stream_that_reads_after_wait_finds_the_result(pool: Pool) -> None:
    pool.run(staged_cases.streams_in_a_ring)
    pool.run(staged_cases.default_stream)


def test_tensors_of_many_megabytes_keep_their_bytes_apart(pool: Pool) -> None:
    pool.run(staged_cases.many_rounds)


def test_what_nccl_moves_is_counted_and_not_staged(pool: Pool) -> None:
    assert pool.run(cases.routes) == [{"nccl_bytes": 4000, "staged_bytes": 0}] * RANKS


def test_what_nccl_reduces_otherwise_is_staged(pool: Pool) -> None:
    assert pool.run(cases.integers_are_staged) == [[0] * 6] * RANKS


def test_one_rank_is_a_world_too(job: Job) -> None:
    with job(("POLYHVD_BACKENDS", "nccl"), hosts=(1,)) as pool:
        pool.run(cases.groups)
        pool.run(cases.many_in_flight)
        assert pool.run(cases.routes) == [{"nccl_bytes": 4000, "staged_bytes": 0}]
