"""An embedding with sparse gradients, and weights without any, in jobs of several frameworks."""

from __future__ import annotations

from typing import Any

import drivers
import numpy as np

from polyhvd import parity

__all__ = ["embedding", "unused"]

Array = np.ndarray[Any, Any]
_WORDS, _UNITS, _LENGTH = 50, 4, 3


def _torch(options: dict[str, Any]) -> Any:
    import polyhvd.torch as hvd
    import torch
    from torch import nn

    model = nn.Sequential(
        nn.Embedding(_WORDS, _UNITS, sparse=True), nn.Flatten(), nn.Linear(_LENGTH * _UNITS, 2)
    )
    mapping = parity.mapping(model, prefix="words")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), mapping=mapping, **options
    )

    def step(words: Array) -> None:
        optimizer.zero_grad()
        (model(torch.from_numpy(words)) ** 2).mean().backward()
        assert model[0].weight.grad is not None
        assert model[0].weight.grad.is_sparse
        optimizer.step()

    return mapping, step


def _gluon(options: dict[str, Any]) -> Any:
    import mxnet as mx
    import polyhvd.mxnet as hvd

    mx.util.set_np_shape(False)  # as Gluon has it; other tests of this process change it
    net = mx.gluon.nn.Sequential()
    net.add(
        mx.gluon.nn.Embedding(_WORDS, _UNITS, sparse_grad=True),
        mx.gluon.nn.Dense(2, in_units=_LENGTH * _UNITS),
    )
    net.initialize()
    mapping = parity.mapping(net, prefix="words")
    trainer = hvd.DistributedTrainer(
        net.collect_params(), "sgd", {"learning_rate": 0.1}, mapping=mapping, **options
    )

    def step(words: Array) -> None:
        with mx.autograd.record():
            loss = (net(mx.nd.array(words)) ** 2).mean()
        loss.backward()
        trainer.step(1)

    return mapping, step


def _keras(options: dict[str, Any]) -> Any:
    import keras
    import polyhvd.tensorflow as hvd
    import tensorflow as tf

    model = keras.Sequential(
        [
            keras.layers.Input((_LENGTH,)),
            keras.layers.Embedding(_WORDS, _UNITS),
            keras.layers.Flatten(),
            keras.layers.Dense(2),
        ]
    )
    mapping = parity.mapping(model, prefix="words")
    optimizer = keras.optimizers.SGD(0.1)

    @tf.function
    def step(words: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(words) ** 2)
        tape = hvd.DistributedGradientTape(tape, mapping=mapping, **options)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    return mapping, lambda words: step(tf.constant(words))


_MODELS = {"torch": _torch, "mxnet": _gluon, "tensorflow": _keras}


def embedding(name: str, sparse_as_dense: bool) -> list[Array]:
    """Some steps with other words on each rank; the weights afterwards."""
    driver = drivers.get(name)
    rank = driver.hvd.rank()
    mapping, step = _MODELS[driver.framework]({"sparse_as_dense": sparse_as_dense})
    mapping.broadcast()
    before = mapping.arrays()
    for number in range(3):
        step(np.array([[1, 2, 2], [rank + 3 + number, 1, 0]]))
    after = mapping.arrays()
    moved = np.abs(next(iter(after.values())) - next(iter(before.values()))).max(axis=1)
    assert moved[[0, 1, 2, 3, 4]].min() > 0, "words of this rank and of others"
    assert moved[10:].max() == 0
    return list(after.values())


def unused(name: str) -> None:
    """A weight that a rank has not used has a gradient of zeros there."""
    driver = drivers.get(name)
    hvd, rank = driver.hvd, driver.hvd.rank()
    one, two = (driver.parameter(np.ones(n, np.float32)) for n in (2, 3))
    options = {"mapping": parity.mapping([one, two], prefix="unused"), "op": hvd.Sum}
    used = (one, two)[rank % 2]
    if driver.framework == "torch":
        import torch

        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([one, two], lr=1.0), **options)
        (used * 4).sum().backward()
        optimizer.step()
        gradients = [1.0 - driver.to_numpy(weight) for weight in (one, two)]
    else:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(used * 4)
        found = hvd.DistributedGradientTape(tape, **options).gradient(loss, [one, two])
        gradients = [driver.to_numpy(gradient) for gradient in found]
    assert [gradient.tolist() for gradient in gradients] == [[4.0] * 2, [4.0] * 3]
