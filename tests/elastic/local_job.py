"""Ranks that have something of their own. Argument: a file that is there once rank 1 was killed."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import numpy as np
import polyhvd.numpy as hvd

from polyhvd.data import ArrayLoader
from polyhvd.runtime import current

hvd.init()
mine = np.zeros(3)
first = current.world().placement.generation == 1
if first:
    mine[0] = 1000 * (hvd.rank() + 1)
    np.random.seed(hvd.rank())
state = hvd.elastic.ArrayState(steps=0)


def step(batch: Any) -> None:
    if state.steps == 5 and first and hvd.rank() == 1 and not os.path.exists(sys.argv[1]):
        open(sys.argv[1], "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    mine[1] += 1
    mine[2] = np.random.random()
    hvd.allreduce(np.ones(2), name="x")
    state.steps += 1


state.register_local("mine", lambda: mine, lambda value: mine.__setitem__(slice(None), value))
hvd.elastic.train(step, state, ArrayLoader([np.zeros(60)], batch_size=2), epochs=1, progress=False)
print(f"end {'old' if first else 'new'} {int(mine[0])} {int(mine[1])} {mine[2]!r}", flush=True)
