"""One session of Spark for all tests of a process: two executors with a slot and a GPU each."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fork_servers import IMPORTS, ForkServers
from spark_common import WEIGHTS, end_session

from polyhvd.installed import is_installed

collect_ignore_glob = [] if is_installed("pyspark") else ["test_*.py"]
collect_ignore_glob += [
    f"test_spark_estimators_{name}.py"
    for name in ("torch", "lightning", "keras", "mxnet")
    if not is_installed(name)
]
collect_ignore_glob += [] if is_installed("torch") else ["test_spark_estimators_with_connect.py"]
collect_ignore_glob += [] if is_installed("tensorflow") else ["test_spark_tensorflow.py"]

#: For JVMs that live a minute: without the optimizing compiler, a session takes half of the CPU seconds.
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
START_S = 300.0  # what takes ten seconds on an idle machine
#: Names a GPU for each worker that asks: 3 for the first, and 5 for the second.
DISCOVERY = """#!/bin/sh
for number in 3 5; do mkdir "$0.$number" 2>/dev/null && break; done
echo '{"name": "gpu", "addresses": ["'$number'"]}'
"""


def settings(folder: Path) -> dict[str, str]:
    """Of a session on a cluster of two executors."""
    script = folder / "discover"
    script.write_text(DISCOVERY)
    script.chmod(0o755)
    return {
        "spark.driver.host": "127.0.0.1",
        "spark.executor.heartbeatInterval": "2s",
        "spark.executor.memory": "512m",
        "spark.executor.resource.gpu.amount": "1",
        "spark.sql.shuffle.partitions": "1",
        "spark.task.resource.gpu.amount": "1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.worker.resource.gpu.amount": "1",
        "spark.worker.resource.gpu.discoveryScript": str(script),
    }


@pytest.fixture(scope="session")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The session, whose executors have registered."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    from polyhvd.spark import cluster

    builder = SparkSession.builder.master("local-cluster[2,1,1024]").appName("tests")
    for name, value in settings(tmp_path_factory.mktemp("spark")).items():
        builder = builder.config(name, value)
    made = builder.getOrCreate()
    made.sparkContext.setLogLevel("OFF")
    deadline = time.monotonic() + START_S
    while cluster.find("the tests").slots() < 2:
        assert time.monotonic() < deadline, "the executors have not registered"
        time.sleep(0.1)
    yield made
    end_session()


@pytest.fixture(scope="session")
def frame(session: Any) -> Any:
    """Points on both sides of a plane, as vectors, arrays and numbers, in three partitions."""
    from pyspark.ml.linalg import Vectors

    points = np.random.default_rng(0).normal(size=(400, 4))
    rows = [
        (
            Vectors.sparse(4, range(4), point) if number % 2 else Vectors.dense(point),
            point.tolist(),
            *point.tolist(),
            int(point @ WEIGHTS > 0),
            float(point @ WEIGHTS),
            number % 5 == 0,
        )
        for number, point in enumerate(points)
    ]
    names = ["vector", "array", "a", "b", "c", "d", "side", "height", "held"]
    made = session.createDataFrame(rows, names).repartition(3).cache()
    assert made.count() == 400
    return made


@pytest.fixture
def store(tmp_path: Path) -> Any:
    from polyhvd.spark import Store

    return Store.create(str(tmp_path / "store"))


#: Python, but the program of a rank runs in a fork of a server that has imported its framework.
FORKING = """#!/bin/sh
if [ "$1 $2" = "-m polyhvd.launch.job.function" ]; then
  exec {forked} -c "from polyhvd.launch.job.function import main; main()"
fi
exec {python} "$@"
"""


@pytest.fixture
def ranks_in_forks(
    request: pytest.FixtureRequest, fork_servers: ForkServers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that this process starts, and not Spark, begin with the framework of the test imported."""
    name = request.module.__name__.rpartition("_")[2]
    name = "lightning" if name == "torch" else name  # which share the servers
    imports = IMPORTS["tensorflow" if name == "keras" else name]
    forked = fork_servers.python(2, [*imports, f"polyhvd.spark.{name}", "polyhvd.data"])
    script = tmp_path.parent / f"{tmp_path.name}-python"
    script.write_text(FORKING.format(forked=" ".join(forked), python=sys.executable))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
