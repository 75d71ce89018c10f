"""No process of a job is left when its driver is killed. The driver is a separate program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from spark_common import END_S, is_alive, noted, wait_until

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
    driver = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env={**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(Path(__file__).parent)},
        stderr=subprocess.DEVNULL,
    )
    try:
        ranks = [noted(folder, 1)[0] for folder in folders]
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    wait_until(lambda: not any(map(is_alive, ranks)), END_S)
