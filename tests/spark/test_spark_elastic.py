"""polyhvd.spark.run_elastic on two executors, which are killed."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import pytest
import spark_common
from spark_common import BUSY_S, END_S, is_alive, parent_of, wait_until

import polyhvd.spark

for module in (spark_common, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)
pytestmark = pytest.mark.usefixtures("session")

STEPS = 6


class Found(NamedTuple):
    """What a rank returns."""

    process: int
    rank: int
    size: int
    steps: int
    total: float


def note(folder: Path) -> None:
    """Have started() list this process."""
    (folder / f"{time.time():.6f}-{os.getpid()}").touch()


def started(folder: Path) -> list[int]:
    """The processes that have noted themselves, in their order."""
    return [int(path.name.partition("-")[2]) for path in sorted(folder.glob("[0-9]*-*"))]


def train(folder: Path, size: int = 2, lost_rank: int | None = None) -> Found:
    """Count steps until there are ``size`` ranks; one rank may be killed after the second step."""
    import polyhvd.numpy as hvd

    note(folder)
    hvd.init()
    state = hvd.elastic.ArrayState(total=np.zeros(2), steps=0)
    deadline = time.monotonic() + BUSY_S

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while state.steps < STEPS or hvd.size() < size or not (folder / "go").exists():
            assert time.monotonic() < deadline
            if state.steps == 2 and hvd.rank() == lost_rank and not (folder / "lost").exists():
                (folder / "lost").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            state.total += hvd.allreduce(np.ones(2), op=hvd.Average, name="ones")
            state.steps += 1
            if state.steps == STEPS:
                (folder / f"reached-{hvd.rank()}").touch()
            time.sleep(0.02)
            state.commit()

    loop(state)
    return Found(os.getpid(), hvd.rank(), hvd.size(), state.steps, float(state.total[0]))


def check(found: list[Found], size: int = 2) -> None:
    assert [(item.rank, item.size) for item in found] == [(rank, size) for rank in range(size)]
    assert len({item.steps for item in found}) == 1
    assert all(item.total == item.steps for item in found), "a step for each that was counted"


def test_a_killed_rank_is_replaced_and_the_other_keeps_its_process(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    found = polyhvd.spark.run_elastic(train, (tmp_path, 2, 1), num_proc=2, min_num_proc=1)
    check(found)
    processes = started(tmp_path)
    assert len(processes) == 3
    assert [item.process in processes[:2] for item in found] == [True, False]


@pytest.mark.parametrize("generations", [1, 3], ids=["worker", "executor"])
def test_a_lost_task_is_replaced_by_another(tmp_path: Path, generations: int) -> None:
    run = ThreadPoolExecutor(1).submit(
        polyhvd.spark.run_elastic, train, (tmp_path,), {}, num_proc=2, min_num_proc=1
    )
    wait_until(lambda: (tmp_path / "reached-0").exists() or run.done(), BUSY_S)
    ranks = started(tmp_path)
    victim = ranks[1]
    for _ in range(generations):
        victim = parent_of(victim)
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: not is_alive(ranks[1]), END_S)
    assert is_alive(ranks[0])
    wait_until(lambda: len(started(tmp_path)) > 2 or run.done(), BUSY_S)
    (tmp_path / "go").touch()
    found = run.result(BUSY_S)
    check(found)
    assert [item.process in ranks for item in found] == [True, False]


class MineError(Exception):
    pass


def fail(folder: Path) -> None:
    import polyhvd.numpy as hvd

    note(folder)
    hvd.init()

    @hvd.elastic.run
    def loop(state: Any) -> None:
        if hvd.rank() == 1:
            raise MineError("of rank 1")
        hvd.allreduce(state.total)

    loop(hvd.elastic.ArrayState(total=np.zeros(2)))


def test_an_exception_has_its_class_with_rank_executor_and_traceback_as_the_cause(tmp_path: Path) -> None:
    with pytest.raises(MineError, match=r"^of rank 1$") as caught:
        polyhvd.spark.run_elastic(fail, (tmp_path,))
    text = str(caught.value.__cause__)
    assert text.startswith(("process 0 (rank 1) on executor ", "process 1 (rank 1) on executor "))
    assert "in loop\n" in text
    assert text.endswith("MineError: of rank 1")
    wait_until(lambda: not any(map(is_alive, started(tmp_path))), END_S)


def test_a_function_that_cannot_be_pickled_is_an_error_before_anything_runs() -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"polyhvd.spark.run_elastic\(\): .*cannot be sent.*cannot pickle"):
        polyhvd.spark.run_elastic(lambda: lock)


def test_too_few_slots_are_an_error_after_the_timeout_with_what_there_is() -> None:
    with pytest.raises(TimeoutError, match=r"2 tasks within 6 s .*fewer than min_num_proc=3; there are 2"):
        polyhvd.spark.run_elastic(lambda: 1, num_proc=3, start_timeout=6)


def test_a_cancelled_job_group_ends_the_ranks_and_the_call(session: Any, tmp_path: Path) -> None:
    def call() -> None:
        session.sparkContext.setJobGroup("mine", "", interruptOnCancel=True)
        polyhvd.spark.run_elastic(train, (tmp_path,))

    job = ThreadPoolExecutor(1).submit(call)
    wait_until(lambda: len(started(tmp_path)) == 2, BUSY_S)
    session.sparkContext.cancelJobGroup("mine")
    error = job.exception(BUSY_S)
    assert isinstance(error, RuntimeError)
    assert "cancelled" in str(error)
    wait_until(lambda: not any(map(is_alive, started(tmp_path))), END_S)


def test_what_processes_print_is_written_to_the_given_streams() -> None:
    out = io.StringIO()
    found = polyhvd.spark.run_elastic(lambda: print("one\ntwo"), num_proc=1, stdout=out)
    assert found == [None]
    assert out.getvalue() == "[0]<stdout>:one\n[0]<stdout>:two\n"
