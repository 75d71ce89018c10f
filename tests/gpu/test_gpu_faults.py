"""What becomes of a job whose GPU, driver or ranks fail while tensors of GPUs are under way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import gpu_fault_cases as cases
import pytest
from fork_servers import ForkServers
from pool import Pool, PoolSpec

_FAILS = "POLYHVD_STAND_IN_CUDA_FAIL"
_RANKS = 2


class Job(Protocol):
    """Starts a pool that only one test uses."""

    def __call__(self, *settings: tuple[str, str]) -> Pool: ...


@pytest.fixture
def job(fork_servers: ForkServers) -> Job:
    return lambda *settings: Pool(PoolSpec("numpy", (_RANKS,), settings), fork_servers)


def test_a_rank_that_dies_in_a_transfer_is_named_by_the_others(job: Job) -> None:
    with job() as pool:
        pool.start(cases.die_in_transfer, 1)
        message, usable = pool.answer(0)
        assert "rank 1" in message
        assert "was lost" in message
        assert usable


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("cuMemcpyDtoHAsync_v2:10", ["cuMemcpyDtoHAsync", "CUDA_ERROR_ILLEGAL_ADDRESS", "compute-sanitizer"]),
        ("cuEventQuery:5", ["cuEventQuery", "CUDA_ERROR_ILLEGAL_ADDRESS"]),
        ("cuMemHostAlloc:1:2", ["cuMemHostAlloc", "4194304 bytes", "out of memory", "free some"]),
    ],
)
def test_an_error_of_the_driver_is_told_on_every_rank(job: Job, call: str, words: Sequence[str]) -> None:
    with job() as pool:
        messages = pool.run(cases.fail_in_transfer, 1, _FAILS, call)
    for message in messages:
        for word in ("rank 1", "GPU 1", *words):
            assert word in message, message


def test_without_a_driver_a_tensor_on_a_gpu_is_refused_and_the_job_goes_on(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").touch()  # found before any other, and no library
    # The loader reads this variable when a process starts: ranks cannot be forks.
    with Pool(PoolSpec("numpy", (_RANKS,), (("LD_LIBRARY_PATH", str(tmp_path)),))) as pool:
        for rank, message in enumerate(pool.run(cases.refused_without_driver)):
            for word in (f"rank {rank}", "libcuda.so.1", "cannot be loaded", "move them to the CPU"):
                assert word in message, message


def test_a_driver_without_a_gpu_is_refused_with_its_own_words(job: Job) -> None:
    with job(("POLYHVD_STAND_IN_CUDA_DEVICES", "0")) as pool:
        for message in pool.run(cases.refused_without_gpu):
            for word in ("does not start", "no CUDA-capable device", "CUDA_VISIBLE_DEVICES"):
                assert word in message, message


def test_jobs_on_cpus_never_load_the_driver(job: Job) -> None:
    with job() as pool:
        assert pool.run(cases.libraries_after_work_on_cpus) == [[]] * _RANKS
