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
SPARE = os.environ["POLYHVD_MEMBER"] == "2"
if SPARE:
    current.on_wait((FOLDER / "prepared").touch)

hvd.init()
imported = "torch._dynamo" in sys.modules
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)


def wait_for_the_spare_and_die() -> None:
    until = time.monotonic() + 60.0
    while not (FOLDER / "prepared").exists() and time.monotonic() < until:
        time.sleep(0.05)
    (FOLDER / "killed").touch()
    os.kill(os.getpid(), signal.SIGKILL)


@hvd.elastic.run
def train(state: Any) -> None:
    while state.step < 20:
        hvd.allreduce(torch.ones(4), name="gradient")
        state.step += 1
        state.commit()
        if state.step == 5 and hvd.rank() == 1 and not (FOLDER / "killed").exists():
            wait_for_the_spare_and_die()


train(state)
print(f"end {state.step} of {hvd.size()}{f', a spare: imported {imported}' if SPARE else ''}", flush=True)
