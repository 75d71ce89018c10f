"""Ctrl-C in a notebook that runs jobs on Ray; `make nightly` has a kernel of Jupyter beside Ray."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jupyter_client")
pytest.importorskip("ipykernel")

from notebooks import Notebook
from ranks_alive import is_running, wait_until

END_S = 5.0
BUSY_S = 60.0  # for what takes a second on an idle machine

SETUP = """
import os, pathlib, time
import numpy as np
import polyhvd.numpy as hvd
import ray
from polyhvd.ray import ElasticRayExecutor, RayExecutor

ray.init(address={cluster!r}, log_to_driver=False)
fixed = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=2)
fixed.start()
elastic = ElasticRayExecutor(ElasticRayExecutor.create_settings(2, 2, timeout_s=60))
elastic.start()

def train(folder):
    hvd.init()
    state = hvd.elastic.ArrayState(total=np.zeros(2), steps=0)

    @hvd.elastic.run
    def loop(state):
        while True:
            state.total += hvd.allreduce(np.ones(2), name="ones")
            pathlib.Path(folder, str(os.getpid())).touch()
            time.sleep(0.02)
            state.commit()

    loop(state)

def hang(folder):
    hvd.init()
    pathlib.Path(folder, str(os.getpid())).touch()
    if hvd.rank() == 0:
        time.sleep(600)
    hvd.barrier()
"""


@pytest.fixture(scope="module")
def notebook(ray_cluster: Any) -> Iterator[Notebook]:
    """A notebook that has an executor of each kind."""
    notebook = Notebook()
    try:
        printed, error = notebook.run(SETUP.format(cluster=ray_cluster.address))
        assert error is None, printed
        yield notebook
    finally:
        notebook.kernel.shutdown_kernel(now=True)


@pytest.mark.parametrize(
    ("cell", "next_cell"),
    [
        ("fixed.run(hang, [{!r}])", "fixed.start(); fixed.run(lambda: 7)"),
        ("elastic.run(lambda: train({!r}))", "elastic.run(lambda: 7)"),
    ],
    ids=["fixed", "elastic"],
)
def test_an_interruption_ends_the_ranks_and_the_executor_can_be_used(
    cell: str, next_cell: str, notebook: Notebook, tmp_path: Path
) -> None:
    moments = []

    def interrupt() -> None:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2, "two ranks work", BUSY_S)
        moments.append(time.monotonic())
        notebook.kernel.interrupt_kernel()

    thread = threading.Thread(target=interrupt)
    thread.start()
    _, error = notebook.run(cell.format(str(tmp_path)))
    thread.join()
    assert error == "KeyboardInterrupt"
    assert time.monotonic() - moments[0] < END_S
    processes = [int(path.name) for path in tmp_path.iterdir()]
    wait_until(lambda: not any(map(is_running, processes)), "the processes end", END_S)
    assert notebook.run(next_cell)[1] == "[7, 7]"
