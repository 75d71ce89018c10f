"""No process of a job is left when its driver is killed or interrupted. The driver is a separate program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ranks_alive
import spark_common
from ranks_alive import is_running, wait_until
from spark_common import BUSY_S, END_S, noted

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
    paths = [str(Path(module.__file__ or "").parent) for module in (spark_common, ranks_alive)]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    driver = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env={**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(paths)},
        stderr=subprocess.DEVNULL,
    )
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
