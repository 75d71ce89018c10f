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
from typing import Any

import cloudpickle
import numpy as np
import pytest
import spark_common
from ranks_alive import is_running, wait_until
from spark_common import BUSY_S, END_S, check, note, parent_of, started, train

import polyhvd.spark
from polyhvd.spark import elastic

for module in (spark_common, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)
pytestmark = pytest.mark.usefixtures("session")


def test_a_killed_rank_is_replaced_and_the_other_keeps_its_process(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    found = polyhvd.spark.run_elastic(train, (tmp_path, 2, 1), num_proc=2, min_num_proc=1)
    check(found)
    processes = started(tmp_path)
    assert len(processes) == 3
    assert [item.process in processes[:2] for item in found] == [True, False]


@pytest.mark.parametrize(
    "generations", [pytest.param(1, marks=pytest.mark.nightly), 3], ids=["worker", "executor"]
)
def test_a_lost_task_is_replaced_by_another(tmp_path: Path, generations: int) -> None:
    run = ThreadPoolExecutor(1).submit(
        polyhvd.spark.run_elastic, train, (tmp_path,), {}, num_proc=2, min_num_proc=1
    )
    wait_until(lambda: (tmp_path / "reached-0").exists() or run.done(), "rank 0 waits for the kill", BUSY_S)
    ranks = started(tmp_path)
    victim = ranks[1]
    for _ in range(generations):
        victim = parent_of(victim)
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: not is_running(ranks[1]), "rank 1 ends", END_S)
    assert is_running(ranks[0])
    wait_until(lambda: len(started(tmp_path)) > 2 or run.done(), "a replacement starts", BUSY_S)
    (tmp_path / "go").touch()
    found = run.result(BUSY_S)
    check(found)
    assert [item.process in ranks for item in found] == [True, False]


def test_a_second_attempt_of_a_task_waits_without_a_rank(monkeypatch: Any, tmp_path: Path) -> None:
    jobs = []

    class Twice(elastic._Tasks):
        """Starts two tasks for each slot, as Spark's speculation does. It needs two hosts for that."""

        def __init__(self, cluster: Any, count: int, post: Any, job: Any) -> None:
            super().__init__(cluster, 2 * count, post, job)
            jobs.append(job)

    def wait() -> tuple[int, int]:
        import polyhvd.numpy as hvd

        note(tmp_path)
        hvd.init()
        deadline = time.monotonic() + BUSY_S
        while not (tmp_path / "go").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return hvd.rank(), hvd.size()

    monkeypatch.setattr(elastic, "_Tasks", Twice)
    run = ThreadPoolExecutor(1).submit(polyhvd.spark.run_elastic, wait, num_proc=1)

    def are_there() -> bool:
        return run.done() or (bool(started(tmp_path)) and jobs[0].slots == 2)

    wait_until(are_there, "both tasks are there", BUSY_S)
    time.sleep(1.0)
    (tmp_path / "go").touch()
    assert run.result(BUSY_S) == [(0, 1)]
    assert len(started(tmp_path)) == 1


@pytest.mark.nightly
def test_each_local_rank_is_the_gpu_that_spark_has_assigned_to_its_task() -> None:
    def look() -> tuple[list[str], list[str], int]:
        import polyhvd.numpy as hvd

        hvd.init()
        visible = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
        return polyhvd.spark.task.get_available_devices(), visible, hvd.local_rank()

    found = polyhvd.spark.run_elastic(look, num_proc=2)
    assert [local_rank for _, _, local_rank in found] == [0, 1]
    assert sorted(own for own, _, _ in found) == [["3"], ["5"]]
    for own, visible, local_rank in found:
        assert [visible[local_rank]] == own
        assert sorted(visible) == ["3", "5"]


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
    wait_until(lambda: not any(map(is_running, started(tmp_path))), "the processes end", END_S)


def test_a_function_that_cannot_be_pickled_is_an_error_before_anything_runs() -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"polyhvd.spark.run_elastic\(\): .*cannot be sent.*cannot pickle"):
        polyhvd.spark.run_elastic(lambda: lock)


def test_another_version_on_the_executors_is_an_error_that_names_both(monkeypatch: Any) -> None:
    found = polyhvd.__version__
    monkeypatch.setattr(elastic, "__version__", "77.0")
    with pytest.raises(RuntimeError, match=f"the driver has polyhvd 77.0, and executors have: .*: {found}"):
        polyhvd.spark.run_elastic(lambda: 1, num_proc=1)


@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 1, 1), (2, 0, 2)])
def test_numbers_that_contradict_each_other_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(
        ValueError, match=r"run_elastic\(\): min_num_proc .*expected 1 <= min_num_proc <= num_"
    ):
        polyhvd.spark.run_elastic(lambda: 1, (), {}, *sizes)


def test_too_few_ranks_after_the_loss_of_a_task_end_the_job() -> None:
    def kill_worker() -> None:
        import polyhvd.numpy as hvd

        hvd.init()

        @hvd.elastic.run
        def loop(state: Any) -> None:
            while True:
                hvd.allreduce(state.total, name="total")
                state.commit()
                if hvd.rank() == 1:
                    os.kill(os.getppid(), signal.SIGKILL)
                    time.sleep(60)

        loop(hvd.elastic.ArrayState(total=np.zeros(2)))

    with pytest.raises(RuntimeError, match="fewer than min_num_proc 2, and no more have appeared within 0 s"):
        polyhvd.spark.run_elastic(kill_worker, num_proc=2, elastic_timeout=0)


def test_too_few_slots_are_an_error_after_the_timeout_with_what_there_is() -> None:
    with pytest.raises(TimeoutError, match=r"2 tasks within 6 s .*fewer than min_num_proc=3; there are 2"):
        polyhvd.spark.run_elastic(lambda: 1, num_proc=3, start_timeout=6)


def test_a_cancelled_job_group_ends_the_ranks_and_the_call(session: Any, tmp_path: Path) -> None:
    def call() -> None:
        session.sparkContext.setJobGroup("mine", "", interruptOnCancel=True)
        polyhvd.spark.run_elastic(train, (tmp_path,))

    job = ThreadPoolExecutor(1).submit(call)
    wait_until(lambda: len(started(tmp_path)) == 2, "two processes start", BUSY_S)
    session.sparkContext.cancelJobGroup("mine")
    error = job.exception(BUSY_S)
    assert isinstance(error, RuntimeError)
    assert "cancelled" in str(error)
    wait_until(lambda: not any(map(is_running, started(tmp_path))), "the processes end", END_S)


@pytest.mark.nightly
def test_what_processes_print_is_written_to_the_given_streams() -> None:
    out = io.StringIO()
    found = polyhvd.spark.run_elastic(lambda: print("one\ntwo"), num_proc=1, stdout=out)
    assert found == [None]
    assert out.getvalue() == "[0]<stdout>:one\n[0]<stdout>:two\n"
