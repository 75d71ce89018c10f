"""parity.watch of models of Gluon: hybridized ones, sparse gradients, and what it costs."""

from __future__ import annotations

import itertools
from typing import Any

import mxnet as mx
import numpy as np
import polyhvd.mxnet as hvd
import pytest
from mxnet.gluon import nn
from polyhvd.mxnet.parity import kept_of

from polyhvd import parity

pytestmark = pytest.mark.ranks(2, framework="mxnet", timeout_s=180)


def trained(*sizes: int, optimizer: str = "sgd", **options: Any) -> tuple[Any, Any]:
    model = nn.HybridSequential()
    for number, (inputs, units) in enumerate(itertools.pairwise(sizes)):
        model.add(nn.Dense(units, in_units=inputs, activation="relu" if number + 2 < len(sizes) else None))
    model.initialize()
    parity.load(model, from_=0)
    options = {"learning_rate": 0.05, **options}
    return model, mx.gluon.Trainer(model.collect_params(), optimizer, options, kvstore=None)


def rows_of(number: int, rows: int = 8, units: int = 6) -> Any:
    return mx.nd.array(np.random.default_rng(number).standard_normal((rows, units), np.float32))


def step(model: Any, trainer: Any, rows: Any, *, divided: bool = False) -> None:
    with mx.autograd.record():
        loss = model(rows).square().mean()
    loss.backward()
    if divided:
        trainer.allreduce_grads()
        trainer.update(1)
    else:
        trainer.step(1)


@pytest.mark.parametrize("is_traced", [False, True])
def test_a_hybridized_model_is_watched_by_layers_and_hybridized_again(rank: int, is_traced: bool) -> None:
    model, trainer = trained(6, 8, 8, 3)
    model.hybridize()
    if is_traced:
        step(model, trainer, rows_of(9))
    with parity.watch(model, trainer) as watched:
        step(model, trainer, rows_of(0))
        if rank == 1:
            weight = model[1].weight
            weight.set_data(weight.data() * 1.5)
        step(model, trainer, rows_of(1))
    assert [found.kind for found in watched.divergences] == ["weights"], watched
    assert watched.divergences[0].layer == 1
    calls = []
    handle = model[1].register_forward_hook(lambda *_: calls.append(1))
    step(model, trainer, rows_of(2))
    step(model, trainer, rows_of(2))
    handle.detach()
    assert len(calls) < 2, "the layers still run one by one"


def test_what_a_hybridized_layer_makes_is_told() -> None:
    model, trainer = trained(6, 8, 8, 3)
    model.hybridize()
    with parity.watch(model, trainer) as watched:
        step(model, trainer, rows_of(0))
        if hvd.rank() == 1:
            model[0].act._act_type = "tanh"
        step(model, trainer, rows_of(1))
    first = watched.first
    assert first is not None
    assert (first.step, first.kind, first.layer) == (1, "activation", 0), watched


class Scaled(nn.Block):
    """A model that computes in float16, which dense layers cannot on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        with self.name_scope():
            self.weight = self.params.get("weight", shape=(6,), dtype="float16", init=mx.init.One())

    def forward(self, rows: Any) -> Any:
        return rows * self.weight.data()


@pytest.mark.parametrize(
    ("optimizer", "options", "kinds"),
    [
        ("sgd", {}, []),
        ("sgd", {"momentum": 0.9}, ["momentum"]),
        ("adam", {}, ["momentum", "second moment"]),
    ],
)
def test_a_weight_copied_to_float32_is_not_a_state_of_the_optimizer(
    optimizer: str, options: dict[str, float], kinds: list[str]
) -> None:
    model = Scaled()
    model.initialize()
    options = {"learning_rate": 0.05, "multi_precision": True, **options}
    trainer = mx.gluon.Trainer(model.collect_params(), optimizer, options, kvstore=None)
    with parity.watch(model, trainer) as watched:
        for number in range(2):
            step(model, trainer, rows_of(number).astype("float16"))
    assert watched.first is None, watched
    assert list(kept_of(trainer, model.weight)) == kinds


def test_a_model_that_is_hybridized_while_it_is_watched_trains_on() -> None:
    model, trainer = trained(6, 8, 3)
    with parity.watch(model, trainer) as watched:
        step(model, trainer, rows_of(0))
        model.hybridize()
        step(model, trainer, rows_of(1))
    assert watched.steps == 2
    assert watched.first is None, watched


def test_a_program_that_averages_and_updates_by_itself_is_watched(rank: int) -> None:
    model, trainer = trained(6, 8, 3, momentum=0.9)
    with parity.watch(model, trainer) as watched:
        for number in range(3):
            if (rank, number) == (1, 2):
                trainer.set_learning_rate(0.01)
            step(model, trainer, rows_of(number), divided=True)
    first = watched.first
    assert watched.steps == 3
    assert first is not None
    assert (first.step, first.kind) == (2, "learning rate"), watched


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "rmsprop", "adagrad"])
def test_what_optimizers_keep_is_read_where_it_lies(rank: int, optimizer: str) -> None:
    options = {"momentum": 0.9} if optimizer == "sgd" else {}
    model, trainer = trained(6, 8, 3, optimizer=optimizer, **options)
    with parity.watch(model, trainer) as watched:
        for number in range(3):
            if (rank, number) == (1, 2):
                place = trainer._param2idx[model[0].weight.name]
                state = trainer._updaters[0].states[place]
                state = state[-1] if isinstance(state, (list, tuple)) else state
                state[:] = state * 1.5
            step(model, trainer, rows_of(number))
    first = watched.first
    assert first is not None
    detail = "momentum" if optimizer == "sgd" else "second moment"
    assert (first.step, first.kind, first.detail, first.layer) == (2, "update", detail, 0), watched


def test_sparse_gradients_of_an_embedding_are_watched(rank: int) -> None:
    model = nn.Sequential()
    model.add(nn.Embedding(20, 4, sparse_grad=True), nn.Dense(3, in_units=4))
    model.initialize()
    parity.load(model, from_=0)
    trainer = mx.gluon.Trainer(model.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=None)
    with parity.watch(model, trainer) as watched:
        for number in range(3):
            words = mx.nd.array([[1], [2], [7 if (rank, number) == (1, 2) else 3]])
            with mx.autograd.record():
                loss = model(words.reshape(-1)).square().mean()
            loss.backward()
            trainer.step(1)
    first = watched.first
    assert first is not None
    assert (first.step, first.kind) == (2, "input"), watched


@pytest.mark.parametrize("is_hybridized", [False, True])
def test_a_watched_step_is_one_exchange_and_reads_tensors_where_they_lie(
    is_hybridized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = rows_of(0, 32, 784)
    model, trainer = trained(784, 256, 128, 10, momentum=0.9)
    if is_hybridized:
        model.hybridize()
    copies = []
    read = mx.nd.NDArray.asnumpy
    monkeypatch.setattr(mx.nd.NDArray, "asnumpy", lambda array: [copies.append(array.shape), read(array)][1])
    steps = 10
    with parity.watch(model, trainer) as watched:
        for number in range(3 + steps):
            if number == 3:  # until then it may look closer
                before = hvd.counters()["operations"]
                copies.clear()
            step(model, trainer, images)
        operations = hvd.counters()["operations"] - before
    assert watched.first is None, watched
    assert (operations, copies) == (steps, [])
