"""A program that trains on NumPy arrays, is killed where a test says so, and tells what it has done.

Arguments: a folder, and places at which a process kills itself, each once in the whole job:

    step:RANK:STEP            in the step, before its collective
    commit:RANK:STEP          after the step, before its commit
    meet:RANK:GENERATION:STAGE   while the ranks of that generation meet
    sync:RANK:GENERATION      while the state is sent
    init                      the first replacement, before init()
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import polyhvd.numpy as hvd
from dying import Kills, die_in_meetings

from polyhvd.runtime import current

KILLS = Kills(Path(sys.argv[1]), sys.argv[2:])
STEPS = int(os.environ.get("STEPS", "30"))
STEP_S = float(os.environ.get("STEP_S", "0.01"))
JOINS = "POLYHVD_RANK" not in os.environ
die_in_meetings(KILLS)


class KilledState(hvd.elastic.ArrayState):
    def _sync_from(self, root: int, *, among: Any) -> None:
        KILLS.die_at("sync", hvd.rank(), current.world().placement.generation)
        super()._sync_from(root, among=among)


def wait_for_the_replacement() -> None:
    """It is started half a second after the loss, and has NumPy to import before it can die."""
    until = time.monotonic() + 30.0
    while not KILLS.is_done("init") and time.monotonic() < until:
        time.sleep(0.01)


def newcomer_is_to_die() -> bool:
    """Whether somebody who is to die in generation 3 has yet to come: it has NumPy to import before."""
    return any(place.split(":")[2] == "3" for place in KILLS.pending("meet", "sync"))


@hvd.elastic.run
def train(state: Any) -> None:
    generation = current.world().placement.generation
    print(f"from {state.step} generation {generation} rank {hvd.rank()} size {hvd.size()}", flush=True)
    while state.step < STEPS:
        if KILLS.is_wanted("init") and state.step == STEPS // 2:
            wait_for_the_replacement()
        KILLS.die_at("step", hvd.rank(), state.step)
        contribution = np.full(5, float(state.step + 1))
        state.weights += hvd.allreduce(contribution, op=hvd.Average, name="gradient")
        state.layers["b"] += hvd.allreduce(contribution[:2], op=hvd.Average, name="second")
        KILLS.die_at("commit", hvd.rank(), state.step)
        state.step += 1
        time.sleep(0.3 if generation == 2 and newcomer_is_to_die() else STEP_S)
        state.commit()


def main() -> None:
    if JOINS:
        KILLS.die_at("init")
    hvd.init()
    # One word counts: rank 0's or, where that dies before another has had its values, one of theirs.
    state = KilledState(weights=np.zeros(5), layers={"b": np.zeros(2)}, step=0, words=[os.getpid()])
    state.register_reset_callbacks([lambda: print("reset", flush=True)])
    train(state)
    weights = [*state.weights.tolist(), *state.layers["b"].tolist()]
    print(f"end {state.step} {sorted(set(weights))} {len(state.words)} size {hvd.size()}", flush=True)


main()
