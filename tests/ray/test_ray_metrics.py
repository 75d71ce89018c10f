"""Gauges of ranks at the endpoint from which Prometheus and Ray's dashboard read them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import polyhvd.numpy as hvd
import pytest
import ray
import ray.cloudpickle
from ranks_alive import wait_until

from polyhvd.installed import is_installed
from polyhvd.ray import ElasticRayExecutor
from polyhvd.runtime.metrics import METRICS, PREFIX

pytestmark = [
    pytest.mark.nightly,  # Ray's agents take long to start
    pytest.mark.skipif(
        not is_installed("opencensus") and not is_installed("opentelemetry"),
        reason="Ray exports metrics only with its extra: pip install 'ray[default]'",
    ),
]

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
BUSY_S = 120.0


def exported() -> dict[tuple[str, str], list[float]]:
    """The values of polyhvd's gauges on all nodes, by name and rank."""
    found: dict[tuple[str, str], list[float]] = {}
    for node in ray.nodes():
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as page:
            for line in page.read().decode().splitlines():
                if (
                    match := re.fullmatch(r'ray_(polyhvd_\w+)\{.*\brank="(\d+)".*\} (\S+)', line)
                ) is not None:
                    found.setdefault((match[1], match[2]), []).append(float(match[3]))
    return found


def steps(folder: Path) -> None:
    """Make steps until the test has read the gauges. One rank is killed, and a spare takes its place."""
    hvd.init()
    state = hvd.elastic.ArrayState(total=np.zeros(1000), steps=0)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        is_done = False
        while not is_done:
            is_done = hvd.broadcast_object((folder / "done").exists(), root_rank=0)
            if hvd.rank() == 1 and state.steps == 30 and not (folder / "lost").exists():
                (folder / "lost").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            state.total += hvd.allreduce(np.ones(1000), name="ones")
            state.steps += 1
            time.sleep(0.03)
            state.commit()

    loop(state)


def test_prometheus_reads_the_gauges_of_each_rank(tmp_path: Path) -> None:
    executor = ElasticRayExecutor(ElasticRayExecutor.create_settings(2, 2, timeout_s=BUSY_S, spares=1))
    executor.start()
    thread = threading.Thread(target=lambda: executor.run(lambda: steps(tmp_path)))
    thread.start()

    def are_complete() -> bool:
        found = exported()
        return max(found.get((f"{PREFIX}world_changes_total", "0"), [0])) >= 1 and {
            (PREFIX + metric.name, rank) for metric in METRICS for rank in "01"
        } <= set(found)

    try:
        wait_until(are_complete, "all gauges of both ranks, after a recovery", BUSY_S)
        found = exported()
    finally:
        (tmp_path / "done").touch()
        thread.join()
    for rank in "01":
        assert max(found["polyhvd_ranks", rank]) == 2
        assert max(found["polyhvd_step_seconds", rank]) >= 0.03
        assert max(found["polyhvd_moved_bytes_total", rank]) > 0
        assert max(found["polyhvd_operations_total", rank]) > 30
        assert max(found["polyhvd_wait_seconds_total", rank]) >= 0
