"""The examples for Ray, and scripts as users of Horovod have them: only the import differs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
EXAMPLES = TESTS.parent / "examples"  # copied beside the tests
BUSY_S = 240.0


def run(words: list[str], cluster: str) -> list[str]:
    """The lines of standard output of a driver that connects to the tests' cluster."""
    script = [sys.executable, *words, "--address", cluster]
    done = subprocess.run(script, capture_output=True, text=True, timeout=BUSY_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", ["numpy", "elastic"])
def test_example_trains_with_a_falling_loss(name: str, cluster: str) -> None:
    lines = run([str(EXAMPLES / f"ray_{name}.py"), "--epochs", "10"], cluster)
    losses = [float(found[1]) for line in lines if (found := re.search(r"^epoch .*loss ([\d.]+)", line))]
    assert len(losses) == 10
    assert losses[-1] < losses[0] / 2
    last = re.match(r"test accuracy ([\d.]+)", lines[-1])
    assert last, lines
    assert float(last[1]) > 0.93


BASIC = """
import sys

import numpy as np
import ray
from polyhvd.ray import RayExecutor
import polyhvd.numpy as hvd

ray.init(address=sys.argv[2])
settings = RayExecutor.create_settings(timeout_s=60)
executor = RayExecutor(settings, num_workers=2, use_gpu=False)
executor.start()


def size_and_rank():
    hvd.init()
    return hvd.size(), hvd.rank()


assert executor.run(size_and_rank) == [(2, 0), (2, 1)]
assert ray.get(executor.run_remote(size_and_rank)) == [(2, 0), (2, 1)]
assert executor.run(lambda a, b: a + b, args=[1], kwargs={"b": 2}) == [3, 3]
executor.shutdown()


class Accumulator:
    def __init__(self, start, scale=1):
        hvd.init()
        self.total, self.scale = start, scale

    def add(self, value):
        self.total += self.scale * float(hvd.allreduce(np.array([value + hvd.rank()]), op=hvd.Sum)[0])
        return self.total


executor = RayExecutor(settings, num_hosts=2, num_workers_per_host=1)
executor.start(executable_cls=Accumulator, executable_args=[10], executable_kwargs={"scale": 2})
assert executor.execute(lambda worker: worker.add(1)) == [16.0, 16.0]
assert executor.execute(lambda worker: worker.add(0)) == [18.0, 18.0]
assert executor.execute_single(lambda worker: worker.total) == 18.0
executor.shutdown()
print("done")
"""

ELASTIC = """
import sys

import numpy as np
import ray
from polyhvd.ray import ElasticRayExecutor, RayExecutor
import polyhvd.numpy as hvd


def training_fn():
    hvd.init()
    state = hvd.elastic.ArrayState(weight=np.ones(2), batch=0)

    @hvd.elastic.run
    def train(state):
        while state.batch < 5:
            state.weight *= hvd.allreduce(np.full(2, 2.0), name="factor")
            state.batch += 1
            state.commit()
        return state.weight.tolist()

    return train(state)


ray.init(address=sys.argv[2])
settings = ElasticRayExecutor.create_settings(min_np=2, max_np=2, verbose=True)
executor = ElasticRayExecutor(settings, use_gpu=False, cpus_per_slot=1)
executor.start()
assert executor.run(training_fn) == [[32.0, 32.0]] * 2

settings = RayExecutor.create_settings(timeout_s=60)
executor = RayExecutor(settings, min_workers=1, max_workers=2, cpus_per_worker=1)
executor.start()
assert executor.run(training_fn) == [[32.0, 32.0]] * 2
executor.shutdown()
print("done")
"""


@pytest.mark.parametrize("script", [BASIC, ELASTIC], ids=["basic", "elastic"])
def test_scripts_of_horovod_run_with_the_import_changed(script: str, cluster: str) -> None:
    assert run(["-c", script], cluster)[-1] == "done"
