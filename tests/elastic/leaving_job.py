"""A program that trains until a file says so, tells its world, and what it does when it leaves.

Argument: a folder, in which the file is to be. Its weights tell whether a step was lost or made twice.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import polyhvd.numpy as hvd

from polyhvd.elastic.leaving import Leave, on_leave
from polyhvd.runtime import current

FOLDER = Path(sys.argv[1])
STEP_S = float(os.environ.get("STEP_S", "0.01"))
COMMIT_EVERY = int(os.environ.get("COMMIT_EVERY", "1"))


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())  # at once


@hvd.elastic.run
def train(state: Any) -> None:
    place = current.world().placement
    pids = hvd.allgather_object(os.getpid())
    if place.rank == 0:
        listed = " ".join(map(str, pids))
        say(f"world {place.generation} size {place.size} from {state.step} pids {listed}.")
    while not state.done:
        if state.step % COMMIT_EVERY == 0:
            state.commit()
        elif os.environ.get("NO_CHECKS") != "1":
            state.check_host_updates()
        done = hvd.allreduce(np.array([(FOLDER / "done").exists()], float), op=hvd.Max, name="done")[0]
        state.weights += hvd.allreduce(np.full(100, state.step + 1.0), op=hvd.Average, name="gradient")
        state.step += 1
        state.done = bool(done)
        time.sleep(STEP_S)


hvd.init()
STATE = hvd.elastic.ArrayState(weights=np.zeros(100), step=0, done=False)
STATE.register_reset_callbacks([lambda: say("reset")])


@on_leave
def leave(notice: Leave) -> None:
    assert (STATE.weights == sum(range(1, STATE.step + 1))).all()
    say(f"left rank {notice.rank} of {notice.size} everyone {notice.everyone} step {STATE.step}")
    if os.environ.get("LEAVE_FAILS") == "1":
        raise hvd.PeerLostError("of a function of on_leave()")


train(STATE)
assert (STATE.weights == sum(range(1, STATE.step + 1))).all()
say(f"end {STATE.step} size {hvd.size()}")
