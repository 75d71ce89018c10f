"""Autotuning over generations: what was found, and the search for it, outlive the loss of a rank."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import pytest
from launching import Launcher

pytest.importorskip("sklearn")
pytestmark = pytest.mark.slow  # each search fits a few dozen models

PROGRAM = """
import os, time
import numpy as np
import polyhvd.numpy as hvd
from polyhvd.runtime import current
state = hvd.elastic.ArrayState(step=0)
hvd.init()

def phases():
    if not os.path.exists(LOG):
        return []
    return [line.split(",")[0] for line in open(LOG).read().splitlines()[1:]]

@hvd.elastic.run
def train(state):
    is_first, ended = current.world().placement.generation == 1, 0.0
    while not ended and state.step < 5000:
        if is_first and hvd.rank() == VICTIM and len(phases()) >= 4:
            os.kill(os.getpid(), 9)
        for size in (100, 30_000):
            assert (hvd.allreduce(np.full(size, 2.0, np.float32), name=f"x{size}") == 2).all()
        ended = hvd.allreduce(np.array([float("best" in phases())]), op=hvd.Min, name="ended")[0]
        time.sleep(0.01)
        state.step += 1
        state.commit()

train(state)
"""


@pytest.mark.parametrize(("victim", "searches"), [(1, 1), (0, 2)])
def test_search_goes_on_where_rank_0_is_left(
    launcher: Launcher, tmp_path: Path, victim: int, searches: int
) -> None:
    log = tmp_path / "log.csv"
    settings = {"AUTOTUNE_WARMUP_SAMPLES": 1, "AUTOTUNE_STEPS_PER_SAMPLE": 2}
    settings["AUTOTUNE_BAYES_OPT_MAX_SAMPLES"] = 8
    words = [word for name, value in settings.items() for word in ("-x", f"POLYHVD_{name}={value}")]
    status, _, err = launcher.run(
        *(
            "-np",
            "3",
            "--min-np",
            "3",
            "--spares",
            "1",
            "--autotune",
            "--autotune-log-file",
            str(log),
            *words,
        ),
        source=PROGRAM.replace("VICTIM", str(victim)).replace("LOG", repr(str(log))),
    )
    assert status == 0, err
    with log.open(newline="") as file:
        logged = [row["phase"] for row in csv.DictReader(file)]
    counts = Counter(logged)
    assert counts["warm-up"] == searches
    assert counts["best"] == 1
    assert logged[-1] == "best"
    if searches == 1:
        assert counts["sample"] == 8
    else:  # a new rank 0 begins a search of its own, in the same log
        assert counts["sample"] > 8
