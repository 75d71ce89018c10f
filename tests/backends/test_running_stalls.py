"""Reports of a running operation that makes no progress, and the errors that end it."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable

import numpy as np
import polyhvd.numpy as hvd
import pytest
from pool import Pool, PoolSpec

from polyhvd.collectives.process_sets import ProcessSet
from polyhvd.testing import worker

REPORT_S = 40.0  # for liveness only
WARN = ("HOROVOD_STALL_CHECK_TIME_SECONDS", "1")
SHUTDOWN = ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "2")
LAYOUTS = {
    "shm": PoolSpec("numpy", (3,), (WARN,)),
    "staged": PoolSpec("numpy", (2,), (WARN, ("POLYHVD_CMA", "0"))),
    "tcp": PoolSpec("numpy", (2,), (WARN, ("POLYHVD_SHARED_MEMORY", "0"))),
    "hosts": PoolSpec("numpy", (2, 2), (WARN,)),
}
ELEMENTS = 8 << 20  # long enough for a rank to stop itself in the middle


@pytest.fixture
def start(start: Callable[[PoolSpec], Pool]) -> Callable[..., Pool]:
    def start_layout(layout: str, *settings: tuple[str, str]) -> Pool:
        spec = LAYOUTS[layout]
        return start(PoolSpec("numpy", spec.hosts, (*spec.settings, *settings)))

    return start_layout


class Records(logging.Handler):
    """Tells the pool what is logged of operations that run."""

    def emit(self, record: logging.LogRecord) -> None:
        if "makes no progress" in record.getMessage():
            worker.note(record.getMessage())


def reduce_with_one_who_stops(stopped: int, members: list[int] | None = None) -> tuple[str, str]:
    """The rank that stops does so when it runs the operation, which the others then cannot finish."""
    logging.getLogger("polyhvd").addHandler(Records())
    chosen = hvd.add_process_set(ProcessSet(members)) if members else hvd.global_process_set
    ranks = members or list(range(hvd.size()))
    if hvd.rank() not in ranks:
        worker.note("outside")
        return "outside", ""
    tensor = np.full(ELEMENTS, hvd.rank() + 1, np.float32)
    hvd.allreduce(np.ones(1), name="warm", process_set=chosen)
    batches = hvd.counters()["batches"]
    handle = hvd.allreduce_async(tensor, name="big", op=hvd.Sum, process_set=chosen)
    if hvd.rank() == stopped:
        while hvd.counters()["batches"] == batches:
            pass
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        result = hvd.synchronize(handle)
    except hvd.HorovodInternalError as error:
        return type(error).__name__, str(error)
    assert (result == sum(rank + 1 for rank in ranks)).all()
    return "reduced", ""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_that_stops_in_a_transfer_is_reported_and_may_go_on(
    layout: str, start: Callable[..., Pool]
) -> None:
    pool = start(layout)
    stopped = pool.size - 1
    pool.start(reduce_with_one_who_stops, stopped)
    teller = stopped - 1 if layout == "hosts" else 0  # the first that can tell, of its host
    report = pool.note(teller, REPORT_S)
    pool.signal(stopped, signal.SIGCONT)
    assert [pool.answer(rank)[0] for rank in range(pool.size)] == ["reduced"] * pool.size
    assert "a running operation makes no progress: allreduce 'big', for " in report
    assert f"rank {teller} waits for rank {stopped} (pid {pool.pids[stopped]} on " in report
    assert f"\n  rank {stopped} (pid {pool.pids[stopped]} on " in report
    assert f"): stopped by a signal, such as SIGSTOP or Ctrl-Z; `kill -CONT {pool.pids[stopped]}`" in report


def test_other_hosts_say_whom_they_wait_for(start: Callable[..., Pool]) -> None:
    pool = start("hosts")
    pool.start(reduce_with_one_who_stops, 3)
    report = pool.note(0, REPORT_S)
    pool.signal(3, signal.SIGCONT)
    assert [pool.answer(rank)[0] for rank in range(4)] == ["reduced"] * 4
    assert "rank 0 waits for rank " in report
    assert "no other rank of this host is stopped or dead" in report


def test_rank_0_may_be_the_one_that_stops(start: Callable[..., Pool]) -> None:
    pool = start("shm")
    pool.start(reduce_with_one_who_stops, 0)
    report = pool.note(1, REPORT_S)
    pool.signal(0, signal.SIGCONT)
    assert [pool.answer(rank)[0] for rank in range(3)] == ["reduced"] * 3
    assert f"\n  rank 0 (pid {pool.pids[0]} on " in report


def reduce_without_rank_0() -> tuple[str, str]:
    """Rank 0 stops itself before an operation, which without it is not agreed on."""

    class Stalls(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "stalled: " in record.getMessage():
                worker.note(record.getMessage())

    logging.getLogger("polyhvd").addHandler(Stalls())
    hvd.allreduce(np.ones(1), name="warm")
    if hvd.rank() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        hvd.allreduce(np.ones(1), name="late")
    except hvd.HorovodInternalError as error:
        return type(error).__name__, str(error)
    return "reduced", ""


def test_rank_0_that_stops_between_operations_is_reported_and_may_go_on(start: Callable[..., Pool]) -> None:
    pool = start("shm")
    pool.start(reduce_without_rank_0)
    reports = [pool.note(rank, REPORT_S) for rank in (1, 2)]
    pool.signal(0, signal.SIGCONT)
    assert [pool.answer(rank)[0] for rank in range(3)] == ["reduced"] * 3
    for rank, report in enumerate(reports, 1):
        assert report.startswith(f"stalled: rank {rank} waits for rank 0 in allreduce 'late', for ")
        assert f"\n  rank 0 (pid {pool.pids[0]} on " in report
        assert f"): stopped by a signal, such as SIGSTOP or Ctrl-Z; `kill -CONT {pool.pids[0]}`" in report


def test_rank_0_that_stays_stopped_between_operations_ends_the_job(start: Callable[..., Pool]) -> None:
    pool = start("shm", SHUTDOWN)
    pool.start(reduce_without_rank_0)
    for rank in (1, 2):
        kind, text = pool.answer(rank)
        assert kind == "TransferTimeoutError"
        assert "stalled for too long: rank " in text
        assert f"rank 0 (pid {pool.pids[0]} on " in text


def test_a_process_set_without_rank_0_is_watched(start: Callable[..., Pool]) -> None:
    pool = start("shm")
    pool.start(reduce_with_one_who_stops, 2, [1, 2])
    assert pool.note(0, REPORT_S) == "outside"
    report = pool.note(1, REPORT_S)
    pool.signal(2, signal.SIGCONT)
    assert [pool.answer(rank)[0] for rank in range(3)] == ["outside", "reduced", "reduced"]
    assert "of process set 1, for " in report


def test_a_job_that_was_suspended_as_a_whole_goes_on(start: Callable[..., Pool]) -> None:
    """For longer than the shutdown time: nobody has looked meanwhile."""
    pool = start("staged", ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "5"))
    pool.start(reduce_with_one_who_stops, 1)
    pool.note(0, REPORT_S)  # it waits in the transfer
    pool.signal(0, signal.SIGSTOP)
    time.sleep(6)
    pool.signal(0, signal.SIGCONT)
    pool.signal(1, signal.SIGCONT)
    assert [pool.answer(rank)[0] for rank in range(2)] == ["reduced"] * 2


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_after_the_shutdown_time_the_job_ends_on_every_rank(layout: str, start: Callable[..., Pool]) -> None:
    pool = start(layout, SHUTDOWN)
    stopped = pool.size - 1
    pool.start(reduce_with_one_who_stops, stopped)
    begin = time.monotonic()
    errors = [pool.answer(rank) for rank in range(stopped)]
    assert time.monotonic() - begin < REPORT_S
    pool.signal(stopped, signal.SIGCONT)
    errors.append(pool.answer(stopped))
    for kind, message in errors[:stopped]:
        assert kind == "TransferTimeoutError", message
        assert "stalled for too long: a running operation makes no progress: allreduce 'big', for " in message
    assert errors[stopped][0] in ("TransferTimeoutError", "PeerLostError"), errors[stopped]
    assert any(f"rank {stopped} (pid {pool.pids[stopped]} on " in message for _, message in errors)
