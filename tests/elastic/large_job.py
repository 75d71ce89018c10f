"""A rank of an elastic job with much memory: rank 1 is killed, and the others say when they hear of it.

Arguments: a folder, and megabytes. Rank 1 holds the only writing end of FOLDER/pipe, opened before any
connection, so that it is closed before them when the kernel closes the files of the dead process.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import polyhvd.numpy as hvd

FOLDER, MEGABYTES = Path(sys.argv[1]), int(sys.argv[2])
STEPS = 20

if os.environ["POLYHVD_MEMBER"] == "1":
    os.open(FOLDER / "pipe", os.O_WRONLY)
memory = np.ones(MEGABYTES << 18, np.float32)
hvd.init()


@hvd.elastic.run
def train(state: Any) -> None:
    while state.step < STEPS:
        if state.step == 7 and os.environ["POLYHVD_MEMBER"] == "1":
            for thread in os.listdir("/proc/self/task"):  # others come first on a busy machine
                os.setpriority(os.PRIO_PROCESS, int(thread), 19)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            hvd.allreduce(np.ones(5), name="gradient")
        except hvd.HorovodInternalError as error:
            marked = hvd.counters()["deaths_marked"]
            print(f"heard {time.monotonic()} marked {marked} by {error}", flush=True)
            raise
        state.step += 1
        state.commit()


train(hvd.elastic.ArrayState(step=0))
print(f"end size {hvd.size()}", flush=True)
