"""The same small training in every framework, as ranks run it, and by hand in NumPy.

Each rank takes its half of every batch; a plain copy of the model takes the whole batch in the same
process, without polyhvd. All start from the same weights, and use SGD with momentum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

STEPS = 20
LOCAL_BATCH = 16
LEARNING_RATE = 0.1
MOMENTUM = 0.9
HIDDEN = 32

Array = np.ndarray[Any, Any]
Weights = list[Array]  # [64, hidden], [hidden], [hidden, 10], [10]


def initial_weights() -> Weights:
    random = np.random.default_rng(11)
    return [
        (random.standard_normal((64, HIDDEN)) / 8).astype(np.float32),
        np.zeros(HIDDEN, np.float32),
        (random.standard_normal((HIDDEN, 10)) / 6).astype(np.float32),
        np.zeros(10, np.float32),
    ]


def batch(step: int, ranks: int) -> tuple[Array, Array]:
    """The joined batch of a step: the ranks' parts one after the other."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(5).permutation(len(labels))
    count = LOCAL_BATCH * ranks
    chosen = order[step * count : (step + 1) * count]
    return (pixels[chosen] / 16).astype(np.float32), labels[chosen].astype(np.int64)


def part(step: int, rank: int, ranks: int) -> tuple[Array, Array]:
    pixels, labels = batch(step, ranks)
    mine = slice(rank * LOCAL_BATCH, (rank + 1) * LOCAL_BATCH)
    return pixels[mine], labels[mine]


def gradients_by_hand(weights: Weights, x: Array, y: Array) -> Weights:
    """Of the mean loss over a batch, in NumPy."""
    w1, b1, w2, b2 = weights
    hidden = np.maximum(x @ w1 + b1, 0)
    logits = hidden @ w2 + b2
    probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    d_logits = (probabilities - np.eye(10)[y]) / len(y)
    d_hidden = (d_logits @ w2.T) * (hidden > 0)
    return [x.T @ d_hidden, d_hidden.sum(axis=0), hidden.T @ d_logits, d_logits.sum(axis=0)]


def by_hand(ranks: int) -> Weights:
    """The training in NumPy and float64, on the joined batches: SGD with momentum, written out."""
    parameters = [w.astype(np.float64) for w in initial_weights()]
    velocities = [np.zeros_like(w) for w in parameters]
    for step in range(STEPS):
        gradients = gradients_by_hand(parameters, *batch(step, ranks))
        for parameter, velocity, gradient in zip(parameters, velocities, gradients, strict=True):
            velocity *= MOMENTUM
            velocity += gradient
            parameter -= LEARNING_RATE * velocity
    return parameters


def torch_model() -> Any:
    """The model with its initial weights."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(64, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 10))
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), initial_weights(), strict=True):
            parameter.copy_(torch.from_numpy(value.T.copy()))
    return model


def train_torch() -> tuple[Weights, Weights]:
    import polyhvd.torch as hvd
    import torch

    def run(model: torch.nn.Module, optimizer: Any, data: Callable[[int], tuple[Array, Array]]) -> Weights:
        for step in range(STEPS):
            x, y = map(torch.from_numpy, data(step))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return [p.detach().numpy().T.copy() for p in model.parameters()]

    def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)

    joined = torch_model()
    alone = run(joined, sgd(joined), lambda step: batch(step, hvd.size()))
    model = torch_model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    return run(model, optimizer, lambda step: part(step, hvd.rank(), hvd.size())), alone


def mxnet_model() -> Any:
    """The model with its initial weights."""
    import mxnet as mx
    from mxnet import gluon

    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(HIDDEN, activation="relu", in_units=64), gluon.nn.Dense(10, in_units=HIDDEN))
    net.initialize()
    for parameter, value in zip(net.collect_params().values(), initial_weights(), strict=True):
        parameter.set_data(mx.nd.array(value.T))
    net.hybridize()
    return net


def train_mxnet() -> tuple[Weights, Weights]:
    import polyhvd.mxnet as hvd  # isort: skip
    import mxnet as mx
    from mxnet import autograd, gluon

    def run(net: Any, trainer: Any, data: Callable[[int], tuple[Array, Array]]) -> Weights:
        cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()
        for step in range(STEPS):
            x, y = data(step)
            with autograd.record():
                loss = cross_entropy(net(mx.nd.array(x)), mx.nd.array(y))
            loss.backward()
            trainer.step(len(x))
        return [p.data().asnumpy().T.copy() for p in net.collect_params().values()]

    options = {"learning_rate": LEARNING_RATE, "momentum": MOMENTUM}
    joined = mxnet_model()
    plain = gluon.Trainer(joined.collect_params(), "sgd", options, kvstore=None)
    alone = run(joined, plain, lambda step: batch(step, hvd.size()))
    net = mxnet_model()
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", options)
    return run(net, trainer, lambda step: part(step, hvd.rank(), hvd.size())), alone


def keras_model() -> Any:
    """The model with its initial weights."""
    import keras

    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(HIDDEN, activation="relu"), keras.layers.Dense(10)]
    )
    model.set_weights(initial_weights())
    return model


def train_tensorflow() -> tuple[Weights, Weights]:
    import keras
    import polyhvd.keras as hvd

    def run(model: keras.Model, optimizer: Any, data: Callable[[int], tuple[Array, Array]]) -> Weights:
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        parts = [data(step) for step in range(STEPS)]
        x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        model.fit(x, y, batch_size=len(parts[0][0]), epochs=1, shuffle=False, verbose=0)
        return [np.array(w) for w in model.get_weights()]

    def sgd() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM)

    alone = run(keras_model(), sgd(), lambda step: batch(step, hvd.size()))
    distributed = hvd.DistributedOptimizer(sgd())
    return run(keras_model(), distributed, lambda step: part(step, hvd.rank(), hvd.size())), alone


def train(driver: str) -> tuple[Weights, Weights]:
    """Weights after training on all ranks, and after training on the joined batches alone."""
    return {"torch": train_torch, "mxnet": train_mxnet, "tensorflow": train_tensorflow}[driver]()
