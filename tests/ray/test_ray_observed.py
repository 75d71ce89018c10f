"""What Ray and ``polyhvd doctor`` show of jobs and clusters."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import polyhvd.numpy as hvd
import pytest
import ray
import ray.cloudpickle
from ranks_alive import wait_until

from polyhvd.ray import ElasticRayExecutor, RayExecutor

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

BUSY_S = 60.0


def test_each_rank_sets_its_gauges() -> None:
    def work() -> Any:
        from polyhvd.ray import metrics

        hvd.init()
        for _ in range(5):
            hvd.allreduce(np.ones(1000), name="ones")
        metrics.export()
        logging.getLogger("polyhvd").warning("has worked")
        exports = any(thread.name == "polyhvd-ray-metrics" for thread in threading.enumerate())
        return exports, metrics.read()

    executor = RayExecutor(RayExecutor.create_settings(timeout_s=BUSY_S), num_workers=2)
    executor.start()
    try:
        found = executor.run(work)
    finally:
        executor.shutdown()
    for number, (exports, (rank, values)) in enumerate(found):
        assert exports
        assert rank == number
        assert values["polyhvd_ranks"] == 2
        assert values["polyhvd_operations_total"] >= 5
        assert values["polyhvd_moved_bytes_total"] > 0
        wait_for_line(f"polyhvd rank {number} WARNING: has worked")


def wait_for_line(text: str) -> None:
    """Wait until a rank's log, which Ray's dashboard and drivers show, has a line with this."""
    logs = Path(ray._private.worker.global_worker.node.get_logs_dir_path())
    wait_until(lambda: any(text in path.read_text() for path in logs.glob("worker-*.err")), text, BUSY_S)


def steps() -> Any:
    from polyhvd.ray.metrics import read

    hvd.init()
    state = hvd.elastic.ArrayState(total=np.zeros(2), steps=0)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while state.steps < 60:
            state.total += hvd.allreduce(np.ones(2), name="ones")
            state.steps += 1
            time.sleep(0.03)
            state.commit()

    loop(state)
    logging.getLogger("polyhvd").warning("has made its steps")
    return read()


def test_an_elastic_rank_reads_its_step_time_and_recoveries() -> None:
    executor = ElasticRayExecutor(ElasticRayExecutor.create_settings(2, 2, timeout_s=BUSY_S))
    executor.start()
    for number, (rank, values) in enumerate(executor.run(steps)):
        assert rank == number
        assert values["polyhvd_world_changes_total"] == 0
        assert values["polyhvd_step_seconds"] >= 0.03
        assert values["polyhvd_wait_seconds_total"] >= 0
        wait_for_line(f"polyhvd rank {rank} generation 1 WARNING: has made its steps")


def doctor(address: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "RAY_ADDRESS": address}
    words = [sys.executable, "-m", "polyhvd.cli", "doctor"]
    return subprocess.run(words, capture_output=True, text=True, timeout=2 * BUSY_S, env=env)


def test_the_doctor_describes_the_cluster_in_one_line(cluster: str) -> None:
    lines = doctor(cluster).stdout.splitlines()
    words = f"  Ray {ray.__version__} at {cluster}, as here: 2 nodes with 12 CPUs and 2 GPUs"
    assert words in lines


@pytest.mark.nightly
def test_the_doctor_reports_a_cluster_that_does_not_answer() -> None:
    done = doctor("127.0.0.1:1")
    assert done.returncode == 1
    assert "Ray: the cluster 127.0.0.1:1 " in done.stdout
