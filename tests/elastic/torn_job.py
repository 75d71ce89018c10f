"""A model that is updated part by part, with a collective between, so that a loss leaves the others torn.

Arguments: the framework (numpy or torch), a folder, a rank and a step at which it is killed between two,
and commit_every. It tells a digest of the weights, and a file says who was torn.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from polyhvd.data import ArrayLoader
from polyhvd.elastic.train import Training

FRAMEWORK, FOLDER = sys.argv[1], Path(sys.argv[2])
RANK, STEP, COMMIT_EVERY = map(int, sys.argv[3:6])
PARTS, ROWS, BATCH = 4, 96, 4

hvd = importlib.import_module("polyhvd." + FRAMEWORK)
hvd.init()
data = np.random.default_rng(3).normal(size=(ROWS, 5))
begun = updated = 0  # parts that this process has begun and ended to update


def die(number: int) -> None:
    if (hvd.rank(), number) != (RANK, STEP) or (FOLDER / "killed").exists():
        return
    (FOLDER / "killed").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def numpy_model() -> tuple[Any, Any, Any]:
    state = hvd.elastic.ArrayState(parts=[np.full(5, float(number)) for number in range(PARTS)])

    def update(number: int, rows: Any) -> None:
        part = state.parts[number]
        part += 0.1 * hvd.allreduce(np.tanh(rows.mean(0) - part), name=f"part.{number}")

    return state, update, lambda: state.parts


def torch_model() -> tuple[Any, Any, Any]:
    import torch

    model = torch.nn.ParameterList([torch.full((5,), float(number)) for number in range(PARTS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer)

    def update(number: int, rows: Any) -> None:
        part = model[number]
        for other in model:
            other.grad = None  # the optimizer updates this one alone
        part.grad = hvd.allreduce(
            torch.tanh(part.detach() - torch.from_numpy(rows.mean(0)).float()), name=f"part.{number}"
        )
        optimizer.step()

    return state, update, lambda: [part.detach().numpy() for part in model]


made: list[Training] = []
train_module = importlib.import_module("polyhvd.elastic.train")


class KnownTraining(Training):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        super().__init__(*args, **kwargs)

    def restore(self) -> None:
        if begun != updated and updated % PARTS:
            (FOLDER / f"torn {hvd.__name__} {os.getpid()}").touch()
        super().restore()


train_module.Training = KnownTraining  # type: ignore[attr-defined]
state, update, values = {"numpy": numpy_model, "torch": torch_model}[FRAMEWORK]()


def step(batch: Any) -> None:
    global begun, updated
    for number in range(PARTS):
        begun += 1
        if number == PARTS // 2:
            die(made[-1].steps)
        update(number, batch[0] * batch.weight)
        updated += 1


loader = ArrayLoader([data], batch_size=BATCH, seed=3)
hvd.elastic.train(step, state, loader, epochs=2, progress=False, commit_every=COMMIT_EVERY)
digest = hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in values())).hexdigest()[:16]
print(f"end {digest} steps {made[-1].steps} size {hvd.size()}", flush=True)
