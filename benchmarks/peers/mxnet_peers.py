"""MXNet: polyhvd with its Gluon trainer, the kvstore dist_sync, and a single rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polyhvd.mxnet  # first: it gives NumPy back what MXNet needs

# isort: split
import mxnet as mx
from mxnet import autograd, gluon, nd

from benchmarks.peers.base import Call, Meets, Peer, Reducer, plain_place
from benchmarks.peers.hvd import Hvd
from benchmarks.workloads import Workload


class Arrays:
    """How arrays are made, filled and read."""

    def make(self, elements: int, dtype: str, value: int) -> Any:
        array = nd.full((elements,), value, dtype=dtype)
        array.wait_to_read()
        return array

    def fill(self, tensor: Any, value: int) -> Any:
        tensor[:] = value
        tensor.wait_to_read()
        return tensor

    def ends(self, tensor: Any) -> tuple[float, float]:
        return float(tensor[0].asscalar()), float(tensor[-1].asscalar())


def network() -> tuple[Any, Any, Any]:
    """A small convolutional network, 2.4 million parameters, and a batch for it."""
    mx.random.seed(1)
    net = gluon.nn.HybridSequential()
    for channels in (32, 64, 128):
        net.add(gluon.nn.Conv2D(channels, 3, padding=1, activation="relu"), gluon.nn.MaxPool2D())
    net.add(gluon.nn.Dense(1024, activation="relu"), gluon.nn.Dense(100))
    net.initialize()
    net.hybridize()
    inputs, targets = nd.random.normal(shape=(16, 3, 32, 32)), nd.random.randint(0, 100, (16,))
    net(inputs).wait_to_read()
    return net, inputs, targets


def training_step(make_trainer: Callable[[Any], Any]) -> Call:
    """Forward, backward and update of the network."""
    net, inputs, targets = network()
    trainer = make_trainer(net.collect_params())
    loss = gluon.loss.SoftmaxCrossEntropyLoss()

    def step() -> None:
        with autograd.record():
            value = loss(net(inputs), targets)
        value.backward()
        trainer.step(len(inputs))
        nd.waitall()

    return step


class PolyhvdMxnet(Arrays, Hvd):
    """polyhvd.mxnet. Calls only push to MXNet's engine, so each path ends in a read."""

    def __init__(self) -> None:
        self.start(polyhvd.mxnet)

    def paths(self) -> dict[str, Callable[[list[Any], str], Any]]:
        def read(run: Callable[[list[Any], str], Any]) -> Callable[[list[Any], str], Any]:
            def call(tensors: list[Any], name: str) -> Any:
                results = run(tensors, name)
                for result in results:
                    result.wait_to_read()
                return results

            return call

        return {**{path: read(run) for path, run in super().paths().items()}, "noop": self.noop}

    def noop(self, tensors: list[Any], name: str) -> None:
        """MXNet's own price of an operation: an in-place one on a few numbers, and the wait for it."""
        tensor = tensors[0]
        nd.identity(tensor, out=tensor).wait_to_read()

    def call(self, workload: Workload) -> Call | None:
        if workload.path != "step":
            return super().call(workload)
        if workload.model != "Gluon":
            return None
        options = {"learning_rate": 1e-4, "momentum": 0.9}
        return training_step(lambda parameters: self.hvd.DistributedTrainer(parameters, "sgd", options))


class MxnetAlone(Peer):
    """The same step with no communication."""

    def __init__(self) -> None:
        self.rank, self.size = plain_place()

    def call(self, workload: Workload) -> Call | None:
        if workload.model != "Gluon":
            return None
        options = {"learning_rate": 1e-4, "momentum": 0.9}
        return training_step(lambda parameters: gluon.Trainer(parameters, "sgd", options, kvstore=None))


class MxnetMeeting(Meets, MxnetAlone):
    """Ranks that wait for each other after each step."""


class Kvstore(Arrays, Reducer):
    """MXNet's parameter server, one server, through push and pull of each array."""

    def __init__(self) -> None:
        self.store = mx.kv.create("dist_sync")
        self.rank, self.size = self.store.rank, self.store.num_workers
        self.known: dict[str, int] = {}

    def key(self, name: str, tensor: Any) -> int:
        if name not in self.known:
            self.known[name] = 1000 + len(self.known)
            self.store.init(self.known[name], nd.zeros_like(tensor))
        return self.known[name]

    def make(self, elements: int, dtype: str, value: int) -> Any:
        return super().make(elements, dtype, value) if dtype == "float32" else None

    def push_and_pull(self, tensors: list[Any], name: str) -> list[Any]:
        for i, tensor in enumerate(tensors):
            self.store.pushpull(self.key(f"{name}.{i}", tensor), tensor, out=tensor)
        for tensor in tensors:
            tensor.wait_to_read()
        return tensors

    def paths(self) -> dict[str, Callable[[list[Any], str], Any]]:
        return dict.fromkeys(("blocking", "async", "separate"), self.push_and_pull)

    def call(self, workload: Workload) -> Call | None:
        if workload.path != "step":
            return super().call(workload)
        if workload.model != "Gluon":
            return None
        options = {"learning_rate": 1e-4, "momentum": 0.9}
        return training_step(lambda parameters: gluon.Trainer(parameters, "sgd", options, kvstore=self.store))
