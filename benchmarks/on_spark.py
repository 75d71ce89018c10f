"""Jobs on Spark beside TorchDistributor: ``python -m benchmarks --only spark``.

The environment ``spark-estimators`` of tools/matrix.py measures starts of jobs, in turns, in one session with
three executors of one slot each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.launchers import ROOT
from benchmarks.turns import in_turns, paired

RANKS = 2
_SLOTS = 3
_TIMEOUT_S = 300.0
_SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.executor.heartbeatInterval": "2s",
    "spark.executor.memory": "512m",
    "spark.sql.shuffle.partitions": "2",
    "spark.task.maxFailures": "100",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


# What ranks do ----------------------------------------------------------------


def first_step() -> float:
    """Begin a job of polyhvd; when its first step was done."""
    import polyhvd.torch as hvd
    import torch

    hvd.init()
    hvd.allreduce(torch.ones(1024), name="gradient")
    return time.time()


def first_step_of_distributor() -> float:
    """The same in a process group of TorchDistributor's job."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1024))
    done = time.time()
    dist.destroy_process_group()
    return done


# Measurements -----------------------------------------------------------------


def start_of_polyhvd() -> float:
    """Seconds from run() to the last rank's first step."""
    import polyhvd.spark

    began = time.time()
    found: list[float] = polyhvd.spark.run(first_step, num_proc=RANKS)
    return max(found) - began


def start_of_distributor() -> float:
    """Seconds from run() to the first step of rank 0, the only one that it returns."""
    began = time.time()
    return float(_distributor().run(first_step_of_distributor)) - began


def _distributor() -> Any:
    from pyspark.ml.torch.distributor import TorchDistributor

    return TorchDistributor(num_processes=RANKS, local_mode=False, use_gpu=False)


def report(folder: Path, rounds: int) -> None:
    """Measure in a session that is started for it; print the tables, and write spark.md and spark.json."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(f"local-cluster[{_SLOTS},1,1024]").appName("benchmarks")
    for name, value in _SETTINGS.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    deadline = time.monotonic() + _TIMEOUT_S
    while session.sparkContext._jsc.sc().getExecutorMemoryStatus().size() <= _SLOTS:  # and the driver
        if time.monotonic() > deadline:
            raise TimeoutError(f"{_SLOTS} executors have not registered within {_TIMEOUT_S:g} s")
        time.sleep(0.1)
    lines = ["| jobs on Spark, 2 ranks | polyhvd | peer | ratio | turns |", "|---|---:|---:|---:|---:|"]
    kept: dict[str, Any] = {}

    def add(line: str, **values: Any) -> None:
        kept.update(values)
        lines.append(line)
        print(line, flush=True)

    print("\n".join(lines), flush=True)
    starts = in_turns(start_of_polyhvd, start_of_distributor, rounds)
    add(paired("from `run` to the first step, beside TorchDistributor", "s", *starts), starts=starts)
    (folder / "spark.md").write_text("\n".join([*lines, ""]))
    (folder / "spark.json").write_text(json.dumps(kept, indent=1) + "\n")
    session.stop()


def python_of() -> str:
    """The interpreter that has Spark and PyTorch, if they are installed."""
    from tools.matrix import ENVIRONMENTS_FOLDER

    return str(ENVIRONMENTS_FOLDER / "spark-estimators" / "bin" / "python")


def main(folder: Path, *, quick: bool = False) -> int:
    """Have the environment with Spark measure."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    python = python_of()
    if not Path(python).exists():
        print("bench: without Spark: tools/matrix.py --prepare spark-estimators installs it", file=sys.stderr)
        return 1
    command = [python, "-m", "benchmarks.on_spark"]
    options = [str(folder), "1" if quick else "5"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": python, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([*command, *options], cwd=ROOT, env=env).returncode


if __name__ == "__main__":
    report(Path(sys.argv[1]), int(sys.argv[2]))
