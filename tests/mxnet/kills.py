"""A rank that is killed while gradients are in flight, and what the others make of it; run in pools."""

from __future__ import annotations

import contextlib
import random
import threading
from typing import Any

import numpy as np
from worker import note

STEPS_BEFORE = 2  # before the one in which the rank is killed


def train_until_killed(seed: int, arrays: int, victim: int, groups: int, reads: bool) -> dict[str, object]:
    """Train until the job fails; what was caught, and which parameters are no sum of averages.

    The gradient of every element is rank + 1, so that the average of n ranks is (n + 1) / 2 and the learning
    rate makes each step take exactly 1 from every element.
    """
    import polyhvd.mxnet as hvd  # isort: skip - first, and in the ranks alone
    import mxnet as mx
    from mxnet import autograd, gluon

    chance = random.Random(seed)
    parameters = [
        gluon.Parameter(f"p{i}", shape=(chance.choice((8, 300, 5000)),), init=mx.init.Zero())
        for i in range(arrays)
    ]
    for parameter in parameters:
        parameter.initialize()
    learning_rate = 2.0 / (hvd.size() + 1)
    trainer = hvd.DistributedTrainer(
        parameters, "sgd", {"learning_rate": learning_rate}, num_groups=groups, prefix=f"kill{seed}"
    )
    over, others = threading.Event(), []
    if reads:
        others.append(threading.Thread(target=_read, args=(parameters, over)))
        others[0].start()
    caught: Exception | None = None
    steps = 0
    try:
        while True:
            if steps == STEPS_BEFORE:
                note("about to be killed")
            with autograd.record():
                loss = sum((p.data() * (hvd.rank() + 1)).sum() for p in parameters)
            loss.backward()
            steps += 1
            trainer.step(1)
            if hvd.rank() != victim and chance.random() < 0.5:
                chance.choice(parameters).grad().asnumpy()
            if chance.random() < 0.3:
                loss.asnumpy()
    except Exception as error:
        caught = error
    over.set()
    for other in others:
        other.join()
    return {
        "class": type(caught).__name__,
        "is_ours": isinstance(caught, hvd.HorovodInternalError),
        "is_mxnets": isinstance(caught, mx.base.MXNetError),
        "text": str(caught),
        "wrong": _wrong(parameters, steps),
    }


def _read(parameters: list[Any], over: threading.Event) -> None:
    while not over.is_set():
        for parameter in parameters:
            with contextlib.suppress(Exception):
                parameter.grad().asnumpy()


def _wrong(parameters: list[Any], steps: int) -> list[tuple[str, float, float]]:
    wrong = []
    for parameter in parameters:
        while True:
            try:
                found = parameter.data().asnumpy()
                break
            except Exception:  # each error is told once, and what failed may share one
                continue
        updates = np.round(-found[0])
        if not (np.allclose(found, -updates, atol=1e-3) and 0 <= updates <= steps):
            wrong.append((parameter.name, float(found.min()), float(found.max())))
    return wrong
