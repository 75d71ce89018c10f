"""Training of one small network in jobs of several frameworks, as every rank does it."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import drivers
import numpy as np
import pytest

from polyhvd import parity
from polyhvd.runtime import current

__all__ = ["TRAINED", "Net", "alone", "batch_of", "drifting", "frozen", "mismatch", "net_of", "train"]

Array = np.ndarray[Any, Any]

#: Frameworks that can.
TRAINED = ("torch", "mxnet", "tensorflow")
RATE, MOMENTUM, STEPS, BATCH = 0.05, 0.9, 4, 6


class Net(abc.ABC):
    """Convolution, batch normalization, pooling, two dense layers: what lies differently in Keras."""

    model: Any
    optimizer: Any
    rate = RATE
    runs_eagerly = False  # Keras

    @abc.abstractmethod
    def prepare(self, mapping: Any, **options: Any) -> None:
        """Make the optimizer; a plain one without a mapping."""

    @abc.abstractmethod
    def step(self, images: Array, labels: Array, scale: float = 1.0) -> None:
        """Of images as [batch, channels, height, width]; the loss is multiplied by ``scale``."""

    @abc.abstractmethod
    def scores(self, images: Array) -> Any:
        """Of images, as in use: the statistics of batch normalization count."""

    @abc.abstractmethod
    def freeze_first(self) -> None:
        """Let the convolution stay as it is."""


class _Torch(Net):
    def __init__(self, units: int = 10) -> None:
        from torch import nn

        self.model = nn.Sequential(
            nn.Conv2d(2, 4, 3),
            nn.ReLU(),
            nn.BatchNorm2d(4, eps=1e-3),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(36, 12),
            nn.ReLU(),
            nn.Linear(12, units),
        )

    def prepare(self, mapping: Any, **options: Any) -> None:
        import polyhvd.torch as hvd
        import torch

        optimizer = torch.optim.SGD(self.model.parameters(), lr=self.rate, momentum=MOMENTUM)
        self.optimizer = (
            hvd.DistributedOptimizer(optimizer, mapping=mapping, **options) if mapping else optimizer
        )

    def step(self, images: Array, labels: Array, scale: float = 1.0) -> None:
        import torch

        self.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.model(torch.tensor(images)), torch.tensor(labels))
        (loss * scale).backward()
        self.optimizer.step()

    def scores(self, images: Array) -> Any:
        import torch

        return self.model.eval()(torch.tensor(images))

    def freeze_first(self) -> None:
        for parameter in self.model[0].parameters():
            parameter.requires_grad_(False)


class _Gluon(Net):
    def __init__(self, units: int = 10) -> None:
        import mxnet as mx
        from mxnet.gluon import nn

        mx.util.set_np_shape(False)  # as Gluon has it; other tests of this process change it
        self.model = nn.HybridSequential()
        self.model.add(
            nn.Conv2D(4, 3, in_channels=2),
            nn.Activation("relu"),
            nn.BatchNorm(in_channels=4, epsilon=1e-3),
            nn.MaxPool2D(2),
            nn.Dense(12, activation="relu", in_units=36),
            nn.Dense(units, in_units=12),
        )
        self.model.initialize()
        self._loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()

    def prepare(self, mapping: Any, **options: Any) -> None:
        import mxnet as mx
        import polyhvd.mxnet as hvd

        parameters, arguments = (
            self.model.collect_params(),
            {"learning_rate": self.rate, "momentum": MOMENTUM},
        )
        if mapping:
            self.optimizer = hvd.DistributedTrainer(parameters, "sgd", arguments, mapping=mapping, **options)
        else:
            self.optimizer = mx.gluon.Trainer(parameters, "sgd", arguments, kvstore=None)

    def step(self, images: Array, labels: Array, scale: float = 1.0) -> None:
        import mxnet as mx

        with mx.autograd.record():
            loss = self._loss(self.model(mx.nd.array(images)), mx.nd.array(labels)).mean() * scale
        loss.backward()
        self.optimizer.step(1)

    def scores(self, images: Array) -> Any:
        import mxnet as mx

        return self.model(mx.nd.array(images))

    def freeze_first(self) -> None:
        self.model[0].collect_params().setattr("grad_req", "null")


class _Keras(Net):
    def __init__(self, units: int = 10) -> None:
        import keras
        from keras import layers

        self.model = keras.Sequential(
            [
                layers.Input((8, 8, 2)),
                layers.Conv2D(4, 3),
                layers.ReLU(),
                layers.BatchNormalization(momentum=0.9),
                layers.MaxPooling2D(2),
                layers.Flatten(),
                layers.Dense(12, activation="relu"),
                layers.Dense(units),
            ]
        )

    def prepare(self, mapping: Any, **options: Any) -> None:
        import keras
        import polyhvd.tensorflow.keras as hvd

        optimizer = keras.optimizers.SGD(self.rate, momentum=MOMENTUM)
        if mapping:
            optimizer = hvd.DistributedOptimizer(optimizer, mapping=mapping, **options)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.optimizer = optimizer
        self.model.compile(optimizer, loss, jit_compile=False, run_eagerly=self.runs_eagerly)

    def step(self, images: Array, labels: Array, scale: float = 1.0) -> None:
        weights = np.full(len(images), scale, np.float32)
        self.model.train_on_batch(images.transpose(0, 2, 3, 1), labels, sample_weight=weights)

    def scores(self, images: Array) -> Any:
        return self.model(images.transpose(0, 2, 3, 1), training=False)

    def freeze_first(self) -> None:
        self.model.layers[0].trainable = False


_NETS = {"torch": _Torch, "mxnet": _Gluon, "tensorflow": _Keras}


def net_of(framework: str, units: int = 10) -> Net:
    """A new network."""
    net: Net = _NETS[framework](units)
    return net


def batch_of(ranks: Sequence[int], step: int) -> tuple[Array, Array]:
    """The joined batch of some ranks; labels are those of their images."""
    parts = [np.random.default_rng([rank, step]) for rank in ranks]
    images = np.concatenate([part.standard_normal((BATCH, 2, 8, 8), np.float32) for part in parts])
    return images, (np.abs(images.sum(axis=(1, 2, 3))) % 10).astype(np.int64)


def train(name: str, options: dict[str, Any]) -> list[tuple[tuple[str, tuple[int, ...]], Array]]:
    """A few steps, each rank with a batch of its own; the weights afterwards, in common form."""
    driver = drivers.get(name)
    rank, size = driver.hvd.rank(), driver.hvd.size()
    net = _NETS[driver.framework]()
    mapping = parity.mapping(net.model, prefix="net")
    mapping.broadcast(root_rank=size - 1)
    started = [array.copy() for array in mapping.arrays().values()]
    net.prepare(mapping, **options)
    for step in range(STEPS):
        net.step(*batch_of([rank], step))
    ended = list(mapping.arrays().values())
    for before, after, weight in zip(started, ended, mapping.weights, strict=True):
        moved = float(np.abs(after - before).max())
        assert moved > 1e-4, f"{weight.name} has not been trained: it moved by {moved}"
    return [(weight.form[:2], array) for weight, array in zip(mapping.weights, ended, strict=True)]


def alone(name: str) -> None:
    """Ranks that all have the same batch train as one process of each framework does, from one start."""
    driver = drivers.get(name)
    nets = [_NETS[driver.framework]() for _ in range(2)]
    mapping = parity.mapping(nets[0].model, prefix="together")
    mapping.broadcast()
    nets[0].prepare(mapping)
    other = parity.models.weights_of(nets[1].model)
    for mine, theirs in zip(mapping.weights, other, strict=True):
        theirs.write(mine.read())
    nets[1].prepare(None)
    for step in range(STEPS):
        for net in nets:
            net.step(*batch_of([0], step))
    for mine, theirs in zip(mapping.weights, other, strict=True):
        np.testing.assert_allclose(mine.read(), theirs.read(), rtol=1e-4, atol=2e-6, err_msg=mine.name)


def frozen(name: str) -> None:
    """Weights that are frozen on every rank stay, and the others are trained."""
    driver = drivers.get(name)
    net = _NETS[driver.framework]()
    net.freeze_first()
    mapping = parity.mapping(net.model, prefix="frozen")
    mapping.broadcast()
    before = list(mapping.arrays().values())
    net.prepare(mapping)
    net.step(*batch_of([driver.hvd.rank()], 0))
    after = list(mapping.arrays().values())
    assert [np.array_equal(a, b) for a, b in zip(after, before, strict=True)][:4] == [
        True,
        True,
        False,
        False,
    ]


def mismatch(name: str) -> str:
    """Models that do not match: the error of every rank."""
    driver = drivers.get(name)
    net = _NETS[driver.framework](10 + driver.hvd.rank())
    with pytest.raises(driver.hvd.RankMismatchError) as caught:
        parity.mapping(net.model, prefix="unlike")
    return str(caught.value)


def drifting(name: str, is_broadcast: bool) -> str:
    """The error of a step with POLYHVD_CHECK_DRIFT=error where the last rank's weights differ; else empty."""
    driver = drivers.get(name)
    world = current.world()
    net = _NETS[driver.framework]()
    mapping = parity.mapping(net.model, prefix=f"drifting.{is_broadcast}")
    mapping.broadcast()
    kernel = mapping.weights[0]
    if driver.hvd.rank() == driver.hvd.size() - 1:
        kernel.write(kernel.read() + np.float32(1))
    if is_broadcast:
        mapping.broadcast()
    net.prepare(mapping)
    settings, world.settings = world.settings, replace(world.settings, check_drift="error")
    has_joined, world.has_joined = world.has_joined, False  # another test may have called join()
    try:
        net.step(*batch_of([driver.hvd.rank()], 0))
    except Exception as error:  # of a framework
        return str(error)
    finally:
        world.settings, world.has_joined = settings, has_joined
    return ""
