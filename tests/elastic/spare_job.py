"""A job of PyTorch that loses a rank once its spare waits. The spare says what it has imported by then.

Argument: a folder.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import polyhvd.torch as hvd
import torch

from polyhvd.runtime import current

FOLDER = Path(sys.argv[1])
current.on_wait((FOLDER / f"prepared {os.getpid()}").touch)

hvd.init()
generation = current.world().placement.generation
imported = "torch._dynamo" in sys.modules
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)


def wait_for_the_spare_and_die(pids: set[int]) -> None:
    until = time.monotonic() + 60.0
    while time.monotonic() < until:
        prepared = {int(path.name.split()[1]) for path in FOLDER.glob("prepared *")}
        if prepared - pids:
            break
        time.sleep(0.05)
    (FOLDER / "killed").touch()
    os.kill(os.getpid(), signal.SIGKILL)


@hvd.elastic.run
def train(state: Any) -> None:
    pids = set(hvd.allgather_object(os.getpid()))
    while state.step < 20:
        hvd.allreduce(torch.ones(4), name="gradient")
        state.step += 1
        state.commit()
        if state.step == 5 and hvd.rank() == 1 and not (FOLDER / "killed").exists():
            wait_for_the_spare_and_die(pids)


train(state)
said = f", a spare: imported {imported}" if generation > 1 else ""
print(f"end {state.step} of {hvd.size()}{said}", flush=True)
