"""What rank 0 reports of ranks that others wait for, and the error that ends a stall."""

from __future__ import annotations

import ctypes
import logging
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import polyhvd.numpy as hvd
import pytest
from launching import Launcher
from pool import Pool, PoolSpec, RankFailure

from polyhvd.testing import worker

REPORT_S = 30.0  # for liveness only
WARN = (("HOROVOD_STALL_CHECK_TIME_SECONDS", "1"),)
LAYOUTS = {
    "shm": PoolSpec("numpy", (2,), WARN),
    "tcp": PoolSpec("numpy", (2,), (*WARN, ("POLYHVD_SHARED_MEMORY", "0"))),
    "hosts": PoolSpec("numpy", (2, 2), WARN),
}


@pytest.fixture(params=LAYOUTS)
def pool(request: pytest.FixtureRequest, start: Callable[[PoolSpec], Pool]) -> Pool:
    return start(LAYOUTS[request.param])


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """Made by the test when the absent rank may go on."""
    return tmp_path / "release"


class Records(logging.Handler):
    """Tells the pool what is logged of stalls."""

    def emit(self, record: logging.LogRecord) -> None:
        if "polyhvd flight" not in record.getMessage():
            worker.note(record.getMessage())


def reduce_and_tell_the_log(count: int = 1) -> None:
    """What everybody but the absent rank does; rank 0's notes are what it logs."""
    handler = Records()
    logging.getLogger("polyhvd").addHandler(handler)
    tensors = [np.full(4, hvd.rank() + i) for i in range(count)]
    handles = [hvd.allreduce_async(t, name=f"grad.{i}", op=hvd.Sum) for i, t in enumerate(tensors)]
    for i, handle in enumerate(handles):
        expected = np.full(4, sum(range(hvd.size())) + i * hvd.size())
        oracle.check(f"grad.{i}", hvd.synchronize(handle), expected)
    logging.getLogger("polyhvd").removeHandler(handler)


def write_a_checkpoint(release: Path) -> None:
    worker.note(sys._getframe().f_lineno + 1)
    while not release.exists(): time.sleep(0.02)  # noqa: E701  # fmt: skip


def be_late(release: Path) -> None:
    write_a_checkpoint(release)
    reduce_and_tell_the_log()


def begin(pool: Pool, absent: int, function: Callable[..., None], *arguments: Any) -> Any:
    """Let one rank do something else than the others; returns its first note."""
    others = [rank for rank in range(pool.size) if rank != absent]
    pool.start(function, *arguments, ranks=[absent])
    note = pool.note(absent)
    for rank in others:
        pool.start(reduce_and_tell_the_log, ranks=[rank])
    return note


def end(pool: Pool) -> None:
    for rank in range(pool.size):
        pool.answer(rank)


def names(pool: Pool, rank: int) -> str:
    return f"rank {rank} (pid {pool.pids[rank]} on "


def test_a_rank_in_a_function_of_the_user_is_shown_with_its_stack(pool: Pool, release: Path) -> None:
    absent = pool.size - 1
    line = begin(pool, absent, be_late, release)
    report = pool.note(0, REPORT_S)
    release.touch()
    end(pool)
    asked = "rank 0 waits" if pool.size == 2 else "ranks 0-2 wait"
    assert f"{asked} for rank {absent} in 1 operation:\n    'grad.0', for " in report
    assert names(pool, absent) in report
    where = f"alive, in write_a_checkpoint (test_stalls.py:{line}); "
    ran = r"(it has run no operation yet|it last ran allgather 'polyhvd\.clock[^;]*)"  # between hosts
    assert re.search(re.escape(where) + ran + "; it has submitted nothing since\n", report), report
    assert '\n    Thread "MainThread" (most recent call last):\n      File "' in report
    assert f'test_stalls.py", line {line}, in write_a_checkpoint\n        while not release' in report
    assert "in be_late\n        write_a_checkpoint(release)\n" in report
    assert report.count("Thread ") == 1, "the thread that looks is left out"


def be_late_with_a_thread(release: Path) -> None:
    hvd.allreduce(np.ones(4), name="before", op=hvd.Sum)
    thread = threading.Thread(target=prefetch, args=(release,), name="prefetcher")
    thread.start()
    write_a_checkpoint(release)
    reduce_and_tell_the_log()
    thread.join()


def prefetch(release: Path) -> None:
    while not release.exists():
        time.sleep(0.02)


def reduce_before() -> None:
    hvd.allreduce(np.ones(4), name="before", op=hvd.Sum)
    reduce_and_tell_the_log()


def test_every_thread_is_shown_and_what_ran_last(start: Callable[[PoolSpec], Pool], release: Path) -> None:
    pool = start(LAYOUTS["shm"])
    pool.start(be_late_with_a_thread, release, ranks=[1])
    pool.start(reduce_before, ranks=[0])
    report = pool.note(0, REPORT_S)
    release.touch()
    end(pool)
    assert "it last ran allreduce 'before'; it has submitted nothing since\n" in report
    main, other = report.index('Thread "MainThread"'), report.index('Thread "prefetcher"')
    assert main < other
    assert "in prefetch\n        time.sleep(0.02)" in report[other:]


@pytest.mark.sample(2)
def test_rank_0_itself_may_be_the_absent_one(pool: Pool, release: Path) -> None:
    pool.start(be_late_on_rank_0, release, ranks=[0])
    line = pool.note(0)
    for rank in range(1, pool.size):
        pool.start(reduce_and_tell_the_log, ranks=[rank])
    report = pool.note(0, REPORT_S)
    release.touch()
    end(pool)
    assert f"alive, in write_a_checkpoint (test_stalls.py:{line}); " in report
    assert names(pool, 0) in report


def be_late_on_rank_0(release: Path) -> None:
    logging.getLogger("polyhvd").addHandler(Records())
    be_late(release)


def wait_for_another(release: Path) -> None:
    logging.getLogger("polyhvd").addHandler(Records())
    mine = f"only.{hvd.rank()}"
    handle = hvd.allreduce_async(np.ones(4), name=mine, op=hvd.Sum)
    while not release.exists():
        time.sleep(0.02)
    for rank in range(hvd.size()):
        if rank != hvd.rank():
            hvd.allreduce(np.ones(4), name=f"only.{rank}", op=hvd.Sum)
    hvd.synchronize(handle)


def test_ranks_that_wait_for_each_other_are_shown_with_what_they_wait_for(
    start: Callable[[PoolSpec], Pool], release: Path
) -> None:
    pool = start(LAYOUTS["shm"])
    pool.start(wait_for_another, release)
    report = pool.note(0, REPORT_S)
    while "waits for allreduce 'only.0'" not in report:  # each rank has a second of its own
        report = pool.note(0, REPORT_S)
    release.touch()
    end(pool)
    assert "rank 0 waits for rank 1" in report
    assert "it waits for allreduce 'only.0'\n" in report
    assert "it waits for allreduce 'only.1'\n" in report


def test_a_repeated_report_is_one_line_that_names_the_setting(
    start: Callable[[PoolSpec], Pool], release: Path
) -> None:
    pool = start(LAYOUTS["shm"])
    begin(pool, 1, be_late, release)
    first, second = pool.note(0, REPORT_S), pool.note(0, REPORT_S)
    release.touch()
    end(pool)
    who = (
        r"only rank 0 has submitted allreduce 'grad\.0' \(test_stalls\.py:\d+\), \d+ s ago; "
        "rank 1 has submitted nothing"
    )
    assert re.match(f"stalled: {who}\n  rank 0 waits for rank 1 in 1 operation:\n", first), first
    setting = "; set POLYHVD_STALL_SHUTDOWN_TIME_SECONDS to end a job that stalls"
    assert re.fullmatch(f"still stalled: {who}{setting}", second), second


def evaluate_on_rank_0(release: Path) -> None:
    for _ in range(3):
        hvd.allreduce(np.ones(4), op=hvd.Sum)
    if hvd.rank() > 0:
        return write_a_checkpoint(release)
    logging.getLogger("polyhvd").addHandler(Records())
    worker.note(sys._getframe().f_lineno + 1)
    hvd.allreduce(np.ones(4), op=hvd.Sum)
    return None


def test_a_call_without_a_name_that_one_rank_makes_is_shown_with_its_line(
    start: Callable[[PoolSpec], Pool], release: Path
) -> None:
    """All ranks know calls without a name by their tensors, so that only the rank has the line."""
    pool = start(LAYOUTS["shm"])
    pool.start(evaluate_on_rank_0, release)
    line, report = pool.note(0), pool.note(0, REPORT_S)
    release.touch()
    pool.kill()
    assert report.startswith("stalled: only rank 0 has submitted allreduce 'allreduce.noname.3', "), report
    assert f"alive, in evaluate_on_rank_0 (test_stalls.py:{line}); it last ran" in report, report


def note_and_be_late() -> None:
    worker.note("here")
    time.sleep(1)
    reduce_and_tell_the_log()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stopped_rank_is_told_by_another_of_its_host(
    layout: str, start: Callable[[PoolSpec], Pool]
) -> None:
    pool = start(LAYOUTS[layout])
    absent = pool.size - 1
    pool.start(note_and_be_late, ranks=[absent])
    pool.note(absent)
    pool.signal(absent, signal.SIGSTOP)
    for rank in range(absent):
        pool.start(reduce_and_tell_the_log, ranks=[rank])
    report = pool.note(0, REPORT_S)
    pool.signal(absent, signal.SIGCONT)
    end(pool)
    assert names(pool, absent) in report
    assert "): stopped by a signal, such as SIGSTOP or Ctrl-Z; " in report
    assert f"`kill -CONT {pool.pids[absent]}` resumes it" in report


def test_a_stopped_leader_of_another_host_is_told_as_one_that_does_not_answer(
    start: Callable[[PoolSpec], Pool],
) -> None:
    """So is the rest of its host, whose messages pass through it."""
    pool = start(LAYOUTS["hosts"])
    pool.start(note_and_be_late, ranks=[2])
    pool.note(2)
    pool.signal(2, signal.SIGSTOP)
    for rank in (0, 1, 3):
        pool.start(reduce_and_tell_the_log, ranks=[rank])
    report = pool.note(0, REPORT_S)
    pool.signal(2, signal.SIGCONT)
    end(pool)
    assert " wait for ranks 2, 3 in 1 operation:\n" in report
    assert f"\n  ranks 2, 3 (pid {pool.pids[2]} on " in report
    assert "): no answer in time: it, or a rank between it and rank 0, is stopped, disconnected or" in report


def leave_a_block_by_an_exception(release: Path) -> None:
    worker.note(0)
    try:
        with ThreadPoolExecutor(1) as workers:
            workers.submit(write_a_checkpoint, release)
            raise ValueError("bad row")
    except ValueError:
        reduce_and_tell_the_log()


def test_a_rank_that_waits_in_the_end_of_a_block_is_reported_with_the_exception_that_has_left_the_block(
    start: Callable[[PoolSpec], Pool], release: Path
) -> None:
    pool = start(LAYOUTS["shm"])
    begin(pool, 1, leave_a_block_by_an_exception, release)
    report = pool.note(0, REPORT_S)
    release.touch()
    end(pool)
    where = (
        r"alive, in leave_a_block_by_an_exception \(test_stalls.py:\d+\), which handles ValueError: bad row; "
    )
    assert re.search(where, report), report


def compute_in_c() -> None:
    """Until SIGUSR2 ends the sleep."""
    signal.signal(signal.SIGUSR2, lambda *_: None)
    worker.note("computing")
    ctypes.PyDLL(None).sleep(60)  # PyDLL does not release the interpreter's lock


def hold_the_lock() -> None:
    compute_in_c()
    reduce_and_tell_the_log()


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["shm", "hosts"])
def test_a_rank_whose_interpreter_does_not_answer_is_reported_with_both_reasons_and_its_stack(
    layout: str, start: Callable[[PoolSpec], Pool]
) -> None:
    pool = start(LAYOUTS[layout])
    begin(pool, pool.size - 1, hold_the_lock)
    report = pool.note(0, REPORT_S)
    pool.signal(pool.size - 1, signal.SIGUSR2)
    end(pool)
    reasons = "native code holds the GIL, or the process gets too little CPU time"
    assert f"alive, but its Python interpreter does not respond: {reasons}; " in report
    assert "in compute_in_c\n" in report
    assert "in hold_the_lock\n" in report


BUSY_ON_RANK_0 = """
import ctypes
import numpy as np
import polyhvd.numpy as hvd

hvd.init()
if hvd.rank() == 0:
    ctypes.PyDLL(None).sleep(6)
    print("the lock is free", flush=True)
hvd.allreduce(np.ones(4), name="x")
"""


def test_a_report_is_written_though_rank_0_cannot_log(tmp_path: Path) -> None:
    env = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1"}
    launcher = Launcher(tmp_path).start("-np", "2", source=BUSY_ON_RANK_0, env=env)
    assert "the lock is free" in launcher.wait_for("the lock is free", 1).decode()
    assert "polyhvd: stalled: " in launcher.err.decode(), "written while the lock was held"
    status, _, err = launcher.finish()
    assert status == 0
    assert "alive, but its Python interpreter does not respond" in err


def test_many_operations_are_told_by_their_first_names_and_their_number(
    start: Callable[[PoolSpec], Pool], release: Path
) -> None:
    pool = start(LAYOUTS["shm"])
    pool.start(be_late_with_many, release, ranks=[1])
    pool.note(1)
    pool.start(reduce_and_tell_the_log, 25, ranks=[0])
    report = pool.note(0, REPORT_S)
    release.touch()
    end(pool)
    assert "rank 0 waits for rank 1 in 25 operations:\n" in report
    assert report.count("    'grad.") == 10
    assert "\n    and 15 more\n" in report


def be_late_with_many(release: Path) -> None:
    write_a_checkpoint(release)
    reduce_and_tell_the_log(25)


def reduce_until_it_fails() -> tuple[str, str]:
    try:
        hvd.allreduce(np.ones(4), name="never", op=hvd.Sum)
    except hvd.HorovodInternalError as error:
        return type(error).__name__, str(error)
    raise AssertionError("an allreduce without all ranks has succeeded")


def sleep_until_the_job_ends(release: Path) -> tuple[str, str]:
    write_a_checkpoint(release)
    return reduce_until_it_fails()


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stall_that_ends_the_job_is_explained_in_every_ranks_error(
    layout: str, start: Callable[[PoolSpec], Pool], release: Path
) -> None:
    spec = LAYOUTS[layout]
    shutdown = (*spec.settings, ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "1"))
    pool = start(PoolSpec("numpy", spec.hosts, shutdown))
    absent = pool.size - 1
    pool.start(sleep_until_the_job_ends, release, ranks=[absent])
    pool.note(absent)
    for rank in range(absent):
        pool.start(reduce_until_it_fails, ranks=[rank])
    errors = [pool.answer(rank) for rank in range(absent)]
    release.touch()
    errors.append(pool.answer(absent))
    for kind, message in errors:
        assert kind == "TransferTimeoutError", message
        assert "stalled for too long: " in message
        assert f" for rank {absent} in 1 operation:\n    'never', for " in message
        assert "alive, in write_a_checkpoint (test_stalls.py:" in message
        assert "in sleep_until_the_job_ends\n        write_a_checkpoint(release)" in message


FINISHED = """
import logging, os, threading, time
import numpy as np
import polyhvd.numpy as hvd

class Release(logging.Handler):
    def emit(self, record):
        if "finished but for its threads" in record.getMessage():
            open("RELEASE", "w").close()

def write():
    while not os.path.exists("RELEASE"):
        time.sleep(0.02)

hvd.init()
if hvd.rank() == 0:
    logging.getLogger("polyhvd").addHandler(Release())
    try:
        hvd.allreduce(np.ones(4), name="one more")
    except hvd.HorovodInternalError as error:
        print(type(error).__name__)
else:
    threading.Thread(target=write, name="writer").start()
"""


def test_a_rank_whose_program_has_ended_is_told_as_finished(tmp_path: Path, release: Path) -> None:
    """As long as a thread keeps it; afterwards it has departed, which is an error and no stall."""
    env = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1"}
    source = FINISHED.replace("RELEASE", str(release))
    status, out, err = Launcher(tmp_path).run("-np", "2", source=source, env=env)
    assert status == 0, err
    assert "alive, finished but for its threads writer; it has run no operation yet" in err
    assert "PeerDepartedError" in out


def test_no_report_is_made_when_it_is_disabled(start: Callable[[PoolSpec], Pool], release: Path) -> None:
    spec = LAYOUTS["shm"]
    pool = start(PoolSpec("numpy", spec.hosts, (*WARN, ("HOROVOD_STALL_CHECK_DISABLE", "1"))))
    begin(pool, 1, be_late, release)
    time.sleep(5)  # longer than a report takes, were there one
    assert not pool.has_answered(0)
    release.touch()
    end(pool)
    with pytest.raises(RankFailure, match="without a note"):
        pool.note(0)
