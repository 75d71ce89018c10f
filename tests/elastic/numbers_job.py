"""A small training by ``hvd.elastic.train``. Arguments: a folder, "kill", "leave" or "", and how.

``torch zero-at-end``: gradients are set to zero after the step; ``two-passes``: a step makes one of two;
``held-back``: of three, two of them on hold; ``scaler``: with a collective between its step and its update.
``numpy own N``: what a rank counts and draws itself, with a commit after N steps;
``numpy rate FOLDER EPOCHS``: a rate that follows the number of ranks;
``numpy look EPOCHS``: ranks leave again and again, and one of those that stay looks late for a change.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from polyhvd.data import ArrayLoader
from polyhvd.elastic.process import Process
from polyhvd.runtime import current

FOLDER, STRUCK, FRAMEWORK, HOW, *REST = Path(sys.argv[1]), *sys.argv[2:]
hvd = importlib.import_module(f"polyhvd.{FRAMEWORK}")
values = np.random.default_rng(1)
rows = values.normal(size=(80, 6)).astype(np.float32)
classes = (rows @ values.normal(size=(6, 3))).argmax(1)
start = values.normal(size=(6, 3)).astype(np.float32)


def strike(at: int, step: int, rank: int = 1) -> None:
    """Once in all processes: end this one, or have it leave."""
    if not STRUCK or step != at or hvd.rank() != rank:
        return
    try:
        (FOLDER / "struck").touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL if STRUCK == "kill" else signal.SIGTERM)


def torch_job() -> tuple[Any, Callable[[Any], None], Callable[[], list[Any]]]:
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Linear(6, 3)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(start.T.copy()))
        model.bias.zero_()
    hvd.init()
    passes = 2 if HOW == "two-passes" else 1
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        model.named_parameters(),
        backward_passes_per_step=passes,
    )
    scaler = torch.amp.GradScaler("cpu", enabled=HOW == "scaler", init_scale=2.0, growth_interval=3)
    state = hvd.elastic.TorchState(model, optimizer, scaler=scaler, n=0)

    def backward(batch: Any) -> None:
        x, y = map(torch.from_numpy, batch)
        loss = batch.weight * torch.nn.functional.cross_entropy(model(x), y)
        strike(5, state.n)
        scaler.scale(loss).backward()

    def step(batch: Any) -> None:
        if HOW == "held-back" and state.n % 3 < 2:
            with optimizer.no_sync():
                backward(batch)
        else:
            backward(batch)
        every = {"held-back": 3, "two-passes": 2}.get(HOW, 1)
        if state.n % every == every - 1:
            scaler.step(optimizer)
            if HOW == "scaler":
                strike(7, state.n, rank=0)
                hvd.allreduce(torch.ones(1), name="between")
            scaler.update()
            optimizer.zero_grad()
        state.n += 1

    return state, step, lambda: [parameter.detach().numpy() for parameter in model.parameters()]


def keras_job() -> tuple[Any, Callable[[Any], None], Callable[[], list[Any]]]:
    import keras

    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.set_weights([start, np.zeros(3, np.float32)])
    hvd.init()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    state = hvd.elastic.KerasState(model, n=0)

    def step(batch: Any) -> None:
        strike(5, state.n)
        model.train_on_batch(*batch)
        state.n += 1

    return state, step, model.get_weights


def mxnet_job() -> tuple[Any, Callable[[Any], None], Callable[[], list[Any]]]:
    import mxnet as mx

    net = mx.gluon.nn.Dense(3, in_units=6)
    net.initialize()
    net.weight.set_data(mx.nd.array(start.T))
    hvd.init()
    trainer = hvd.DistributedTrainer(
        net.collect_params(), "sgd", {"learning_rate": 0.1}, backward_passes_per_step=2
    )
    state = hvd.elastic.GluonState(net, trainer, n=0)
    loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()

    def step(batch: Any) -> None:
        x, y = map(mx.nd.array, batch)
        strike(5, state.n)
        with mx.autograd.record():
            loss = loss_of(net(x), y)
        loss.backward()
        trainer.step(4)
        state.n += 1

    return state, step, lambda: [item.data().asnumpy() for item in net.collect_params().values()]


def own() -> None:
    hvd.init()
    state = hvd.elastic.ArrayState(n=0)
    mine = {"steps": 0, "draws": 0, "sum": 0.0}
    state.register_local("mine", lambda: dict(mine), mine.update)
    np.random.seed(7)
    expected = np.random.RandomState(7).random_sample(20)

    def step(batch: Any) -> None:
        mine["steps"] += 1
        mine["draws"] += np.random.random() == expected[state.n]  # each once, and in order
        hvd.allreduce(np.ones(1), name="x")
        state.n += 1
        strike(15, state.n)
        time.sleep(0.02)

    loader = ArrayLoader([rows], batch_size=2)
    hvd.elastic.train(step, state, loader, epochs=1, progress=False, commit_every=int(REST[0]))
    print(
        f"end rank {hvd.rank()} steps {state.n} own {mine['steps']} draws {mine['draws']} of 20", flush=True
    )


def rate() -> None:
    hvd.init()
    state = hvd.elastic.ArrayState(rate=float(hvd.size()))
    state.register_reset_callbacks([lambda: setattr(state, "rate", float(hvd.size()))])

    def step(batch: Any) -> None:
        hvd.allreduce(np.ones(1), name="x")

    folder, epochs = REST
    loader = ArrayLoader([rows], batch_size=8)
    hvd.elastic.train(step, state, loader, epochs=int(epochs), checkpoint=folder, progress=False)
    print(f"end rate {state.rate}", flush=True)


def look() -> None:
    hvd.init()
    member = int(os.environ["POLYHVD_MEMBER"])
    if member == 1:
        in_time = Process.is_awaited
        Process.is_awaited = lambda self: time.sleep(0.01) or in_time(self)
    state, calls = hvd.elastic.ArrayState(n=0), []

    def step(batch: Any) -> None:
        calls.append(state.n)
        hvd.allreduce(np.ones(1), name="x")
        state.n += 1
        if member > 1 and len(calls) == 12:
            os.kill(os.getpid(), signal.SIGTERM)

    hvd.elastic.train(step, state, ArrayLoader([rows], batch_size=2), epochs=int(REST[0]), progress=False)
    if member < 2:
        undone = len(calls) - len(set(calls))
        print(f"end generation {current.world().placement.generation} undone {undone}", flush=True)


def main() -> None:
    if FRAMEWORK == "numpy":
        {"own": own, "rate": rate, "look": look}[HOW]()
        return
    state, step, weights = {"torch": torch_job, "keras": keras_job, "mxnet": mxnet_job}[FRAMEWORK]()
    hvd.elastic.train(step, state, ArrayLoader([rows, classes], batch_size=4), epochs=1, progress=False)
    digest = hashlib.sha256(b"".join(array.tobytes() for array in weights())).hexdigest()[:16]
    print(f"end rank {hvd.rank()} steps {state.n} weights {digest}", flush=True)


main()
