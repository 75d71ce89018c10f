"""A small training by ``hvd.elastic.run``. Arguments: a folder, "kill", "leave" or "", and how.

``numpy late``: a handle is synchronized a step later; ``set``: two ranks of three have a process set, and
more to do in each step than the third; ``skip``: what fails in a step is caught, and the step is counted.
``keras fit``: with callbacks; ``lightning N``: with an update after N batches.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from polyhvd.elastic import process
from polyhvd.elastic.places import notice_scope

FOLDER, STRUCK, FRAMEWORK, HOW = Path(sys.argv[1]), *sys.argv[2:]
hvd = importlib.import_module(f"polyhvd.{FRAMEWORK}")
STEPS = 60


def strike(at: int, step: int) -> None:
    """Once in all processes, by rank 1: end this one, or have it leave."""
    if not STRUCK or step != at or hvd.rank() != 1:
        return
    try:
        (FOLDER / "struck").touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL if STRUCK == "kill" else signal.SIGTERM)
    wait_for_notice()


def wait_for_notice() -> None:
    """Return when the launcher has given notice of a change to rank 0, which was the first to wait for it."""
    member = process.find()
    assert member is not None
    member.launcher._store.gather(notice_scope(member.launcher.reply.generation), 1, 60.0)


def numpy_job() -> None:
    pair = hvd.ProcessSet([1, 2])
    hvd.init(process_sets=[pair] if HOW == "set" else None)
    is_here_from_the_start = int(os.environ["POLYHVD_MEMBER"]) < hvd.size()
    state, made = hvd.elastic.ArrayState(w=np.zeros(3), n=0), []

    @hvd.elastic.run
    def train(state: Any) -> None:
        pending = None
        while state.n < STEPS:
            strike(23, state.n)
            made.append(state.n)
            with contextlib.suppress(RuntimeError) if HOW == "skip" else contextlib.nullcontext():
                state.w += hvd.allreduce(np.ones(3), name="gradient")
            if pending is not None:
                hvd.synchronize(pending)
            if HOW == "late":
                pending = hvd.allreduce_async(np.ones(1), name=f"metric {state.n % 2}")
            if HOW == "set" and pair.included():
                time.sleep(0.02)
                hvd.allreduce(np.ones(1), name="of the set", process_set=pair)
            state.n += 1
            if HOW == "skip" or state.n % 10 == 0:
                state.commit()
            else:
                state.check_host_updates()

    train(state)
    undone = len(made) - len(set(made)) if is_here_from_the_start else 0
    print(f"end w {state.w.tolist()} undone {undone}", flush=True)


def keras_job() -> None:
    import keras

    hvd.init()
    steps, epochs = 5, 2
    zeros = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), zeros])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), lambda y, out: out, jit_compile=False)
    x = np.ones((2 * steps, 1), np.float32)
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    begins = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: strike(3, state.batch))
    update_batch = hvd.elastic.UpdateBatchStateCallback(state)
    update_epoch = hvd.elastic.UpdateEpochStateCallback(state)
    callbacks = [begins, update_batch, update_epoch, hvd.elastic.CommitStateCallback(state)]

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.epoch < epochs:
            left = steps - state.batch
            model.fit(x, x, batch_size=2, steps_per_epoch=left, verbose=0, shuffle=False, callbacks=callbacks)

    train(state)
    print(f"end w {model.get_weights()[0].ravel().tolist()}", flush=True)


def lightning_job() -> None:
    import lightning
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from polyhvd.data import DistributedBatchSampler

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    hvd.init()
    rows = TensorDataset(torch.arange(24))
    sampler = DistributedBatchSampler(rows, batch_size=2, seed=3)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(24))

        def training_step(self, batch: Any, number: int) -> Any:
            strike(8, sampler.cursor)
            return sampler.weight * self.w[batch[0]].mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1.0)

    quiet = dict.fromkeys(
        ["enable_checkpointing", "enable_model_summary", "enable_progress_bar", "logger"], False
    )
    trainer = lightning.Trainer(
        strategy="polyhvd",
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=int(HOW),
        use_distributed_sampler=False,
        **quiet,
    )
    module = Module()

    @hvd.elastic.run
    def train(state: Any) -> None:
        loader = DataLoader(rows, batch_sampler=state.sampler)
        state.trainer.fit(state.module, loader, ckpt_path=state.ckpt_path)

    train(hvd.elastic.LightningState(trainer, module, sampler=sampler))
    print(f"end never counted {(module.w == 0).nonzero().ravel().tolist()}", flush=True)


{"numpy": numpy_job, "keras": keras_job, "lightning": lightning_job}[FRAMEWORK]()
