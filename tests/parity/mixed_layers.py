"""Layers that frameworks have in ways of their own, as every rank makes, loads and runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import drivers
import numpy as np

from polyhvd import parity

__all__ = ["CASES", "averages_gradients", "computes_the_same"]

Array = np.ndarray[Any, Any]
_Model = tuple[Any, Callable[[Array], Any]]

#: Inputs of each case, channels first.
CASES = {
    "steps of a convolution as rows": (5, 3, 13),
    "steps of a dense layer as rows": (5, 13, 3),
    "rows in a class of its own": (2, 3, 6, 5),
    "separable convolution": (2, 4, 7, 6),
    "attention": (2, 5, 8),
    "slopes of channels": (2, 3, 6, 5),
    "group normalization": (2, 3, 7, 6),
    "batch normalization without scale and offset": (6, 3),
    "two layers of the same rows": (2, 3, 6, 5),
    "rows beside channels": (2, 3, 6, 5),
    "rows of two branches": (2, 3, 6, 5),
    "branches of equal layers": (2, 4),
    "images of units": (2, 4),
    "weights of two layers": (2, 4),
    "means of channels": (2, 3, 6, 5),
    "channels moved to the front": (2, 3, 6, 5),
    "sum of two images": (2, 3, 6, 5),
    "weighted channels": (2, 3, 6, 5),
    "images of several moments": (2, 5, 3, 6, 5),
}
_IMAGES_LAST = {"rows in a class of its own", "separable convolution", "slopes of channels"}
_IMAGES_LAST |= {"group normalization", "steps of a convolution as rows", "two layers of the same rows"}
_IMAGES_LAST |= {"rows beside channels", "rows of two branches", "means of channels"}
_IMAGES_LAST |= {"channels moved to the front", "sum of two images", "weighted channels"}
_IMAGES_LAST |= {"images of several moments"}


def _torch(case: str) -> _Model:
    import torch
    from torch import nn

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Any) -> Any:
            q, k, v = (part(x).reshape(2, 5, 2, 4).transpose(1, 2) for part in self.parts[:3])
            heads = nn.functional.scaled_dot_product_attention(q, k, v)
            return self.parts[3](heads.transpose(1, 2).reshape(2, 5, 8))

    class Graph(nn.Module):
        def __init__(self, function: Callable[..., Any], *parts: Any) -> None:
            super().__init__()
            self.parts, self.function = nn.ModuleList(parts), function

        def forward(self, x: Any) -> Any:
            return self.function(x, *self.parts)

    def joined(*tensors: Any) -> Any:
        return torch.cat(tensors, 1)

    def two_layers(x: Any, convolution: Any, one: Any, other: Any) -> Any:
        rows = convolution(x).flatten(1)
        return joined(one(rows), other(rows))

    def beside(x: Any, convolution: Any, norm: Any, dense: Any) -> Any:
        x = convolution(x)
        return dense(norm(joined(x.flatten(1), x.mean((2, 3)))))

    def branches(x: Any, one: Any, other: Any, dense: Any) -> Any:
        return dense(joined(one(x).flatten(1), other(x).flatten(1)))

    def equal(x: Any, first: Any, second: Any, other: Any, dense: Any) -> Any:
        return dense(joined(other(x), second(first(x))))

    def summed(x: Any, one: Any, other: Any, dense: Any) -> Any:
        return dense((one(x) + other(x)).flatten(1))

    def weighted(x: Any, convolution: Any, gate: Any, dense: Any) -> Any:
        x = convolution(x)
        return dense((x * gate(x.mean((2, 3)))[:, :, None, None]).flatten(1))

    def moments(x: Any, convolution: Any, dense: Any) -> Any:
        return dense(convolution(x.flatten(0, 1)).reshape(2, 5, -1))

    def tied() -> Any:
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        second.weight, second.bias = first.weight, first.bias
        return nn.Sequential(first, second, nn.Linear(4, 3))

    model = {
        "steps of a convolution as rows": lambda: nn.Sequential(
            nn.Conv1d(3, 4, 3), nn.Flatten(), nn.BatchNorm1d(44), nn.Linear(44, 3), nn.Linear(3, 2)
        ),
        "steps of a dense layer as rows": lambda: nn.Sequential(
            nn.Linear(3, 4), nn.Flatten(), nn.Linear(52, 3)
        ),
        "rows in a class of its own": lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(48, 3)
        ),
        "separable convolution": lambda: nn.Sequential(
            nn.Conv2d(4, 8, 3, groups=4, bias=False), nn.Conv2d(8, 3, 1)
        ),
        "attention": Attention,
        "slopes of channels": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.PReLU(4)),
        "group normalization": lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(3, 6)),
        "batch normalization without scale and offset": lambda: nn.Sequential(
            nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2)
        ),
        "two layers of the same rows": lambda: Graph(
            two_layers, nn.Conv2d(3, 4, 3), nn.Linear(48, 3), nn.Linear(48, 5)
        ),
        "rows beside channels": lambda: Graph(
            beside, nn.Conv2d(3, 4, 3), nn.BatchNorm1d(52), nn.Linear(52, 3)
        ),
        "rows of two branches": lambda: Graph(
            branches, nn.Conv2d(3, 4, 3), nn.Conv2d(3, 2, 2), nn.Linear(88, 3)
        ),
        "branches of equal layers": lambda: Graph(
            equal, nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(8, 3)
        ),
        "images of units": lambda: nn.Sequential(
            nn.Linear(4, 60),
            nn.BatchNorm1d(60),
            nn.Unflatten(1, (5, 4, 3)),
            nn.ConvTranspose2d(5, 2, 3),
        ),
        "weights of two layers": tied,
        "means of channels": lambda: Graph(
            lambda x, convolution, dense: dense(convolution(x).mean((2, 3))),
            nn.Conv2d(3, 4, 3),
            nn.Linear(4, 3),
        ),
        "channels moved to the front": lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(48, 3)
        ),
        "sum of two images": lambda: Graph(summed, nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3), nn.Linear(48, 3)),
        "weighted channels": lambda: Graph(weighted, nn.Conv2d(3, 4, 3), nn.Linear(4, 4), nn.Linear(48, 3)),
        "images of several moments": lambda: Graph(moments, nn.Conv2d(3, 4, 3), nn.Linear(48, 3)),
    }[case]()
    model.eval()

    def run(x: Array) -> Any:
        with torch.no_grad():
            return model(torch.from_numpy(x)).numpy()

    return model, run


def _gluon(case: str) -> _Model:
    import mxnet as mx
    from mxnet.gluon import Block, nn

    mx.util.set_np_shape(False)  # as Gluon has it; other tests of this process change it

    class Attention(Block):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.parts = [nn.Dense(8, in_units=8, flatten=False) for _ in range(4)]
            for part in self.parts:
                self.register_child(part)

        def forward(self, x: Any) -> Any:
            q, k, v = (
                part(x).reshape((2, 5, 2, 4)).transpose((0, 2, 1, 3)).reshape((4, 5, 4))
                for part in self.parts[:3]
            )
            scores = mx.nd.softmax(mx.nd.batch_dot(q, k, transpose_b=True) / 2)
            heads = mx.nd.batch_dot(scores, v).reshape((2, 2, 5, 4)).transpose((0, 2, 1, 3))
            return self.parts[3](heads.reshape((2, 5, 8)))

    class Graph(Block):  # type: ignore[misc]
        def __init__(self, function: Callable[..., Any], *parts: Any) -> None:
            super().__init__()
            self.function, self.parts = function, parts
            for part in parts:
                self.register_child(part)

        def forward(self, x: Any) -> Any:
            return self.function(x, *self.parts)

    def joined(*tensors: Any) -> Any:
        return mx.nd.concat(*(tensor.flatten() for tensor in tensors), dim=1)

    def two_layers(x: Any, convolution: Any, one: Any, other: Any) -> Any:
        x = convolution(x)
        return joined(one(x), other(x))

    def beside(x: Any, convolution: Any, norm: Any, dense: Any) -> Any:
        x = convolution(x)
        return dense(norm(joined(x, x.mean((2, 3)))))

    def branches(x: Any, one: Any, other: Any, dense: Any) -> Any:
        return dense(joined(one(x), other(x)))

    def equal(x: Any, first: Any, second: Any, other: Any, dense: Any) -> Any:
        return dense(joined(other(x), second(first(x))))

    def summed(x: Any, one: Any, other: Any, dense: Any) -> Any:
        return dense(one(x) + other(x))

    def weighted(x: Any, convolution: Any, gate: Any, dense: Any) -> Any:
        x = convolution(x)
        return dense(mx.nd.broadcast_mul(x, gate(x.mean((2, 3))).reshape((0, 0, 1, 1))))

    def moments(x: Any, convolution: Any, dense: Any) -> Any:
        return dense(convolution(x.reshape((-3, -2))).reshape((2, 5, -1)))

    first = nn.Dense(4, in_units=4)
    layers = {
        "steps of a convolution as rows": [
            nn.Conv1D(4, 3),
            nn.Flatten(),
            nn.BatchNorm(),
            *map(nn.Dense, (3, 2)),
        ],
        "steps of a dense layer as rows": [nn.Dense(4, flatten=False), nn.Dense(3)],
        "rows in a class of its own": [nn.Conv2D(4, 3), nn.Dense(3)],
        "separable convolution": [nn.Conv2D(8, 3, groups=4, use_bias=False), nn.Conv2D(3, 1)],
        "attention": [Attention()],
        "slopes of channels": [nn.Conv2D(4, 3), nn.PReLU(in_channels=4)],
        "group normalization": [nn.Conv2D(6, 3), nn.GroupNorm(num_groups=3)],
        "batch normalization without scale and offset": [
            nn.BatchNorm(scale=False, center=False),
            nn.Dense(2),
        ],
        "two layers of the same rows": [Graph(two_layers, nn.Conv2D(4, 3), nn.Dense(3), nn.Dense(5))],
        "rows beside channels": [Graph(beside, nn.Conv2D(4, 3), nn.BatchNorm(), nn.Dense(3))],
        "rows of two branches": [Graph(branches, nn.Conv2D(4, 3), nn.Conv2D(2, 2), nn.Dense(3))],
        "branches of equal layers": [Graph(equal, *map(nn.Dense, (4, 4, 4, 3)))],
        "images of units": [
            nn.Dense(60),
            nn.BatchNorm(),
            nn.HybridLambda(lambda F, x: x.reshape((-1, 5, 4, 3))),
            nn.Conv2DTranspose(2, 3),
        ],
        "weights of two layers": [first, nn.Dense(4, in_units=4, params=first.params), nn.Dense(3)],
        "means of channels": [nn.Conv2D(4, 3), nn.GlobalAvgPool2D(), nn.Dense(3)],
        "channels moved to the front": [nn.Conv2D(4, 3), nn.Dense(3)],
        "sum of two images": [Graph(summed, nn.Conv2D(4, 3), nn.Conv2D(4, 3), nn.Dense(3))],
        "weighted channels": [Graph(weighted, nn.Conv2D(4, 3), nn.Dense(4), nn.Dense(3))],
        "images of several moments": [Graph(moments, nn.Conv2D(4, 3), nn.Dense(3, flatten=False))],
    }[case]
    net = nn.Sequential()
    net.add(*layers)
    net.initialize()
    net(mx.nd.zeros(CASES[case]))
    return net, lambda x: net(mx.nd.array(x)).asnumpy()


def _keras(case: str) -> _Model:
    import keras
    from keras import layers

    shape = CASES[case][1:]
    channels = 2 if case == "images of several moments" else 1
    if case in _IMAGES_LAST:
        shape = np.moveaxis(np.empty(CASES[case]), channels, -1).shape[1:]

    class Rows(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.flatten = layers.Conv2D(4, 3), layers.Flatten()
            self.dense = layers.Dense(3)

        def call(self, x: Any) -> Any:
            return self.dense(self.flatten(self.convolution(x)))

    def two_layers(x: Any) -> Any:
        rows = layers.Flatten()(layers.Conv2D(4, 3)(x))
        return layers.Concatenate()([layers.Dense(3)(rows), layers.Dense(5)(rows)])

    def beside(x: Any) -> Any:
        x = layers.Conv2D(4, 3)(x)
        rows = layers.Concatenate()([layers.Flatten()(x), layers.GlobalAveragePooling2D()(x)])
        return layers.Dense(3)(layers.BatchNormalization(epsilon=1e-5)(rows))

    def branches(x: Any) -> Any:
        rows = [layers.Flatten()(layers.Conv2D(units, size)(x)) for units, size in ((4, 3), (2, 2))]
        return layers.Dense(3)(layers.Concatenate()(rows))

    def equal(x: Any) -> Any:
        long = layers.Dense(4)(layers.Dense(4)(x))
        return layers.Dense(3)(layers.Concatenate()([layers.Dense(4)(x), long]))

    def twice(x: Any) -> Any:
        dense = layers.Dense(4)
        return layers.Dense(3)(dense(dense(x)))

    def means(x: Any) -> Any:
        return layers.Dense(3)(keras.ops.mean(layers.Conv2D(4, 3)(x), axis=(1, 2)))

    def moved(x: Any) -> Any:
        return layers.Dense(3)(layers.Flatten()(layers.Permute((3, 1, 2))(layers.Conv2D(4, 3)(x))))

    def summed(x: Any) -> Any:
        images = [layers.Conv2D(4, 3)(x), layers.Conv2D(4, 3)(x)]
        return layers.Dense(3)(layers.Flatten()(layers.Add()(images)))

    def weighted(x: Any) -> Any:
        x = layers.Conv2D(4, 3)(x)
        gate = layers.Dense(4)(layers.GlobalAveragePooling2D(keepdims=True)(x))
        return layers.Dense(3)(layers.Flatten()(layers.Multiply()([x, gate])))

    def moments(x: Any) -> Any:
        rows = layers.TimeDistributed(layers.Flatten())(layers.TimeDistributed(layers.Conv2D(4, 3))(x))
        return layers.Dense(3)(rows)

    functions = {
        "means of channels": means,
        "channels moved to the front": moved,
        "sum of two images": summed,
        "weighted channels": weighted,
        "images of several moments": moments,
        "attention": lambda x: layers.MultiHeadAttention(2, 4)(x, x),
        "two layers of the same rows": two_layers,
        "rows beside channels": beside,
        "rows of two branches": branches,
        "branches of equal layers": equal,
        "weights of two layers": twice,
    }
    if case in functions:
        given = keras.Input(shape)
        model = keras.Model(given, functions[case](given))
    elif case == "rows in a class of its own":
        model = Rows()
        model(np.zeros((1, *shape), np.float32))
    else:
        model = keras.Sequential(
            [
                layers.Input(shape),
                *{
                    "steps of a convolution as rows": lambda: [
                        layers.Conv1D(4, 3),
                        layers.Reshape((-1,)),
                        layers.BatchNormalization(epsilon=1e-5),
                        layers.Dense(3),
                        layers.Dense(2),
                    ],
                    "steps of a dense layer as rows": lambda: [
                        layers.Dense(4),
                        layers.Flatten(),
                        layers.Dense(3),
                    ],
                    "separable convolution": lambda: [layers.SeparableConv2D(3, 3, depth_multiplier=2)],
                    "slopes of channels": lambda: [layers.Conv2D(4, 3), layers.PReLU(shared_axes=[1, 2])],
                    "group normalization": lambda: [
                        layers.Conv2D(6, 3),
                        layers.GroupNormalization(3, epsilon=1e-5),
                    ],
                    "batch normalization without scale and offset": lambda: [
                        layers.BatchNormalization(epsilon=1e-5, scale=False, center=False),
                        layers.Dense(2),
                    ],
                    "images of units": lambda: [
                        layers.Dense(60),
                        layers.BatchNormalization(epsilon=1e-5),
                        layers.Reshape((4, 3, 5)),
                        layers.Conv2DTranspose(2, 3),
                    ],
                }[case](),
            ]
        )

    def run(x: Array) -> Any:
        given = np.moveaxis(x, channels, -1) if case in _IMAGES_LAST else x
        made = np.asarray(model(given, training=False))
        return np.moveaxis(made, -1, 1) if made.ndim == 4 else made

    return model, run


_NETS = {"torch": _torch, "mxnet": _gluon, "tensorflow": _keras}


def computes_the_same(name: str, case: str) -> None:
    """With the weights of any rank, all make of one input what that rank makes of it."""
    driver = drivers.get(name)
    make = _NETS[driver.framework]
    inputs = np.random.default_rng(5).standard_normal(CASES[case], np.float32)
    for root, framework in enumerate(driver.hvd.allgather_object(driver.framework)):
        model, run = make(case)
        seed = np.random.default_rng([7, driver.hvd.rank()])
        for weight in parity.models.weights_of(model):
            low, high = (0.5, 2.0) if weight.role == "variance" else (-1.0, 1.0)
            weight.write(seed.uniform(low, high, weight.layout.shape).astype(np.float32))
        if case == "group normalization" and framework != "mxnet":
            # What Gluon cannot have: numbers that differ within a group.
            for weight in parity.models.weights_of(model)[2:]:
                weight.write(np.full(weight.layout.shape, 0.5, np.float32))
        parity.load(model, from_=root)
        made = driver.hvd.allgather_object(run(inputs))
        for other in made:
            np.testing.assert_allclose(
                other, made[root], rtol=1e-4, atol=1e-4, err_msg=f"{case}, {framework}"
            )


def averages_gradients(name: str) -> None:
    """Ranks that apply each its own gradients of one mapping end with the same weights."""
    driver = drivers.get(name)
    model, _ = _NETS[driver.framework]("rows beside channels")
    mapping = parity.mapping(model, prefix="rows")
    mapping.broadcast(root_rank=0)
    images = np.random.default_rng([3, driver.hvd.rank()]).standard_normal((2, 3, 6, 5)).astype(np.float32)
    if driver.framework == "torch":
        import torch

        optimizer = driver.hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), mapping=mapping
        )
        model(torch.from_numpy(images)).square().mean().backward()
        optimizer.step()
    elif driver.framework == "mxnet":
        import mxnet as mx

        trainer = driver.hvd.DistributedTrainer(
            model.collect_params(), "sgd", {"learning_rate": 0.1}, mapping=mapping
        )
        with mx.autograd.record():
            loss = model(mx.nd.array(images)).square().mean()
        loss.backward()
        trainer.step(1)
    else:
        import keras
        import tensorflow as tf

        optimizer = driver.hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), mapping=mapping)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(np.moveaxis(images, 1, -1), training=True) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    for weight in parity.models.weights_of(model):
        if weight.trainable:
            found = driver.hvd.allgather_object(weight.layout.array_to_common(weight.read()))
            for other in found:
                np.testing.assert_allclose(other, found[0], rtol=1e-4, atol=1e-5, err_msg=weight.name)
