"""The program of an elastic fault case: it trains, does to itself what the case says, and tells the end.

Arguments: a folder, the number of steps, and faults as JSON, each done once in the whole job.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import polyhvd.numpy as hvd

FOLDER, STEPS, FAULTS = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])


def suffer(step: int) -> None:
    """Begin what is to befall this rank in this step."""
    for number, fault in enumerate(FAULTS):
        if (fault["victim"], fault["step"]) != (hvd.rank(), step):
            continue
        try:
            (FOLDER / f"fault {number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        threading.Thread(target=do, args=(fault,), daemon=True).start()


def do(fault: dict[str, Any]) -> None:
    time.sleep(fault["wait_s"])
    if fault["kind"] == "shut a socket":
        shut_a_socket(fault["pick"])
    elif fault["kind"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        word = "CONT" if fault["kind"] == "stop" else "KILL"
        subprocess.Popen(["sh", "-c", f"sleep {fault['hold_s']}; kill -{word} {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)


def shut_a_socket(pick: int) -> None:
    """Cut one of this rank's connections, of which some are to the launcher."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(int(name))
        except OSError:
            continue
    if found:
        try:
            with socket.socket(fileno=os.dup(sorted(found)[pick % len(found)])) as cut:
                cut.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is closed meanwhile, or listens


@hvd.elastic.run
def train(state: Any) -> None:
    while state.step < STEPS:
        suffer(state.step)
        number = state.step + 1.0
        large = hvd.allreduce(np.full(50_000, number), op=hvd.Average, name="large")
        handles = [hvd.allreduce_async(np.full(3, number), op=hvd.Average, name=f"s{i}") for i in range(3)]
        state.weights += large[:3] + sum(hvd.synchronize(handle) for handle in handles)
        state.step += 1
        state.commit()


hvd.init()
state = hvd.elastic.ArrayState(weights=np.zeros(3), step=0)
train(state)
print(f"end {state.step} {sorted(set(state.weights.tolist()))} of {hvd.size()}", flush=True)
