"""Programs that drive jobs, each with a cluster: no process is left when they end; executors come and go."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks_alive import is_running, wait_until
from spark_common import BUSY_S, END_S, noted, parent_of, start_program, started

PROGRAM = """
import sys
import threading
from pathlib import Path
from pyspark.sql import SparkSession
import polyhvd.spark
import spark_common
import cloudpickle
cloudpickle.register_pickle_by_value(spark_common)
builder = SparkSession.builder.master("local-cluster[2,1,1024]").config("spark.driver.host", "127.0.0.1")
builder.config("spark.executor.memory", "512m").config("spark.ui.enabled", "false").getOrCreate()
folder = Path(sys.argv[1])

def call(run, *arguments):
    try:
        run(spark_common.sleeping, *arguments)
    except Exception as error:
        (folder / run.__name__).write_text(f"{type(error).__name__}: {error}")

elastic = polyhvd.spark.run_elastic, (folder / "elastic",), None, 1
thread = threading.Thread(target=call, args=elastic)
thread.start()
call(polyhvd.spark.run, (folder / "fixed",), None, 1)
thread.join()
"""


@pytest.mark.parametrize(
    "victim", ["driver", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("jvm", "ctrl-c"))]
)
def test_no_rank_outlives_the_driver(tmp_path: Path, victim: str) -> None:
    folders = [tmp_path / "fixed", tmp_path / "elastic"]
    for folder in folders:
        folder.mkdir()
    driver = start_program(PROGRAM, tmp_path)
    try:
        ranks = [noted(folder, 1)[0] for folder in folders]
        if victim == "jvm":
            children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()
            (jvm,) = [child for child in children if b"java" in Path(f"/proc/{child}/cmdline").read_bytes()]
            os.kill(int(jvm), signal.SIGKILL)
            wait_until(lambda: not any(map(is_running, ranks)), "the processes end", END_S)
            driver.wait(BUSY_S)
            for name in ("run", "run_elastic"):
                assert (tmp_path / name).read_text().startswith(f"RuntimeError: polyhvd.spark.{name}(): ")
        if victim == "ctrl-c":
            driver.send_signal(signal.SIGINT)  # for the main thread, in which run() waits
            wait_until(lambda: not is_running(ranks[0]), "the rank ends", 3 * END_S)
            assert not (tmp_path / "run").exists(), "a KeyboardInterrupt is no Exception"
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    wait_until(lambda: not any(map(is_running, ranks)), "the processes end", END_S)


CHANGING = """
import sys
import threading
from pathlib import Path
from pyspark.sql import SparkSession
import polyhvd.spark
import spark_common
import cloudpickle
from polyhvd.spark import cluster
from ranks_alive import wait_until
cloudpickle.register_pickle_by_value(spark_common)
builder = SparkSession.builder.master("local-cluster[2,1,1024]").config("spark.driver.host", "127.0.0.1")
builder.config("spark.executor.memory", "512m").config("spark.ui.enabled", "false")
builder.config("spark.dynamicAllocation.enabled", "true").config("spark.dynamicAllocation.maxExecutors", "2")
builder.config("spark.dynamicAllocation.shuffleTracking.enabled", "true")
builder.config("spark.decommission.enabled", "true")
builder.config("spark.task.maxFailures", "1").getOrCreate()
folder = Path(sys.argv[1])
known = cluster.find("the test")

def watch():
    wait_until(lambda: known.slots() == 2, "two executors are there", spark_common.BUSY_S)
    wait_until(lambda: known.slots() == 1, "Spark starts no tasks on one of them", spark_common.BUSY_S)
    (folder / "decommissioned").touch()

try:
    polyhvd.spark.run(int, num_proc=2, start_timeout=5)
except RuntimeError as error:
    assert "spark.dynamicAllocation.enabled is true" in str(error)
else:
    raise AssertionError("a barrier stage with dynamic allocation")
threading.Thread(target=watch, daemon=True).start()
spark_common.check(polyhvd.spark.run_elastic(spark_common.train, (folder,), None, 2, 1))
"""


@pytest.mark.nightly
def test_an_elastic_job_requests_executors_and_outlives_one_that_is_decommissioned(tmp_path: Path) -> None:
    driver = start_program(CHANGING, tmp_path)

    def wait_for(condition: Callable[[], bool], what: str) -> None:
        wait_until(lambda: condition() or driver.poll() is not None, what, BUSY_S)
        assert condition(), (tmp_path / "errors").read_text()

    try:
        wait_for(lambda: all((tmp_path / f"reached-{rank}").exists() for rank in (0, 1)), "two ranks train")
        ranks = started(tmp_path)
        executor = ranks[1]
        for _ in range(3):
            executor = parent_of(executor)
        os.kill(executor, signal.SIGPWR)  # Spark's signal for it
        wait_for(lambda: (tmp_path / "decommissioned").exists(), "Spark takes note")
        assert is_running(ranks[1]), "its task has not ended"
        os.kill(executor, signal.SIGKILL)  # with any other one, Spark would end the job
        wait_for(lambda: len(started(tmp_path)) > 2, "a replacement starts")
        (tmp_path / "go").touch()
        assert driver.wait(BUSY_S) == 0, (tmp_path / "errors").read_text()
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    wait_until(lambda: not any(map(is_running, started(tmp_path))), "the processes end", END_S)
