"""polyhvd.spark.run on two executors."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import spark_common
from py4j.java_gateway import GatewayClient
from pyspark import BarrierTaskContext, TaskContext
from ranks_alive import is_running, wait_until
from spark_common import BUSY_S, END_S, in_world, noted, parent_of, same_in_all_versions, sleeping

import polyhvd.spark
from polyhvd.spark import cluster, running

for module in (spark_common, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)
pytestmark = pytest.mark.usefixtures("session")


class MineError(Exception):
    pass


def failing_on_rank_1(function: Callable[[], Any]) -> None:
    """Rank 0 waits for rank 1."""
    import polyhvd.numpy as hvd

    hvd.init()
    if hvd.rank() == 1:
        function()
    hvd.allreduce(np.ones(1))


def test_results_come_in_rank_order_from_ranks_that_add_up() -> None:
    def train(hvd: Any, value: float) -> tuple[Any, ...]:
        total = hvd.allreduce(np.full(2, value * (1 + hvd.rank())), op=hvd.Sum).tolist()
        return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), total

    assert polyhvd.spark.run(in_world, args=(train, 3.0)) == [
        (0, 2, 0, 2, [9.0, 9.0]),
        (1, 2, 1, 2, [9.0, 9.0]),
    ]


def test_the_slots_of_all_executors_are_the_default_number_of_ranks_and_one_may_be_asked_for() -> None:
    assert polyhvd.spark.run(lambda *, value: value, kwargs={"value": 7}) == [7, 7]
    assert polyhvd.spark.run(in_world, (lambda hvd: hvd.size(),), num_proc=1) == [1]


def test_ranks_see_the_gpus_of_their_host_and_know_those_that_spark_has_assigned_to_them() -> None:
    def look() -> tuple[list[str], str]:
        return polyhvd.spark.task.get_available_devices(), os.environ["CUDA_VISIBLE_DEVICES"]

    (first, visible), (second, same) = polyhvd.spark.run(look)
    assert sorted([first, second]) == [["3"], ["5"]]
    assert visible == same == ",".join(first + second)
    assert polyhvd.spark.task.get_available_devices() == []


def test_a_task_of_spark_knows_its_devices(session: Any) -> None:
    def look(batches: Any) -> Any:
        import pyarrow

        for _ in batches:
            found = ",".join(polyhvd.spark.task.get_available_devices())
            yield pyarrow.RecordBatch.from_pydict({"found": [found]})

    rows = session.range(0, 2, 1, 2).mapInArrow(look, "found string").collect()
    assert {row.found for row in rows} <= {"3", "5"}


@same_in_all_versions
def test_nothing_of_a_run_is_left_in_the_next() -> None:
    def look(hvd: Any) -> tuple[int, str | None, bool]:
        known = os.environ.get("MINE"), hasattr(sys, "left")
        sys.left = True  # type: ignore[attr-defined]
        return os.getpid(), *known

    before = polyhvd.spark.run(in_world, (look,), env={"MINE": "1"})
    after = polyhvd.spark.run(in_world, (look,))
    assert [item[1:] for item in before] == [("1", False)] * 2
    assert [item[1:] for item in after] == [(None, False)] * 2
    assert not {item[0] for item in before} & {item[0] for item in after}


@same_in_all_versions
def test_an_exception_has_its_class_with_rank_executor_and_traceback_as_the_cause() -> None:
    def fail() -> None:
        raise MineError("of rank 1")

    with pytest.raises(MineError, match=r"^of rank 1$") as caught:
        polyhvd.spark.run(failing_on_rank_1, (fail,))
    text = str(caught.value.__cause__)
    assert "rank 1 (executor at 127.0.0.1:" in text
    assert "has ended with exit status 1" in text
    assert "in fail\n" in text
    assert text.endswith("MineError: of rank 1")


@same_in_all_versions
@pytest.mark.parametrize(
    ("end", "message"),
    [
        (lambda: sys.exit(3), "has ended with exit status 3"),
        (lambda: os._exit(0), "has left no result: the function has ended the process"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), r"was killed by signal 9 \(SIGKILL\)"),
    ],
    ids=["exit", "exit-0", "kill"],
)
def test_a_rank_that_ends_early_is_named(end: Callable[[], Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=rf"run\(\): rank 1 \(executor at 127.0.0.1:\d+\) {message}"):
        polyhvd.spark.run(failing_on_rank_1, (end,))


@same_in_all_versions
def test_an_exception_that_cannot_be_pickled_is_named() -> None:
    def fail() -> None:
        raise ValueError(threading.Lock())

    with pytest.raises(RuntimeError, match=r"(?s)rank 1 .*ValueError.*its exception cannot be sent"):
        polyhvd.spark.run(failing_on_rank_1, (fail,))


@same_in_all_versions
def test_a_function_that_cannot_be_pickled_is_an_error_before_anything_runs() -> None:
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"polyhvd.spark.run\(\): .*cannot be sent.*cannot pickle"):
        polyhvd.spark.run(lambda: lock)


@same_in_all_versions
def test_another_version_on_the_executors_is_an_error_that_names_both(monkeypatch: Any) -> None:
    found = polyhvd.__version__
    monkeypatch.setattr(running, "__version__", "77.0")
    with pytest.raises(RuntimeError, match=f"the driver has polyhvd 77.0, and executors have: .*: {found}$"):
        polyhvd.spark.run(lambda: 1)


@same_in_all_versions
def test_a_python_that_is_not_there_is_named() -> None:
    with pytest.raises(RuntimeError, match="cannot be started: /no/python"):
        polyhvd.spark.run(lambda: 1, executable="/no/python")


def test_too_few_slots_are_an_error_after_the_timeout_with_what_there_is() -> None:
    with pytest.raises(TimeoutError, match=r"not started 3 tasks at once within 1 s .*there are 2 slots"):
        polyhvd.spark.run(lambda: 1, num_proc=3, start_timeout=1)


def test_slots_that_stay_busy_are_an_error_after_the_timeout(session: Any) -> None:
    def occupy(batches: Any) -> Any:
        time.sleep(600)
        yield from batches

    def busy() -> None:
        session.sparkContext.setJobGroup("busy", "", interruptOnCancel=True)
        session.range(0, 1, 1, 1).mapInArrow(occupy, "id long").collect()

    thread = ThreadPoolExecutor(1)
    job = thread.submit(busy)
    tracker = session.sparkContext.statusTracker()
    wait_until(lambda: bool(tracker.getActiveJobsIds()), "the job of Spark starts", BUSY_S)
    try:
        with pytest.raises(TimeoutError, match="there are 2 slots, in which 1 tasks are running"):
            polyhvd.spark.run(lambda: 1, num_proc=2, start_timeout=2)
    finally:
        session.sparkContext.cancelJobGroup("busy")
        assert job.exception(BUSY_S) is not None


@same_in_all_versions
@pytest.mark.parametrize("meetings", [0, 1])
def test_a_task_that_never_meets_the_others_is_an_error_after_the_timeout(
    monkeypatch: Any, meetings: int
) -> None:
    task_of = running.task_of

    def hanging(*given: Any) -> Callable[[Any], Any]:
        task = task_of(*given)

        def hang(batches: Any) -> Any:
            gather, left = BarrierTaskContext.allGather, iter(range(meetings))

            def gather_or_hang(context: Any, message: str) -> Any:
                if next(left, None) is None:
                    time.sleep(600)  # as an import from a file system that does not respond
                return gather(context, message)

            if TaskContext.get().partitionId() == 1:
                if not meetings:
                    time.sleep(600)
                BarrierTaskContext.allGather = gather_or_hang
            try:
                yield from task(batches)
            finally:
                BarrierTaskContext.allGather = gather  # Spark uses this process again

        return hang

    monkeypatch.setattr(running, "task_of", hanging)
    with pytest.raises(TimeoutError, match=r"run\(\): the task on .* has waited 5 s \(start_timeout\)"):
        polyhvd.spark.run(lambda: 1, num_proc=2, start_timeout=5)


@same_in_all_versions
def test_a_job_that_has_begun_may_take_longer_than_the_timeout() -> None:
    begin = time.monotonic()
    polyhvd.spark.run(lambda: None)
    limit_s = 2 + 2 * (time.monotonic() - begin)  # the start takes longer on a busy machine
    ended_s = limit_s + cluster.find("the test").lag_s + 1  # when the job has been cancelled, if it is
    assert polyhvd.spark.run(time.sleep, (ended_s,), start_timeout=limit_s) == [None, None]


@same_in_all_versions
def test_a_job_that_is_watched_is_not_searched_for_again(session: Any, monkeypatch: Any) -> None:
    known = cluster.find("the test")
    with known.tagged("mine"):
        session.range(1).collect()
    for _ in range(20):
        session.range(1).collect()
    wait_until(lambda: known.has_begun("mine"), "Spark records the job", BUSY_S)
    sent: list[str] = []
    send = GatewayClient.send_command
    monkeypatch.setattr(
        GatewayClient,
        "send_command",
        lambda client, command, *more, **named: sent.append(command) or send(client, command, *more, **named),
    )
    assert known.has_begun("mine")
    assert known.lost("mine") == ""
    calls = [
        command for command in sent if not command.startswith("m\n")
    ]  # else objects that Python has freed
    assert 0 < len(calls) < 20, "calls of the JVM"


@same_in_all_versions
def test_a_backend_runs_on_its_number_of_ranks() -> None:
    backend = polyhvd.spark.SparkBackend(num_proc=1, env={"MINE": "1", "OTHER": "2"}, start_timeout=60)
    assert backend.num_processes() == 1
    assert polyhvd.spark.SparkBackend().num_processes() == 2
    found = backend.run(lambda: (os.environ["MINE"], os.environ["OTHER"]), env={"OTHER": "3"})
    assert found == [("1", "3")]


@same_in_all_versions
def test_a_number_of_ranks_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="num_proc must be a positive number; found 0"):
        polyhvd.spark.run(lambda: 1, num_proc=0)


@same_in_all_versions
def test_what_ranks_print_is_written_to_the_given_streams() -> None:
    def speak(hvd: Any) -> None:
        print("one\ntwo")
        print("three", file=sys.stderr)

    out, err = io.StringIO(), io.StringIO()
    polyhvd.spark.run(in_world, (speak,), stdout=out, stderr=err)
    assert out.getvalue() == "".join(
        f"[{rank}]<stdout>:{word}\n" for rank in (0, 1) for word in ("one", "two")
    )
    assert err.getvalue() == "[0]<stderr>:three\n[1]<stderr>:three\n"


def test_results_larger_than_a_row_arrive_whole() -> None:
    (found,) = polyhvd.spark.run(lambda: np.arange(3 << 20), num_proc=1)
    assert np.array_equal(found, np.arange(3 << 20))


@same_in_all_versions
def test_two_runs_at_once_are_jobs_that_do_not_meet() -> None:
    def meet(hvd: Any, value: int) -> tuple[int, int]:
        time.sleep(1)
        return hvd.size(), value

    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(polyhvd.spark.run, in_world, (meet, n), num_proc=1) for n in (1, 2)]
        assert [run.result(BUSY_S) for run in both] == [[(1, 1)], [(1, 2)]]


def test_a_cancelled_job_group_ends_the_ranks_and_the_call(session: Any, tmp_path: Path) -> None:
    def call() -> None:
        session.sparkContext.setJobGroup("mine", "", interruptOnCancel=True)
        polyhvd.spark.run(sleeping, (tmp_path,))

    job = ThreadPoolExecutor(1).submit(call)
    ranks = noted(tmp_path)
    session.sparkContext.cancelJobGroup("mine")
    error = job.exception(BUSY_S)
    assert isinstance(error, RuntimeError)
    assert "cancelled" in str(error)
    wait_until(lambda: not any(map(is_running, ranks)), "the processes end", END_S)


@pytest.mark.parametrize(
    "generations",
    [1, pytest.param(2, marks=pytest.mark.nightly), 3],  # a killed daemon is a lost worker, too
    ids=["worker", "daemon", "executor"],
)
def test_no_rank_outlives_what_is_above_it_and_none_is_started_again(
    tmp_path: Path, generations: int
) -> None:
    job = ThreadPoolExecutor(1).submit(polyhvd.spark.run, sleeping, (tmp_path,), num_proc=2)
    ranks = noted(tmp_path)
    victim = ranks[1]
    for _ in range(generations):
        victim = parent_of(victim)
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: not is_running(ranks[1]), "rank 1 ends", END_S)
    wait_until(lambda: not is_running(ranks[0]), "rank 0 ends", END_S)
    error = job.exception(BUSY_S)
    assert isinstance(error, RuntimeError)
    assert "has failed" in str(error)
    assert noted(tmp_path) == ranks
    if generations < 3:  # Spark takes long to start another executor
        assert polyhvd.spark.run(in_world, (lambda hvd: hvd.size(),), num_proc=2) == [2, 2]
