"""A training that is killed from outside at any moment, and writes down what it does, for soak.py.

Arguments: the framework, and a folder with

    table      a row for each process, by its number: pid, generation, rank, step, phase
    allowed    how many steps may be made so far
    steps-PID  a line for each step that a process begins: see :func:`note`

It is the training of train_job.py; ``SOAK_HOW`` is "train", with ``hvd.elastic.train``, or "run", with
``hvd.elastic.run``. With ``SOAK_PROLOGUE`` there are collectives before it. With ``SOAK_HISTORY`` NumPy makes
the steps of a former job again, without a failure, with as many ranks in each as there were.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from soak_model import INTEGERS, advanced, integers

FRAMEWORK, FOLDER = sys.argv[1], Path(sys.argv[2])
#: Phases of a process, as the killer tells them.
PHASES = ("starts", "waits for a place", "meets", "in a step", "commits", "is done", "in the prologue")
MEMBERS_MAX = 1 << 14
EPOCHS = int(os.environ.get("SOAK_EPOCHS", "3"))
HISTORY = os.environ.get("SOAK_HISTORY", "")
EXACT = os.environ.get("SOAK_MODEL") == "exact"
PROLOGUE = "SOAK_PROLOGUE" in os.environ

member = int(os.environ.get("POLYHVD_MEMBER") or 0)
if not HISTORY:
    table = np.memmap(FOLDER / "table", np.int64, "r+", shape=(MEMBERS_MAX, 5))
    allowed = np.memmap(FOLDER / "allowed", np.int64, "r", shape=(1,))
    table[member] = os.getpid(), 0, -1, -1, 0

faulthandler.register(signal.SIGUSR2, all_threads=True)

import train_job  # noqa: E402  it calls init(), where a spare waits
from train_job import hvd, numpy_hvd  # noqa: E402

from polyhvd.runtime import current  # noqa: E402

log = os.open(FOLDER / f"steps-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def enter(phase: int) -> None:
    """Where this process is, for who kills it."""
    table[member, 4] = phase


def note(step: int, epoch: int, done: int, rows: Any) -> None:
    """Before a step: the generation, rank, size, step, epoch, time and the rows that this rank has in it.

    Then wait until so many rows of all may be done.
    """
    place = current.world().placement
    table[member] = os.getpid(), place.generation, place.rank, step, 3
    entry = [place.generation, place.rank, place.size, step, epoch, time.time(), [int(row) for row in rows]]
    os.write(log, (json.dumps(entry) + "\n").encode())
    while epoch * train_job.ROWS + done >= allowed[0]:
        time.sleep(0.001)


def prologue() -> str:
    """Collectives before the elastic function; returns a word that is the same on all ranks."""
    if not PROLOGUE:
        return "none"
    enter(6)
    if FRAMEWORK in ("tensorflow", "tensorflow.keras", "keras"):
        import tensorflow as tf

        hvd.broadcast_variables([tf.Variable(tf.ones(3))], root_rank=0)
    elif FRAMEWORK == "torch":
        import torch

        hvd.broadcast_parameters({"w": torch.ones(3)}, root_rank=0)
    elif FRAMEWORK == "mxnet":
        import mxnet as mx

        hvd.broadcast_parameters({"w": mx.nd.ones(3)}, root_rank=0)
    else:
        hvd.broadcast_parameters({"w": np.ones(3)}, root_rank=0)
    numpy_hvd.barrier()
    return str(numpy_hvd.broadcast_object(f"of {os.getpid()}"))


def tell(values: list[Any], counts: Any, steps: int, word: str = "none") -> None:
    """What has become of the weights."""
    everything = b"".join(np.ascontiguousarray(item).tobytes() for item in values)
    digest = hashlib.sha256(everything).hexdigest()[:16]
    distinct = sorted(set(counts.tolist()))
    print(f"end {digest} prologue {word} counts {distinct} steps {steps}", flush=True)


class WatchedTraining(train_job.KilledTraining):
    """Says in which phase it is."""

    def save(self) -> None:
        if hvd.is_initialized():
            enter(4)
        super().save()

    def sync(self) -> None:
        enter(2)
        super().sync()

    def waiting(self) -> Any:
        enter(1)
        return super().waiting()


def counted(state: Any, rows: Any, weight: float, **where: Any) -> None:
    """Count rows of all ranks in the state."""
    mine = np.zeros(train_job.ROWS)
    np.add.at(mine, rows, 1.0 if weight else 0.0)
    state.counts = state.counts + numpy_hvd.allreduce(mine, op=numpy_hvd.Sum, name="rows", **where)


def exact_model() -> Any:
    """In integers, whose sums have the same bits also where they are associated by hosts."""
    state = hvd.elastic.ArrayState(w=np.ones(INTEGERS, np.int64), counts=np.zeros(train_job.ROWS))

    def update(batch: Any) -> None:
        own = integers(batch.indices if batch.weight else [])
        state.w[:] = advanced(state.w, hvd.allreduce(own, op=hvd.Sum, name="gradient"))

    return state, update, lambda: [state.w]


def train() -> None:
    """With ``hvd.elastic.train``: the weights, the counts and the position are its business."""
    state, update, values = exact_model() if EXACT else train_job.MODELS[FRAMEWORK]()
    loader, as_batch = train_job.loader_of()
    train_job.train_module.Training = WatchedTraining
    position = train_job.train_module.position_of(loader)

    def step(items: Any) -> Any:
        batch = as_batch(items)
        training = train_job.made[-1]
        rows = batch.indices if batch.weight else []
        note(training.steps, position.epoch, position.cursor, rows)
        counted(state, batch.indices, batch.weight)
        return update(batch)

    word = prologue()
    folder = str(FOLDER / "checkpoints")
    hvd.elastic.train(step, state, loader, epochs=EPOCHS, progress=False, checkpoint=folder)
    enter(5)
    tell(values(), state.counts, train_job.made[-1].steps, word)


def run() -> None:
    """With ``hvd.elastic.run`` and Horovod's sampler. All worlds have one size, into which the rows go."""
    from polyhvd.data import ElasticSampler

    rows, batch, w = train_job.ROWS, train_job.BATCH, train_job.first_w.copy()
    sampler = ElasticSampler(range(rows), seed=3)
    state = hvd.elastic.ArrayState(w=w, m=np.zeros_like(w), counts=np.zeros(rows), step=0, epoch=0, taken=0)

    @hvd.elastic.run
    def go(state: Any) -> None:
        sampler.load_state_dict({"epoch": state.epoch, "processed_num": state.taken})
        while state.epoch < EPOCHS:
            sampler.set_epoch(state.epoch)
            indices = np.array(list(sampler), np.int64)
            for number in range(-(-len(indices) // batch)):
                mine = indices[number * batch : (number + 1) * batch]
                note(state.step, state.epoch, state.taken, mine)
                counted(state, mine, 1.0)
                state.m[:] = 0.9 * state.m + hvd.allreduce(gradient(state.w, mine, 1.0), name="gradient")
                state.w -= 0.1 * state.m
                sampler.record_batch(number, len(mine))
                state.step, state.taken = state.step + 1, sampler.processed_num
                if state.taken == rows:
                    state.epoch, state.taken = state.epoch + 1, 0
                enter(4)
                state.commit()

    word = prologue()
    go(state)
    enter(5)
    tell([state.w, state.m], state.counts, state.step, word)


def gradient(w: Any, rows: Any, weight: float) -> Any:
    """As train_job's model in NumPy has it, bit for bit."""
    inputs, classes = train_job.x[rows], train_job.y[rows]
    scores = np.exp(inputs @ w)
    wrong = scores / scores.sum(1, keepdims=True) - np.eye(train_job.OUTPUTS, dtype=np.float32)[classes]
    return np.float32(weight / len(inputs)) * (inputs.T @ wrong)


def replay() -> None:
    """Make the steps of a history, [how many, with how many ranks] after each other. NumPy alone."""
    segments = json.loads(Path(HISTORY).read_text())
    sets = {n: hvd.add_process_set(list(range(n))) for n in range(1, hvd.size())}
    sets[hvd.size()] = hvd.global_process_set
    w, m = train_job.first_w.copy(), np.zeros_like(train_job.first_w)
    counts, size, done = np.zeros(train_job.ROWS), 1, 0
    place = {"batch_size": train_job.BATCH, "seed": 3, "placement": lambda: (hvd.rank(), size)}
    loader: Any
    if os.environ.get("TRAIN_DATA") == "parquet":
        loader = train_job.ParquetLoader(train_job.rows_file(), **place)
    else:
        loader = train_job.ArrayLoader([train_job.x, train_job.y], **place)
    for steps, size in segments:
        left = steps if hvd.rank() < size else 0
        loader.load_state_dict(loader.state_dict())  # what is under way was for another size
        while left:
            for batch in loader:
                where = {"process_set": sets[size]}
                mine = np.zeros(train_job.ROWS)
                np.add.at(mine, batch.indices, 1.0 if batch.weight else 0.0)
                counts += hvd.allreduce(mine, op=hvd.Sum, name="rows", **where)
                own = gradient(w, batch.indices, batch.weight)
                m[:] = 0.9 * m + hvd.allreduce(own, name="gradient", **where)
                w -= 0.1 * m
                loader.advance()
                left -= 1
                if len(loader) == 0:
                    loader.set_epoch(loader.epoch + 1)
                    break
                if left == 0:
                    break
        done += steps
        w, m, counts, position = hvd.broadcast_object((w, m, counts, loader.state_dict()), 0)
        loader.load_state_dict(position)
    if hvd.rank() == 0:
        tell([w, m], counts, done)


if HISTORY:
    replay()
else:
    {"train": train, "run": run}[os.environ.get("SOAK_HOW", "train")]()
