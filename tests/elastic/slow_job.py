"""A program one rank of which is slow, and that says what slow_ranks() tells it.

Argument: a folder, in which a file `done` ends it. SLOW is the rank in the first world that sleeps for SLOW_S
in each step, or "all", with one pause of rank 1. With WAITS_FOR_DATA the sleep counts as waiting for data.
STEP_S is what a step takes all. Its weights tell whether a step was lost or made twice.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import polyhvd.numpy as hvd

from polyhvd.data.counting import waiting
from polyhvd.runtime import current

FOLDER = Path(sys.argv[1])
SLOW, SLOW_S = os.environ["SLOW"], float(os.environ.get("SLOW_S", "0.06"))
STEP_S = float(os.environ.get("STEP_S", "0.005"))
STALL_S = float(os.environ.get("STALL_S", "0"))
WAITS_FOR_DATA = "WAITS_FOR_DATA" in os.environ
MEMBER = os.environ["POLYHVD_MEMBER"]

first_rank = ""  # of this process in the first world; empty: it was in none


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())  # at once


def work(step: int) -> None:
    time.sleep(STEP_S)
    if SLOW in ("all", first_rank):
        with waiting() if WAITS_FOR_DATA else nullcontext():
            time.sleep(SLOW_S)
    if SLOW == "all" and first_rank == "1" and step == 30:
        time.sleep(20 * SLOW_S)
    if STALL_S and first_rank == SLOW and (FOLDER / "stall").exists():
        (FOLDER / "stall").unlink()
        time.sleep(STALL_S)


@hvd.elastic.run
def train(state: Any) -> None:
    global first_rank
    place = current.world().placement
    if place.generation == 1:
        first_rank = str(place.rank)
    say(f"world {place.generation} size {place.size} rank {place.rank} process {MEMBER} from {state.step}.")
    named = ""
    while not state.done:
        work(state.step)
        done = hvd.allreduce(np.array([(FOLDER / "done").exists()], float), op=hvd.Max, name="done")[0]
        state.weights += hvd.allreduce(np.full(100, state.step + 1.0), op=hvd.Average, name="gradient")
        state.step += 1
        state.done = bool(done)
        text = " ".join(f"{item.rank}@{item.host}x{item.factor > 1.5}" for item in hvd.elastic.slow_ranks())
        if text != named:
            named = text
            say(f"process {MEMBER} hears: {text or 'nobody'} at {state.step}.")
        if state.step % 50 == 0:
            say(f"process {MEMBER} step {state.step}.")
        state.commit()


hvd.init()
STATE = hvd.elastic.ArrayState(weights=np.zeros(100), step=0, done=False)
train(STATE)
assert (STATE.weights == sum(range(1, STATE.step + 1))).all()
say(f"end {STATE.step} size {hvd.size()}")
