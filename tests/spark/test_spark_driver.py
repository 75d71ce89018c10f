"""No process of a job is left when its driver is killed. The driver is a separate program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import ranks_alive
import spark_common
from ranks_alive import is_running, wait_until
from spark_common import END_S, noted

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
elastic = polyhvd.spark.run_elastic, (spark_common.sleeping, (folder / "elastic",), None, 1)
threading.Thread(target=elastic[0], args=elastic[1]).start()
polyhvd.spark.run(spark_common.sleeping, (folder / "fixed",), num_proc=1)
"""


def test_no_rank_outlives_the_driver(tmp_path: Path) -> None:
    folders = [tmp_path / "fixed", tmp_path / "elastic"]
    for folder in folders:
        folder.mkdir()
    paths = [Path(module.__file__ or "").parent for module in (spark_common, ranks_alive)]
    driver = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env={**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        stderr=subprocess.DEVNULL,
    )
    try:
        ranks = [noted(folder, 1)[0] for folder in folders]
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    wait_until(lambda: not any(map(is_running, ranks)), "the processes end", END_S)
