"""The driver, the raylet or the GCS is killed in each phase of a job: nothing stays behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import SETTINGS
from ranks_alive import is_running, wait_until

from polyhvd.elastic.checkpoint import Folder

pytestmark = pytest.mark.nightly  # each has a cluster that is lost

END_S = 5.0
BUSY_S = 120.0
RANKS = 3
#: Seconds after which Ray gives a lost GCS up; its default is a minute.
GCS_S = 3

CLUSTER = """
import json, sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "object_store_memory": 1 << 28})
kinds = {"gcs": "gcs_server", "raylet": "raylet"}
found = {kind: cluster.head_node.all_processes[name][0].process.pid for kind, name in kinds.items()}
print(json.dumps({"address": cluster.address, **found}), flush=True)
sys.stdin.read()
cluster.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
"""

DRIVER = """
import os, signal, sys, threading, time
from pathlib import Path

import ray
from polyhvd.ray import ElasticRayExecutor, RayExecutor

address, phase, folder = sys.argv[1:]


def note(name):
    Path(folder, f"{name}-{os.getpid()}").touch()


class Slow:
    def __init__(self):
        note("rank")
        note("ready")
        time.sleep(600)


def train():
    import numpy as np
    import polyhvd.numpy as hvd
    from polyhvd.data import ArrayLoader
    from polyhvd.elastic import train as module

    note("rank")
    hvd.init()

    class Training(module.Training):
        def save(self):
            super().save()
            if phase == "commit" and self.steps > 5:
                note("ready")
                time.sleep(600 * (hvd.rank() == 0))

    module.Training = Training
    state = hvd.elastic.ArrayState(weights=np.zeros(1000), steps=0)

    def step(batch):
        state.weights += hvd.allreduce(np.ones(1000), name="ones")
        state.steps += 1
        time.sleep(0.02)
        if state.steps > 5 and phase == "step":
            note("ready")
        if state.steps > 5 and phase == "recovery":
            if hvd.rank() == 1:
                Path(folder, f"rank-{os.getpid()}").unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            note("ready")

    rows = ArrayLoader([np.arange(1000.0)], batch_size=1, seed=1)
    checkpoint = os.path.join(folder, "checkpoints")
    hvd.elastic.train(step, state, rows, epochs=100, checkpoint=checkpoint, checkpoint_every=1)


def wait():
    note("rank")
    time.sleep(600)


ray.init(address=address, log_to_driver=False)
if phase == "start":
    RayExecutor(num_workers=3).start(Slow)
elif phase == "shutdown":
    executor = RayExecutor(num_workers=3)
    executor.start()
    executor.run_remote(wait)
    while len(list(Path(folder).glob("rank-*"))) < 3:
        time.sleep(0.05)
    threading.Timer(0.5, note, ["ready"]).start()
    executor.shutdown()  # waits for ranks that are busy
else:
    settings = ElasticRayExecutor.create_settings(3, 3, timeout_s=60, cooldown_range=(600, 600))
    executor = ElasticRayExecutor(settings)
    executor.start()
    executor.run(train)
"""


@contextlib.contextmanager
def a_cluster() -> Iterator[dict[str, Any]]:
    """A cluster of one node in separate processes: its address, and the process ids of GCS and raylet."""
    env = {**os.environ, **SETTINGS, "RAY_gcs_rpc_server_reconnect_timeout_s": str(GCS_S)}
    words = [sys.executable, "-c", CLUSTER]
    with subprocess.Popen(words, stdin=-1, stdout=-1, text=True, env=env) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        try:
            yield json.loads(holder.stdout.readline())
        finally:
            holder.stdin.close()


def noted(folder: Path, name: str) -> list[int]:
    return [int(path.name.partition("-")[2]) for path in folder.glob(f"{name}-*")]


@pytest.mark.parametrize("phase", ["start", "step", "commit", "recovery", "shutdown"])
@pytest.mark.parametrize("lost", ["driver", "raylet", "gcs"])
def test_nothing_outlives_its_driver_or_raylet_and_checkpoints_are_whole(
    lost: str, phase: str, tmp_path: Path
) -> None:
    env = {**os.environ, "RAY_gcs_rpc_server_reconnect_timeout_s": str(GCS_S)}
    with a_cluster() as cluster, (tmp_path / "log").open("wb") as log:
        words = [sys.executable, "-c", DRIVER, cluster["address"], phase, str(tmp_path)]
        with subprocess.Popen(words, stdout=log, stderr=log, env=env) as driver:
            try:
                ready = 1 if phase == "shutdown" else RANKS - (phase == "recovery")
                wait_until(lambda: len(noted(tmp_path, "ready")) >= ready, "the phase begins", BUSY_S)
                ranks = noted(tmp_path, "rank")
                assert ranks
                os.kill(driver.pid if lost == "driver" else cluster[lost], signal.SIGKILL)
                if lost == "gcs":
                    wait_until(lambda: not is_running(cluster["raylet"]), "Ray gives up", BUSY_S)
                wait_until(lambda: not any(map(is_running, ranks)), "the ranks end", END_S)
                if lost != "driver":
                    driver.wait(BUSY_S)
            finally:
                driver.kill()
        late = noted(tmp_path, "rank")
        assert not any(map(is_running, late))
    if phase in ("step", "commit", "recovery"):
        folder = Folder(tmp_path / "checkpoints")
        for number in folder.numbers():
            folder.read(number)
        assert folder.numbers()[0] >= 5
        assert not folder.torn()
