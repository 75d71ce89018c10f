"""Where NCCL cannot serve, and what becomes of a job in which it fails."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import nccl_cases as cases
import pytest
from launching import Launcher, wait_until
from pool import Pool
from ranks_alive import wait_until_asleep
from test_nccl import LIBRARY, REAL, SETTINGS, Job, fallback, job, library

__all__ = ["fallback", "job", "library"]

pytestmark = pytest.mark.skipif(REAL, reason="a real NCCL does not fail to order")

STAGED = {"nccl_bytes": 0, "staged_bytes": 8000}
REQUIRED = ("POLYHVD_BACKENDS", "nccl")


def test_ranks_on_one_gpu_are_staged_and_told_so_once(fallback: Pool) -> None:
    assert fallback.run(cases.routes) == [STAGED] * 2
    # The mailbox's thread writes it, perhaps after the result.
    wait_until(lambda: "through host memory" in fallback._ranks[0].shown_log(), "the warning")
    logs = [rank.shown_log() for rank in fallback._ranks]
    assert logs[0].count("rank 0 (") == 1, logs[0]
    for word in (
        "use the same GPU (GPU-5e5e5e",
        "rank 1 (",
        "NCCL_MULTI_RANK_GPU_ENABLE=1",
        "through host memory",
    ):
        assert word in logs[0]
    assert "GPU" not in logs[1]


def test_ranks_share_a_gpu_where_nccl_can_and_may(job: Job) -> None:
    with job(
        ("POLYHVD_STAND_IN_CUDA_DEVICES", "1"),
        ("POLYHVD_STAND_IN_NCCL_VERSION", "23001"),
        ("NCCL_MULTI_RANK_GPU_ENABLE", "1"),
    ) as pool:
        assert pool.run(cases.routes) == [{"nccl_bytes": 4000, "staged_bytes": 0}] * 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ((("POLYHVD_NCCL_LIBRARY", "libnccl.so.0"),), ["rank 0 (", "rank 1 (", "no NCCL", "libnccl.so.0"]),
        ((("POLYHVD_STAND_IN_NCCL_VERSION", "21304"),), ["it is NCCL 2.13.4", "2.14.0 or later"]),
        ((("POLYHVD_STAND_IN_CUDA_DEVICES", "1"),), ["use the same GPU", "assign one to each rank"]),
    ],
)
def test_where_nccl_is_required_every_rank_hears_why_it_cannot(
    job: Job, settings: tuple[tuple[str, str], ...], words: list[str]
) -> None:
    with job(REQUIRED, *settings) as pool:
        results = pool.run(cases.refused)
    for kind, message in results:
        assert kind == "InvalidArgumentError"
        for word in ("POLYHVD_BACKENDS requires nccl", *words):
            assert word in message, message


def test_the_plain_host_backend_never_opens_nccl(job: Job) -> None:
    with job(("POLYHVD_BACKENDS", "host")) as pool:
        assert pool.run(cases.routes) == [STAGED] * 2
        assert pool.run(cases.shared_objects) == [[], []]


def test_nccl_is_opened_by_the_first_operation_on_a_gpu(job: Job) -> None:
    with job(("POLYHVD_REPRODUCIBLE", "1")) as pool:
        assert pool.run(cases.shared_objects) == [[], []]
        for same, routes in pool.run(cases.same_bits_in_reproducible_mode):
            assert same
            assert routes == STAGED
        assert pool.run(cases.shared_objects) == [[LIBRARY], [LIBRARY]]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("error:1:3", ["NCCL 2.28.9", "NCCL_DEBUG=WARN"]),
        ("launch:1:3", ["ncclGroupEnd", "unhandled system error", "NCCL_DEBUG=WARN"]),
    ],
)
def test_an_error_of_nccl_is_told_on_every_rank_and_frees_its_streams(
    job: Job, fault: str, words: list[str]
) -> None:
    with job() as pool:
        results = pool.run(cases.fail_in_operation, fault)
    for _, message, seconds in results:
        for word in words:
            assert word in message, message
        assert seconds < 10


def test_an_operation_that_never_ends_is_given_up_in_time(job: Job) -> None:
    with job(("POLYHVD_DATA_TIMEOUT_SECONDS", "2")) as pool:
        for kind, message, seconds in pool.run(cases.fail_in_operation, "hang:1:3"):
            assert kind == "TransferTimeoutError"
            for word in ("process set 0 of ranks 0, 1", "DATA_TIMEOUT"):
                assert word in message, message
            # Of the operation itself, or of the next one, whose start NCCL does not end either.
            assert "has not finished for 2 s" in message or "did not finish in time" in message, message
            assert seconds < 10


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("init:1:0", ["connecting the ranks", "did not finish in time", "NCCL_SOCKET_IFNAME"]),
        ("init-error:1:0", ["rank 1 (", "connecting the ranks", "unhandled system error"]),
    ],
)
def test_a_connection_that_fails_or_hangs_is_an_error_on_every_rank(
    job: Job, fault: str, words: list[str]
) -> None:
    with job(("POLYHVD_DATA_TIMEOUT_SECONDS", "2"), ("POLYHVD_STAND_IN_NCCL_FAULT", fault)) as pool:
        for _, message in pool.run(cases.refused):
            for word in words:
                assert word in message, message


def test_gpus_finish_their_work_after_the_coordinator_has_shut_down(job: Job, tmp_path: Path) -> None:
    with job(hosts=(3,)) as pool:
        assert pool.run(cases.leave_while_streams_work, str(tmp_path)) == [6.0] * 3


def test_the_death_of_a_rank_frees_the_streams_of_the_others_within_a_second(job: Job) -> None:
    with job(hosts=(3,)) as pool:
        pool.start(cases.die_while_others_wait, 1)
        for rank in range(3):
            pool.note(rank)
        for rank in (0, 2):
            wait_until_asleep(pool.pids[rank])
        killed = time.monotonic()
        pool.signal(1, signal.SIGKILL)
        for rank in (0, 2):
            message, freed = pool.answer(rank)
            assert "rank 1" in message
            assert "was lost" in message
            assert freed - killed < 1.0 + 0.5


LOSES_A_RANK_WHILE_GPUS_WAIT = """
import ctypes, os, signal, time
from pathlib import Path
import numpy as np, polyhvd.numpy as hvd
hvd.init()
os.environ["POLYHVD_LOCAL_RANK"] = str(hvd.rank())  # has a GPU each
import device_collectives as gpu
from device_arrays import DeviceArray
state = hvd.elastic.ArrayState(w=np.zeros(10, np.float32), step=0)
arrays = []  # to free one would wait for the GPU

@hvd.elastic.run
def train(state):
    while state.step < 6:
        arrays.append(DeviceArray.from_numpy(np.ones(10, np.float32)))
        arrays.append(gpu.allreduce(arrays[-1], name="gradient", op=hvd.Sum))
        if state.step == 3 and hvd.size() == 3:
            Path(FOLDER, str(hvd.rank())).touch()
            while hvd.rank() == 1:
                if len(os.listdir(FOLDER)) == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
        state.w += arrays[-1].to_numpy()
        state.step += 1
        state.commit()

train(state)
print("end", state.w[0], hvd.size(), flush=True)
"""


def test_an_elastic_state_does_not_commit_results_that_a_gpu_has_not_made(tmp_path: Path) -> None:
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    source = LOSES_A_RANK_WHILE_GPUS_WAIT.replace("FOLDER", repr(str(ranks)))
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    env = {**dict(SETTINGS), **paths, "POLYHVD_STAND_IN_NCCL_FAULT": "hang:1:4"}
    status, out, err = Launcher(tmp_path).run("-np", "3", "--min-np", "2", source=source, env=env)
    assert status == 0, err
    # Three steps of three ranks, and three of two.
    assert re.findall(r"end .*", out) == ["end 15.0 2"] * 2, out + err
