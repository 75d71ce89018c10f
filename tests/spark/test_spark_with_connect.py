"""polyhvd.spark.run in a session of Spark Connect, whose server is on this machine."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyspark
import pytest
import spark_common
from ranks_alive import is_running, wait_until
from spark_common import (
    BUSY_S,
    END_S,
    check,
    end_session,
    in_world,
    noted,
    parent_of,
    sleeping,
    start_program,
    started,
    train,
)

import polyhvd.spark

for module in (spark_common, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)
pytestmark = pytest.mark.skipif(
    int(pyspark.__version__.partition(".")[0]) < 4, reason="a server for tests needs PySpark 4"
)


class MineError(Exception):
    pass


@pytest.fixture(scope="module", autouse=True)
def remote() -> Iterator[Any]:
    """A session with two slots, in which a task may fail. There can be no other one in this process."""
    end_session()
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.remote("local[2,4]")
    builder.config("spark.connect.execute.reattachable.senderMaxStreamDuration", "2s")
    for name in ("detachedTimeout", "maintenanceInterval"):  # for clients that have died; else minutes
        builder.config(f"spark.connect.execute.manager.{name}", "1s")
    made = builder.getOrCreate()
    yield made
    made.stop()


def test_ranks_of_all_slots_meet() -> None:
    def add(hvd: Any) -> tuple[int, float]:
        return hvd.local_size(), float(hvd.allreduce(np.full(1, 1.0 + hvd.rank()), op=hvd.Sum)[0])

    assert polyhvd.spark.run(in_world, (add,)) == [(2, 3.0)] * 2


def test_an_exception_has_its_class() -> None:
    def fail(hvd: Any) -> None:
        if hvd.rank() == 1:
            raise MineError("of rank 1")
        hvd.allreduce(np.ones(1))

    with pytest.raises(MineError, match=r"^of rank 1$") as caught:
        polyhvd.spark.run(in_world, (fail,), num_proc=2)
    assert "rank 1 (executor at " in str(caught.value.__cause__)


def test_too_few_slots_are_an_error_after_the_timeout() -> None:
    with pytest.raises(TimeoutError, match=r"not started 3 tasks at once within 1 s .*there are 2 slots"):
        polyhvd.spark.run(lambda: 1, num_proc=3, start_timeout=1)


def test_an_elastic_job_replaces_a_lost_task_and_the_other_rank_keeps_its_process(tmp_path: Path) -> None:
    job = ThreadPoolExecutor(1).submit(
        polyhvd.spark.run_elastic, train, (tmp_path,), num_proc=2, min_num_proc=1
    )
    wait_until(lambda: (tmp_path / "reached-0").exists() or job.done(), "rank 0 waits for the kill", BUSY_S)
    ranks = started(tmp_path)
    os.kill(parent_of(ranks[1]), signal.SIGKILL)
    wait_until(lambda: len(started(tmp_path)) > 2 or job.done(), "a replacement starts", BUSY_S)
    (tmp_path / "go").touch()
    found = job.result(BUSY_S)
    check(found)
    assert [item.process in ranks for item in found] == [True, False]


def test_an_interrupted_session_ends_an_elastic_job(remote: Any, tmp_path: Path) -> None:
    job = ThreadPoolExecutor(1).submit(polyhvd.spark.run_elastic, train, (tmp_path,), num_proc=2)
    wait_until(lambda: len(started(tmp_path)) == 2 or job.done(), "two processes start", BUSY_S)
    remote.interruptAll()
    assert isinstance(job.exception(BUSY_S), RuntimeError)
    wait_until(lambda: not any(map(is_running, started(tmp_path))), "the processes end", END_S)


def test_no_rank_outlives_its_worker_and_none_is_started_again(tmp_path: Path) -> None:
    job = ThreadPoolExecutor(1).submit(polyhvd.spark.run, sleeping, (tmp_path,), num_proc=2)
    ranks = noted(tmp_path)
    os.kill(parent_of(ranks[1]), signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, ranks)), "the processes end", END_S)
    error = job.exception(BUSY_S)
    assert isinstance(error, RuntimeError)
    assert "Python worker exited unexpectedly" in str(error)
    assert "\tat " not in str(error)
    assert noted(tmp_path) == ranks


def test_an_interrupted_session_ends_the_ranks(remote: Any, tmp_path: Path) -> None:
    job = ThreadPoolExecutor(1).submit(polyhvd.spark.run, sleeping, (tmp_path,), num_proc=2)
    ranks = noted(tmp_path)
    remote.interruptAll()
    assert isinstance(job.exception(BUSY_S), RuntimeError)
    wait_until(lambda: not any(map(is_running, ranks)), "the processes end", END_S)


CLIENT = """
import sys
from pathlib import Path
from pyspark.sql import SparkSession
import polyhvd.spark
import spark_common
import cloudpickle
cloudpickle.register_pickle_by_value(spark_common)
SparkSession.builder.remote("sc://localhost").getOrCreate()
folder = Path(sys.argv[1])
polyhvd.spark.NAME(spark_common.sleeping, (folder,), num_proc=1)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["run", "run_elastic"])
def test_no_rank_outlives_the_client_for_long(name: str, tmp_path: Path) -> None:
    client = start_program(CLIENT.replace("NAME", name), tmp_path)
    try:
        (rank,) = noted(tmp_path, 1)
    finally:
        client.kill()
        client.wait()
    wait_until(lambda: not is_running(rank), "the rank ends", 3 * END_S)
