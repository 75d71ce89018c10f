"""A user's compressor with state, in every optimizer, and the same by hand in NumPy.

Of each gradient only the largest element is sent; what was not sent is added to the next gradient (Stich,
Cordonnier and Jaggi, "Sparsified SGD with memory", 2018). All numbers have few bits, so results are exact.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from polyhvd.training.compression import KeyedCompressor

Array = np.ndarray[Any, Any]
Tensors = dict[str, Array]

STEPS = 6
SHAPES = ((5,), (2, 3), (4,))  # of the parameters of one optimizer
OPTIMIZERS = 2
LOCAL = 2  # the position of a parameter whose gradient stays on its rank, of the second optimizer
MODES = {
    "torch": ("plain", "groups", "keras"),
    "mxnet": ("plain", "groups", "numpy arrays"),
    "tensorflow": ("eager", "function", "function groups", "function passes", "tape", "tape function", "v1"),
}


def gradient(optimizer: int, step: int, rank: int, position: int) -> Array:
    """Multiples of 1/8; no two elements of what is left over are equal in size."""
    shape = SHAPES[position]
    random = np.random.default_rng([optimizer, step, rank, position])
    count = int(np.prod(shape))
    sizes = random.permutation(count) * 16 + random.integers(1, 15, count)
    signs = random.choice([-1.0, 1.0], count)
    return (sizes * signs / 8).astype(np.float32).reshape(shape)


def by_hand(ranks: int) -> tuple[list[list[list[Array]]], list[list[list[Array]]]]:
    """Of every rank, of every optimizer, after the last step: parameters, and what was not sent."""
    weights = [[[np.zeros(s) for s in SHAPES] for _ in range(OPTIMIZERS)] for _ in range(ranks)]
    rests = [[[np.zeros(s) for s in SHAPES] for _ in range(OPTIMIZERS)] for _ in range(ranks)]
    for step in range(STEPS):
        for optimizer in range(OPTIMIZERS):
            for position in range(len(SHAPES)):
                mine = [gradient(optimizer, step, rank, position) for rank in range(ranks)]
                if (optimizer, position) == (1, LOCAL):
                    for rank in range(ranks):
                        weights[rank][optimizer][position] -= mine[rank] / ranks
                    continue
                total = np.zeros(SHAPES[position])
                for rank in range(ranks):
                    wanted = mine[rank] + rests[rank][optimizer][position]
                    sent = np.where(np.abs(wanted) >= np.abs(wanted).max(), wanted, 0)
                    rests[rank][optimizer][position] = wanted - sent
                    total += sent
                for rank in range(ranks):
                    weights[rank][optimizer][position] -= total / ranks
    return weights, rests


class LargestOnly(KeyedCompressor):
    """Subclasses say how a framework computes."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    @staticmethod
    def zeros(like: Any) -> Any:
        raise NotImplementedError

    @staticmethod
    def largest(tensor: Any) -> Any:
        """The tensor with zeros in the place of all but its largest element."""
        raise NotImplementedError

    def compress(self, tensor: Any, key: str) -> tuple[Any, Any]:
        self.sent.append(key)
        wanted = tensor + self.state.get(key, lambda: self.zeros(tensor))
        sent = self.largest(wanted)
        self.state.set(key, wanted - sent)
        return sent, key

    def decompress(self, tensor: Any, context: Any, key: str) -> Any:
        assert context == key
        return tensor


def _torch_compressor() -> type[LargestOnly]:
    import torch

    class OfTorch(LargestOnly):
        zeros = staticmethod(torch.zeros_like)

        @staticmethod
        def largest(tensor: Any) -> Any:
            return torch.where(tensor.abs() >= tensor.abs().max(), tensor, 0.0)

    return OfTorch


def _train_torch(mode: str) -> Iterator[Any]:
    import polyhvd.torch as hvd
    import torch

    parameters = [[torch.zeros(s, requires_grad=True) for s in SHAPES] for _ in range(OPTIMIZERS)]
    compressors = [_torch_compressor()() for _ in range(OPTIMIZERS)]
    optimizers = []
    for number, mine in enumerate(parameters):
        groups = [[mine[0], mine[2]]] if mode == "groups" else None
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(mine, lr=1.0), compression=compressors[number], groups=groups
        )
        optimizers.append(optimizer)
    optimizers[1].register_local_var(parameters[1][LOCAL])
    for step in range(STEPS):
        for number, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            given = [torch.from_numpy(gradient(number, step, hvd.rank(), i)) for i in range(len(SHAPES))]
            sum((p * g).sum() for p, g in zip(parameters[number], given, strict=True)).backward()
            optimizer.step()
    yield [[p.detach().numpy().copy() for p in mine] for mine in parameters]
    yield [{key: value.numpy() for key, value in c.state_dict().items()} for c in compressors]


def _train_keras_on_torch() -> Iterator[Any]:
    import os

    os.environ["KERAS_BACKEND"] = "torch"  # in a process that has no TensorFlow
    import keras
    import polyhvd.keras as hvd
    import polyhvd.torch
    import torch

    variables = [[keras.Variable(np.zeros(s, np.float32)) for s in SHAPES] for _ in range(OPTIMIZERS)]
    compressors = [_torch_compressor()() for _ in range(OPTIMIZERS)]
    optimizers = [hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=c) for c in compressors]
    optimizers[1].register_local_var(variables[1][LOCAL])
    for step in range(STEPS):
        for number, optimizer in enumerate(optimizers):
            rank = polyhvd.torch.rank()
            given = [torch.from_numpy(gradient(number, step, rank, i)) for i in range(len(SHAPES))]
            optimizer.apply(given, variables[number])
    yield [[v.numpy().copy() for v in mine] for mine in variables]
    yield [{key: value.numpy() for key, value in c.state_dict().items()} for c in compressors]


def _mxnet_compressor() -> type[LargestOnly]:
    import mxnet as mx

    class OfMxnet(LargestOnly):
        zeros = staticmethod(lambda like: like * 0)

        @staticmethod
        def largest(tensor: Any) -> Any:
            size = mx.np.abs(tensor) if isinstance(tensor, mx.np.ndarray) else mx.nd.abs(tensor)
            return tensor * (size >= size.max()).astype(tensor.dtype)

    return OfMxnet


def _train_mxnet(mode: str) -> Iterator[Any]:
    import polyhvd.mxnet as hvd  # isort: skip
    import mxnet as mx
    from mxnet import gluon

    kind = _mxnet_compressor()
    if mode == "numpy arrays":
        mx.npx.set_np()
    try:
        parameters = [
            [gluon.Parameter(f"{number}_{i}", shape=s, init="zeros") for i, s in enumerate(SHAPES)]
            for number in range(OPTIMIZERS)
        ]
        for mine in parameters:
            for parameter in mine:
                parameter.initialize()
        compressors = [kind() for _ in range(OPTIMIZERS)]
        trainers = [
            hvd.DistributedTrainer(
                mine,
                "sgd",
                {"learning_rate": 1.0},
                compression=compressors[number],
                prefix=f"trainer{number}",
                groups=[[mine[0], mine[2]]] if mode == "groups" else None,
            )
            for number, mine in enumerate(parameters)
        ]
        trainers[1].register_local_var(parameters[1][LOCAL])
        array = mx.np.array if mode == "numpy arrays" else mx.nd.array
        for step in range(STEPS):
            for number, trainer in enumerate(trainers):
                with mx.autograd.record():
                    losses = [
                        (p.data() * array(gradient(number, step, hvd.rank(), i))).sum()
                        for i, p in enumerate(parameters[number])
                    ]
                mx.autograd.backward(losses)
                trainer.step(1)
        yield [[p.data().asnumpy().copy() for p in mine] for mine in parameters]
        yield [{key: value.asnumpy() for key, value in c.state_dict().items()} for c in compressors]
    finally:
        if mode == "numpy arrays":
            mx.npx.reset_np()


def _tensorflow_compressor() -> type[LargestOnly]:
    import tensorflow as tf

    class OfTensorflow(LargestOnly):
        zeros = staticmethod(lambda like: tf.zeros(like.shape, like.dtype))

        @staticmethod
        def largest(tensor: Any) -> Any:
            size = tf.abs(tensor)
            return tf.where(size >= tf.reduce_max(size), tensor, tf.zeros_like(tensor))

    return OfTensorflow


def _train_tensorflow(mode: str) -> Iterator[Any]:
    import keras
    import polyhvd.keras as hvd
    import polyhvd.tensorflow as hvd_tf
    import tensorflow as tf

    variables = [[tf.Variable(np.zeros(s, np.float32)) for s in SHAPES] for _ in range(OPTIMIZERS)]
    compressors = [_tensorflow_compressor()() for _ in range(OPTIMIZERS)]
    passes = 2 if "passes" in mode else 1
    optimizers = []
    for number, mine in enumerate(variables):
        options: dict[str, Any] = {"compression": compressors[number], "backward_passes_per_step": passes}
        if "groups" in mode:
            options["groups"] = [[mine[2], mine[0]]]
        optimizer: Any = keras.optimizers.SGD(1.0)
        optimizers.append(optimizer if "tape" in mode else hvd.DistributedOptimizer(optimizer, **options))
        optimizers[-1].build(mine)
    if "tape" not in mode:
        optimizers[1].register_local_var(variables[1][LOCAL])

    def make_step(number: int) -> Callable[..., None]:
        mine, optimizer = variables[number], optimizers[number]

        def step(given: list[Any]) -> None:
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(v * g) for v, g in zip(mine, given, strict=True)])
            if "tape" in mode:
                tape = hvd_tf.DistributedGradientTape(tape, compression=compressors[number])
                if number == 1:
                    tape.register_local_source(mine[LOCAL])
            optimizer.apply_gradients(zip(tape.gradient(loss, mine), mine, strict=True))

        return tf.function(step) if "function" in mode else step

    steps = [make_step(number) for number in range(OPTIMIZERS)]
    for step in range(STEPS):
        for number in range(OPTIMIZERS):
            given = [gradient(number, step, hvd_tf.rank(), i) / passes for i in range(len(SHAPES))]
            for _ in range(passes):
                steps[number]([tf.constant(g) for g in given])
    yield [[v.numpy() for v in mine] for mine in variables]
    yield [c.state_dict() for c in compressors]


def _train_v1() -> Iterator[Any]:
    import polyhvd.tensorflow as hvd
    import tensorflow as tf

    v1 = tf.compat.v1
    compressors = [_tensorflow_compressor()() for _ in range(OPTIMIZERS)]
    with tf.Graph().as_default(), v1.Session() as session:
        variables = [
            [v1.get_variable(f"{n}_{i}", initializer=np.zeros(s, np.float32)) for i, s in enumerate(SHAPES)]
            for n in range(OPTIMIZERS)
        ]
        places = [[v1.placeholder(tf.float32, s) for s in SHAPES] for _ in range(OPTIMIZERS)]
        steps = []
        for number, mine in enumerate(variables):
            optimizer = hvd.DistributedOptimizer(
                v1.train.GradientDescentOptimizer(1.0), compression=compressors[number], name=f"v1_{number}"
            )
            if number == 1:
                optimizer.register_local_var(mine[LOCAL])
            loss = tf.add_n([tf.reduce_sum(v * g) for v, g in zip(mine, places[number], strict=True)])
            steps.append(optimizer.minimize(loss, var_list=mine))
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        for step in range(STEPS):
            for number in range(OPTIMIZERS):
                given = {
                    place: gradient(number, step, hvd.rank(), i) for i, place in enumerate(places[number])
                }
                session.run(steps[number], given)
        yield session.run(variables)
        yield [session.run(c.state.variables()) for c in compressors]


def train(driver: str, mode: str) -> tuple[list[list[Array]], list[Tensors]]:
    """Of every optimizer, after the last step: parameters, and what was not sent, by key."""
    if mode == "keras":
        weights, rests = _train_keras_on_torch()
    elif mode == "v1":
        weights, rests = _train_v1()
    else:
        trains = {"torch": _train_torch, "mxnet": _train_mxnet, "tensorflow": _train_tensorflow}
        weights, rests = trains[driver](mode)
    return weights, rests


# What is refused, and what is not lost --------------------------------------------


def _simple(driver: str) -> tuple[Any, type[KeyedCompressor], Any, Any]:
    """The framework's module, a compressor of its tensors, a maker of tensors and one of arrays."""
    if driver == "torch":
        import polyhvd.torch as torch_hvd
        import torch

        return torch_hvd, _torch_compressor(), torch.from_numpy, lambda t: t.numpy()
    if driver == "tensorflow":
        import polyhvd.tensorflow as tf_hvd
        import tensorflow as tf

        return tf_hvd, _tensorflow_compressor(), tf.constant, lambda t: t.numpy()
    import polyhvd.numpy as numpy_hvd

    class OfNumpy(LargestOnly):
        zeros = staticmethod(np.zeros_like)

        @staticmethod
        def largest(tensor: Any) -> Any:
            return np.where(np.abs(tensor) >= np.abs(tensor).max(), tensor, np.zeros_like(tensor))

    return numpy_hvd, OfNumpy, np.asarray, np.asarray


def _refusal(call: Callable[[], Any]) -> str:
    """The kind of error that a call raises, and what it says."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def verbs(driver: str) -> list[Array]:
    """What allreduce() and grouped_allreduce() make of two tensors in three calls; and a few refusals."""
    hvd, kind, tensor, array = _simple(driver)
    compressor = kind()
    found: list[Array] = []
    for step in range(3):
        mine = [tensor(gradient(0, step, hvd.rank(), position)) for position in range(2)]
        found.append(array(hvd.allreduce(mine[0], op=hvd.Sum, name="one", compression=compressor)))
        both = hvd.grouped_allreduce(mine, op=hvd.Sum, name="two", compression=compressor)
        found += map(array, both)
    assert sorted(compressor.state_dict()) == ["one", "two.0", "two.1"]
    for arguments, text in (
        ({"compression": compressor}, "keeps state by the operation's name; pass name="),
        ({"compression": kind, "name": "x"}, "its state would be lost after the call; pass an instance"),
    ):
        said = _refusal(functools.partial(hvd.allreduce, mine[0], **arguments))
        assert said.startswith("InvalidArgumentError"), said
        assert text in said
    return found


def verbs_by_hand(ranks: int) -> list[Array]:
    """The same."""
    rests = [[np.zeros(SHAPES[i]) for i in (0, 0, 1)] for _ in range(ranks)]
    found = []
    for step in range(3):
        for which, position in enumerate((0, 0, 1)):
            total = np.zeros(SHAPES[position])
            for rank in range(ranks):
                wanted = gradient(0, step, rank, position) + rests[rank][which]
                sent = np.where(np.abs(wanted) >= np.abs(wanted).max(), wanted, 0)
                rests[rank][which] = wanted - sent
                total += sent
            found.append(total)
    return found


def _make(
    driver: str, compression: Any = None, dtype: str = "float32", **options: Any
) -> tuple[Callable[[Array], Array], Any]:
    """A function that takes a step of one parameter of [4], by a gradient, and the optimizer."""
    options["compression"] = compression
    if driver == "torch":
        import polyhvd.torch as hvd
        import torch

        weights = torch.zeros(4, dtype=getattr(torch, dtype), requires_grad=True)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weights], 1.0), **options)

        def torch_step(given: Array) -> Array:
            optimizer.zero_grad()
            (weights * torch.from_numpy(given)).sum().backward()
            optimizer.step()
            return weights.detach().numpy().copy()

        return torch_step, optimizer
    if driver == "mxnet":
        import polyhvd.mxnet as mxnet_hvd  # isort: skip
        import mxnet as mx

        parameter = mx.gluon.Parameter("w", shape=(4,), init="zeros", dtype=dtype)
        parameter.initialize()
        trainer = mxnet_hvd.DistributedTrainer([parameter], "sgd", {"learning_rate": 1.0}, **options)

        def mxnet_step(given: Array) -> Array:
            with mx.autograd.record():
                loss = (parameter.data() * mx.nd.array(given, dtype=dtype)).sum()
            loss.backward()
            trainer.step(1)
            return parameter.data().asnumpy().copy()

        return mxnet_step, trainer
    import keras
    import polyhvd.keras as keras_hvd
    import tensorflow as tf

    variable = tf.Variable(np.zeros(4, dtype))
    wrapped = keras_hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)

    def keras_step(given: Array) -> Array:
        wrapped.apply_gradients([(tf.constant(given), variable)])
        return variable.numpy()

    return keras_step, wrapped


def _compressor_for(driver: str) -> type[LargestOnly]:
    if driver == "mxnet":
        return _mxnet_compressor()
    return _torch_compressor() if driver == "torch" else _tensorflow_compressor()


def an_instance_serves_one_optimizer(driver: str) -> None:
    """A second optimizer is refused it, unless the first has gone; a class serves any number."""
    kind = _compressor_for(driver)
    for step, _ in [_make(driver, kind), _make(driver, kind)]:
        step(np.ones(4, np.float32))
    own = kind()
    first = _make(driver, own)
    said = _refusal(lambda: _make(driver, own))
    assert said.startswith("InvalidArgumentError"), said
    assert "belongs to another optimizer" in said
    del first
    gc.collect()
    _make(driver, own)

    class NeedsArguments(kind):  # type: ignore[misc, valid-type]
        def __init__(self, count: int) -> None:
            super().__init__()

    said = _refusal(lambda: _make(driver, NeedsArguments))
    assert said.startswith("InvalidArgumentError"), said
    assert "pass an instance instead of the class" in said


def state_is_saved_and_forgotten(driver: str) -> tuple[Array, Array, Array]:
    """Parameters after going on in a new optimizer from saved state; without it; and after reset()."""
    kind = _compressor_for(driver)
    first, second = np.float32([8, 4, 2, 1]), np.float32([1, 1, 8, 1])
    own = kind()
    step, _ = _make(driver, own)
    step(first)
    saved = {key: np.array(_array(value)) for key, value in own.state_dict().items()}
    (key,) = saved
    assert np.array_equal(saved[key], [0, 4, 2, 1]), saved
    restored = kind()
    restored.load_state_dict(own.state_dict())
    going_on, other = _make(driver, restored)
    if driver == "torch":  # whose names have the number of the optimizer
        (held,) = restored.state_dict().values()
        restored.load_state_dict({f"DistributedOptimizer.{other._gradients.number}.0": held})
    with_state = going_on(second)
    fresh, _ = _make(driver, kind)
    without = fresh(second)
    own.reset()
    after_reset = step(second)
    return with_state, without, after_reset


def _array(tensor: Any) -> Array:
    return tensor.asnumpy() if hasattr(tensor, "asnumpy") else np.asarray(tensor)


class InPlace:
    """A compressor without state that returns what it was given."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor itself."""
        return tensor, 3.0

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Three times as much."""
        return tensor * ctx


def what_is_returned_unchanged_is_restored(driver: str) -> Array:
    """Parameters after a step by ones."""
    step, _ = _make(driver, InPlace)
    return step(np.ones(4, np.float32))


def one_that_fails(driver: str) -> tuple[str, Array]:
    """What a step raises where the compressor fails on every rank once; parameters after the next step."""

    class Failing(_compressor_for(driver)):  # type: ignore[misc]
        calls = 0

        def compress(self, tensor: Any, key: str) -> tuple[Any, Any]:
            type(self).calls += 1
            if self.calls == 1:
                raise ArithmeticError("no room")
            return super().compress(tensor, key)

    step, optimizer = _make(driver, Failing)
    said = _refusal(lambda: step(np.float32([8, 1, 1, 1])))
    if driver == "torch":
        optimizer.synchronize()
    return said, step(np.float32([4, 1, 1, 1]))


# What no compressor is needed for ---------------------------------------------------


def outside(driver: str) -> tuple[int, Array]:
    """This rank, and its parameters after a step in an optimizer of ranks 0 and 1."""
    import polyhvd
    from polyhvd.runtime import current

    members = polyhvd.add_process_set([0, 1])
    try:
        rank = current.world().placement.rank
        step, _ = _make(driver, process_set=members)
        return rank, step(np.full(4, 2.0**rank, np.float32))
    finally:
        polyhvd.remove_process_set(members)


def halves(driver: str) -> Array:
    """Parameters of float16 after a step by gradients whose sum would overflow, but for the predivision."""
    step, _ = _make(driver, dtype="float16", gradient_predivide_factor=4.0)
    return step(np.full(4, 40000.0, np.float16))
