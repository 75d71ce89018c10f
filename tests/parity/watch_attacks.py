"""What programs do around a watched model besides training it, on ranks of different frameworks."""

from __future__ import annotations

from typing import Any

import drivers
import mixed_training
import numpy as np
import pytest
from mixed_training import Net, batch_of

import polyhvd
from polyhvd import parity
from polyhvd.training.interception import intercept

__all__ = [
    "begins_late",
    "compiled_for_a_graph",
    "data_parallel",
    "ends_in_any_order",
    "evaluates",
    "fails_once",
    "freezes",
    "misuses",
    "mixed_precision",
    "shares",
]

#: Of an optimizer, what takes a step.
_STEPS = {"torch": "step", "mxnet": "step", "tensorflow": "apply"}


def _net(name: str, *, frozen: bool = False) -> tuple[drivers.Driver, Net]:
    driver = drivers.get(name)
    net = mixed_training.net_of(driver.framework)
    net.runs_eagerly = True
    if frozen:
        net.freeze_first()
    parity.load(net.model, from_=0)
    net.prepare(None)
    return driver, net


def _told(watched: parity.Watch) -> tuple[int, Any]:
    first = watched.first
    return watched.steps, first and (first.step, first.kind, first.layer, first.rank, first.relative)


def evaluates(name: str) -> tuple[int, Any]:
    """Rank 1 alone evaluates between steps."""
    driver, net = _net(name)
    with parity.watch(net.model, net.optimizer) as watched:
        for step in range(3):
            if driver.hvd.rank() == 1:
                net.scores(batch_of([7], step)[0])
                if driver.framework == "torch":
                    net.model.train()
            net.step(*batch_of([0], step))
    assert watched.first is None, watched
    return _told(watched)


def freezes(name: str) -> tuple[int, Any]:
    """The first layer is not trained; after two steps rank 1 has other weights in it."""
    driver, net = _net(name, frozen=True)
    with parity.watch(net.model, net.optimizer) as watched:
        for step in range(4):
            if step == 2 and driver.hvd.rank() == 1:
                weight = parity.models.weights_of(net.model)[0]
                weight.write(weight.read() * 1.5)
            net.step(*batch_of([0], step))
    return _told(watched)


def fails_once(name: str) -> tuple[int, Any]:
    """An optimizer raises in one step on every rank, and the step is taken again."""
    driver, net = _net(name)
    failing = [1]

    def step(original: Any, *args: Any, **kwargs: Any) -> Any:
        if len(watched.divergences) == 0 and watched.steps == 1 and failing:
            failing.pop()
            raise ZeroDivisionError
        return original(*args, **kwargs)

    end = intercept(net.optimizer, _STEPS[driver.framework], step)
    with parity.watch(net.model, net.optimizer) as watched:
        for number in range(3):
            try:
                net.step(*batch_of([0], number))
            except ZeroDivisionError:
                net.step(*batch_of([0], number))
    end()
    assert not failing
    assert watched.first is None, watched
    return _told(watched)


def ends_in_any_order(name: str) -> None:
    """Of two watches each hears what happens until it ends, and the last one leaves nothing behind."""
    driver, net = _net(name)
    method = _STEPS[driver.framework]
    for order in ((0, 1), (1, 0)):
        both = [parity.watch(net.model, net.optimizer, prefix=f"watch.{number}") for number in range(2)]
        net.step(*batch_of([0], 0))
        both[order[0]].close()
        net.step(*batch_of([0], 1))
        both[order[1]].close()
        if driver.hvd.rank() == 0:  # alone: nothing is exchanged
            net.step(*batch_of([0], 2))
        assert [both[number].steps for number in order] == [1, 2]
        assert all(watched.first is None for watched in both), [str(watched) for watched in both]
        parity.load(net.model, from_=0)  # the other ranks have not taken the last step
        net.prepare(None)
    parity.watch(net.model, net.optimizer).close()
    assert method not in vars(net.optimizer)


def begins_late(name: str) -> list[tuple[int, Any]]:
    """The world changes while models are watched; the last rank begins its watch anew, the others go on."""
    driver, net = _net(name)
    hvd = driver.hvd
    watched = parity.watch(net.model, net.optimizer)
    for step in range(2):
        net.step(*batch_of([0], step))
    hvd.shutdown()
    hvd.init()
    is_new = hvd.rank() == hvd.size() - 1
    if is_new:
        watched.close()
        watched = parity.watch(net.model, net.optimizer)
    parity.load(net.model, from_=0)
    for step in range(2, 4):
        net.step(*batch_of([0], step))
    places = [_told(watched)]
    if is_new:
        net.step(*batch_of([5], 4))
    else:
        net.step(*batch_of([0], 4))
    watched.close()
    return [*places, _told(watched)]


def shares(name: str) -> tuple[int, Any]:
    """A layer that runs twice in a pass, whose weights are one thing; rank 1 has another rate in step 2."""
    driver = drivers.get(name)
    model, optimizer, step = _TWICE[driver.framework]()
    parity.load(model, from_=0)
    with parity.watch(model, optimizer) as watched:
        for number in range(4):
            rows = batch_of([0 if number < 3 or driver.hvd.rank() == 0 else 1], number)[0]
            step(rows.reshape(len(rows), -1)[:, :6])
    return _told(watched)


def _twice_in_torch() -> Any:
    import torch

    shared = torch.nn.Linear(6, 6)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), shared, torch.nn.Tanh(), shared)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(rows: Any) -> None:
        optimizer.zero_grad()
        model(torch.tensor(rows)).square().mean().backward()
        optimizer.step()

    return model, optimizer, step


def _twice_in_gluon() -> Any:
    import mxnet as mx
    from mxnet.gluon import nn

    shared, model = nn.Dense(6, in_units=6), nn.HybridSequential()
    model.add(nn.Dense(6, in_units=6), shared, nn.Activation("tanh"), shared)
    model.initialize()
    model.hybridize()
    optimizer = mx.gluon.Trainer(model.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=None)

    def step(rows: Any) -> None:
        with mx.autograd.record():
            loss = model(mx.nd.array(rows)).square().mean()
        loss.backward()
        optimizer.step(1)

    return model, optimizer, step


def _twice_in_keras() -> Any:
    import keras
    import numpy as np

    shared, inputs = keras.layers.Dense(6), keras.layers.Input((6,))
    made = keras.layers.Dense(6)(inputs)
    model = keras.Model(inputs, shared(keras.ops.tanh(shared(made))))
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)

    def step(rows: Any) -> None:
        model.train_on_batch(rows, np.zeros_like(rows))

    return model, model.optimizer, step


_TWICE = {"torch": _twice_in_torch, "mxnet": _twice_in_gluon, "tensorflow": _twice_in_keras}


def misuses(name: str) -> list[str]:
    """What calls that cannot be say, on this rank."""
    _, net = _net(name)
    _, other = _net(name)
    other.step(*batch_of([0], 0))
    calls = [
        lambda: parity.watch(7, net.optimizer),
        lambda: parity.watch(type(net.model), net.optimizer),
        lambda: parity.watch(None),
        lambda: parity.watch(net.model, 7),
        lambda: parity.watch(net.model, net.model),
        lambda: parity.watch(net.model, other.optimizer),
        lambda: parity.watch(net.model, net.optimizer, prefix=""),
        lambda: parity.watch(net.model, net.optimizer, prefix=7),
        lambda: parity.watch(net.model, net.optimizer, limit=-1.0),
        lambda: parity.watch(net.model, net.optimizer, limit="small"),
        lambda: parity.watch(net.model, net.optimizer, limit=float("nan")),
        lambda: parity.compare("", 1.0),
        lambda: parity.compare(7, 1.0),
        lambda: parity.compare("x", 1.0, rtol="tight"),
        lambda: parity.compare("x", 1.0, atol=-1),
        lambda: parity.compare("x", 1.0, terms=0),
        lambda: parity.compare("x", 1.0, terms="many"),
        lambda: parity.compare("x", "a text"),
        lambda: parity.compare("x", None),
        lambda: parity.compare("x", object()),
        lambda: parity.compare("x", net.model),
    ]
    said = []
    for number, call in enumerate(calls):
        try:
            call()
        except polyhvd.InvalidArgumentError as error:
            said.append(str(error))
        else:
            raise AssertionError(f"call {number} was accepted")
    net.step(*batch_of([0], 0))  # none has left a hook behind, or ranks would wait for each other
    return said


def compiled_for_a_graph(name: str) -> None:
    """Keras' models alone are, if they do not run eagerly."""
    driver = drivers.get(name)
    if driver.framework != "tensorflow":
        return
    import tensorflow as tf

    net = mixed_training.net_of("tensorflow")
    net.prepare(None)
    for optimizer in (net.optimizer, None):
        with pytest.raises(polyhvd.InvalidArgumentError, match=r"is compiled for a graph.*run_eagerly=True"):
            parity.watch(net.model, optimizer)
    tf.config.run_functions_eagerly(True)
    try:
        parity.watch(net.model, net.optimizer).close()
    finally:
        tf.config.run_functions_eagerly(False)
    net.runs_eagerly = True
    net.prepare(None)
    parity.watch(net.model, net.optimizer).close()


def _distribute(driver: drivers.Driver, net: Net, process_set: Any) -> None:
    """Have the optimizer of a net average over a process set."""
    net.runs_eagerly = True
    net.prepare(None)
    if driver.framework == "torch":
        net.optimizer = driver.hvd.DistributedOptimizer(net.optimizer, process_set=process_set)
    elif driver.framework == "mxnet":
        net.optimizer = driver.hvd.DistributedTrainer(
            net.model.collect_params(),
            "sgd",
            {"learning_rate": net.rate, "momentum": mixed_training.MOMENTUM},
            process_set=process_set,
        )
    else:
        import keras

        net.optimizer = driver.hvd.DistributedOptimizer(
            keras.optimizers.SGD(net.rate, momentum=mixed_training.MOMENTUM), process_set=process_set
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        net.model.compile(net.optimizer, loss, jit_compile=False, run_eagerly=True)


def _step_of(driver: drivers.Driver, net: Net, source: int, step: int, *, is_split: bool) -> None:
    """A step; split into its two parts where the framework has them."""
    if not is_split or driver.framework != "mxnet":
        net.step(*batch_of([source], step))
        return
    trainer = net.optimizer
    net.optimizer = type("Trainer", (), {"step": lambda self, size: None})()
    net.step(*batch_of([source], step))
    net.optimizer = trainer
    trainer.allreduce_grads()
    trainer.update(1)


def data_parallel(name: str, rates: tuple[float, float], is_split: bool) -> Any:
    """Two frameworks train on two ranks each; those that have the same part of a batch watch each other."""
    driver, net = _net(name)
    hvd, rank = driver.hvd, driver.hvd.rank()
    sides = [hvd.add_process_set(ranks) for ranks in ([0, 1], [2, 3])]
    pairs = [hvd.add_process_set(ranks) for ranks in ([0, 2], [1, 3])]
    net.rate *= rates[rank // 2]
    _distribute(driver, net, sides[rank // 2])
    with parity.watch(net.model, net.optimizer, process_set=pairs[rank % 2]) as watched:
        for step in range(3):
            _step_of(driver, net, rank % 2, step, is_split=is_split)
    hvd.barrier()
    for process_set in (*sides, *pairs):
        hvd.remove_process_set(process_set)
    return watched.first and (watched.first.step, watched.first.kind)


class _Mixed:
    """Dense layers that compute in bfloat16, batch normalization, and a last layer in float32."""

    def __init__(self, framework: str, change: str) -> None:
        self.framework = framework
        rate = 0.0505 if change == "rate" else 0.05
        if framework == "torch":
            import torch
            from torch import nn

            middle = nn.Sigmoid() if change == "activation" else nn.GELU()
            self.body = nn.Sequential(
                nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 24), nn.BatchNorm1d(24), middle
            )
            self.head = nn.Linear(24, 5)
            self.model: Any = nn.Sequential(self.body, self.head)
            self.model.forward = self._forward
            self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=rate, momentum=0.9)
        else:
            import keras
            from keras import layers

            mixed = {"dtype": "mixed_bfloat16"}
            middle = "sigmoid" if change == "activation" else "gelu"
            self.model = keras.Sequential(
                [
                    layers.Input((16,)),
                    layers.Dense(32, activation="gelu", **mixed),
                    layers.Dense(24, **mixed),
                    layers.BatchNormalization(momentum=0.9, epsilon=1e-5, **mixed),
                    layers.Activation(middle, **mixed),
                    layers.Dense(5, dtype="float32"),
                ]
            )
            self.optimizer = keras.optimizers.SGD(rate, momentum=0.9)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            self.model.compile(self.optimizer, loss, jit_compile=False, run_eagerly=True)

    def _forward(self, x: Any) -> Any:
        import torch

        with torch.autocast("cpu", torch.bfloat16):
            x = self.body(x)
        return self.head(x.float())

    def step(self, rows: Any, labels: Any, scale: float) -> None:
        if self.framework != "torch":
            weights = np.full(len(rows), scale, np.float32)
            self.model.train_on_batch(rows, labels, sample_weight=weights)
            return
        import torch

        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.model(torch.from_numpy(rows)), torch.from_numpy(labels))
        (loss * scale).backward()
        self.optimizer.step()


def mixed_precision(name: str, change: str) -> Any:
    """Mixed precision in Keras and PyTorch; the last rank has a mistake."""
    driver = drivers.get(name)
    is_last = driver.hvd.rank() == driver.hvd.size() - 1
    net = _Mixed(driver.framework, change if is_last else "")
    parity.load(net.model, from_=0, check=False)
    rng = np.random.default_rng(3)
    with parity.watch(net.model, net.optimizer) as watched:
        for step in range(6):
            rows, labels = rng.standard_normal((8, 16), np.float32), rng.integers(0, 5, 8)
            if is_last and change == "batch" and step == 1:
                rows = rows[::-1].copy()
            net.step(rows, labels, 8.0 if is_last and change == "loss" else 1.0)
    first = watched.first
    return first and (first.step, first.kind, first.layer)
