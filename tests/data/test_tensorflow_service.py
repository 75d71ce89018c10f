"""tf.data's service beside a training job: its elements, and the end of one job when the other is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fork_servers import IMPORTS, SETTINGS, ForkServers  # tests/harness, on the path by tests/conftest.py
from launching import DEADLINE_S, pids
from ranks_alive import is_running, wait_until

from polyhvd.testing.stand_ins import is_installed

pytestmark = [
    pytest.mark.skipif(not is_installed("tensorflow"), reason="TensorFlow is not installed"),
    pytest.mark.slow,  # a compute job stays for ten seconds
]
RANKS = 2

TRAINING = """
import os, sys
import tensorflow as tf
import polyhvd.tensorflow as hvd
from polyhvd.tensorflow.data.compute_service import TfDataServiceConfig, send_to_data_service, tf_data_service

hvd.init()
os.write(1, b"pid %d\\n" % os.getpid())
config = TfDataServiceConfig.read(sys.argv[1], wait_for_file_creation=True, timeout=100)
data = tf.data.Dataset.range(60).map(lambda x: x + 1)
if sys.argv[2] == "shared":
    data = data.send_to_data_service(config, hvd.rank(), hvd.size(), reuse_dataset=True)
    seen = hvd.allgather_object([int(x) for x in data])
    if hvd.rank() == 0:
        print("seen", sorted(sum(seen, [])) == list(range(1, 61)), flush=True)
elif sys.argv[2] == "each":
    with tf_data_service(config, hvd.rank()) as address:
        data = data.apply(tf.data.experimental.service.distribute("distributed_epoch", address))
        print("seen", sorted(int(x) for x in data) == list(range(1, 61)), flush=True)
        hvd.barrier()
else:
    with tf_data_service(config, hvd.rank()) as address:
        data = data.repeat().apply(tf.data.experimental.service.distribute("distributed_epoch", address))
        for number, x in enumerate(data):
            if number == 5:
                os.write(1, b"reading\\n")
"""

#: What python -m runs, since forks run scripts.
WORKER = """
import os, runpy
os.write(1, b"pid %d\\n" % os.getpid())
runpy.run_module("polyhvd.tensorflow.data.compute_worker", None, "__main__")
"""


class Job:
    """A running polyhvdrun."""

    def __init__(self, folder: Path, python: list[str], name: str, *arguments: str) -> None:
        self.log = folder / f"{name}.log"
        with self.log.open("wb") as file:
            command = [sys.executable, "-m", "polyhvd.launch", "-np", str(RANKS), *python, *arguments]
            self.process: subprocess.Popen[Any] = subprocess.Popen(
                command, env={**os.environ, **SETTINGS}, stdout=file, stderr=subprocess.STDOUT
            )

    def text(self) -> str:
        return self.log.read_text()

    def ends(self) -> int:
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it has not ended:\n{self.text()}") from None


@pytest.fixture
def start(fork_servers: ForkServers, tmp_path: Path) -> Iterator[Any]:
    """Starts the two jobs: with arguments of the compute job, and what the training job does."""
    jobs = []
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)

    def started(does: str, *arguments: str) -> tuple[Job, Job, Path]:
        python = fork_servers.python(RANKS, IMPORTS["tensorflow"])
        file = tmp_path / "compute.json"
        jobs.append(Job(tmp_path, python, "compute", str(worker), str(file), *arguments))
        jobs.append(Job(tmp_path, python, "training", str(script), str(file), does))
        return jobs[0], jobs[1], file

    yield started
    for job in jobs:
        job.process.kill()
        job.process.wait()
    ranks = [pid for job in jobs for pid in pids(job.log.read_bytes())]
    wait_until(lambda: not any(map(is_running, ranks)), "all ranks have ended")


def test_ranks_share_the_elements_and_the_service_ends_after_them(start: Any) -> None:
    compute, training, file = start("shared")
    assert training.ends() == 0, training.text() + compute.text()
    assert "seen True" in training.text()
    assert compute.ends() == 0, compute.text()
    assert not file.exists()


@pytest.mark.nightly
def test_dispatchers_of_a_training_job_give_each_rank_all_elements(start: Any) -> None:
    compute, training, _ = start("each", "--dispatchers", "2", "--dispatcher-side", "training")
    assert training.ends() == 0, training.text() + compute.text()
    assert training.text().count("seen True") == RANKS
    assert compute.ends() == 0, compute.text()


@pytest.mark.parametrize("side", ["compute", pytest.param("training", marks=pytest.mark.nightly)])
def test_reading_raises_an_error_when_the_compute_job_is_killed(start: Any, side: str) -> None:
    compute, training, _ = start("endless", "--dispatcher-side", side)
    wait_until(lambda: training.text().count("reading") == RANKS, "both ranks read")
    compute.process.kill()
    assert training.ends() == 1, training.text()
    assert "DataError: tf.data's service at " in training.text()
    assert "its compute job was killed" in training.text()


def test_compute_job_ends_when_the_training_job_is_killed(start: Any) -> None:
    compute, training, file = start("endless", "--dispatchers", "2")
    wait_until(lambda: training.text().count("reading") == RANKS, "both ranks read")
    training.process.kill()
    assert compute.ends() == 0, compute.text()
    assert not file.exists()
