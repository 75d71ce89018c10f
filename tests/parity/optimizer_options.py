"""The options of the distributed optimizers: the same training with each in every framework, and by hand.

Ranks take their parts of every batch, in one pass or several. The oracle trains all ranks at once in
NumPy and float64: what each gradient is, how they are combined, and what SGD makes of them.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import training
from training import Array, Weights

STEPS = 6
_W1, _B1, _W2, _B2 = range(4)


@dataclass(frozen=True)
class Option:
    """Arguments that all frameworks take, and what they mean."""

    passes: int = 1
    average_passes: bool = False
    sums: bool = False  # over the ranks
    predivide: float = 1.0
    compression: str = "none"
    num_groups: int = 0
    groups: tuple[tuple[int, ...], ...] = ()  # positions of parameters
    local: tuple[int, ...] = ()  # likewise: gradients that stay on their rank
    scale_local: bool = True
    tolerance: float = 2e-5  # what single precision makes of these few steps

    def arguments(self, hvd: Any, parameters: Sequence[Any]) -> dict[str, Any]:
        """Keyword arguments of the optimizer; ``parameters`` in the order of the weights."""
        compressor = Halving if self.compression == "own" else getattr(hvd.Compression, self.compression)
        arguments: dict[str, Any] = {
            "backward_passes_per_step": self.passes,
            "op": hvd.Sum if self.sums else hvd.Average,
            "gradient_predivide_factor": self.predivide,
            "num_groups": self.num_groups,
            "compression": compressor,
            "scale_local_gradients": self.scale_local,
        }
        if self.groups:
            arguments["groups"] = [[parameters[i] for i in group] for group in self.groups]
        return arguments


class Halving:
    """A compressor of a user's, with Horovod's interface."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """What is sent, and what decompress needs."""
        return tensor * 0.5, 2.0

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """What was meant."""
        return tensor * ctx


OPTIONS = {
    "plain": Option(),
    "sum": Option(sums=True),
    "predivide": Option(predivide=2.0),
    "fp16": Option(compression="fp16", tolerance=2e-3),
    "bf16": Option(compression="bf16", tolerance=2e-2),
    "own compressor": Option(compression="own"),
    "num_groups": Option(num_groups=2),
    "groups": Option(groups=((_W1, _B2), (_B1,))),
    "passes": Option(passes=2),
    "average of passes": Option(passes=2, average_passes=True),
    "local": Option(local=(_B2,)),
    "local unscaled": Option(local=(_W1, _B1), scale_local=False),
    "everything": Option(passes=2, predivide=4.0, groups=((_W1, _W2),), local=(_B1,), compression="own"),
}
#: Torch's own accumulation is the sum, and Horovod has no argument for it there.
NOT_IN_TORCH = ("average of passes",)


def parts(step: int, rank: int, ranks: int, passes: int) -> list[tuple[Array, Array]]:
    """What a rank trains on in a step, pass by pass."""
    x, y = training.part(step, rank, ranks)
    return list(zip(np.split(x, passes), np.split(y, passes), strict=True))


# By hand ---------------------------------------------------------------------


def by_hand(option: Option, ranks: int) -> list[Weights]:
    """The weights of every rank after the training."""
    models = [[w.astype(np.float64) for w in training.initial_weights()] for _ in range(ranks)]
    for step in range(STEPS):
        found = []
        for rank, weights in enumerate(models):
            passes = [
                training.gradients_by_hand(weights, x, y) for x, y in parts(step, rank, ranks, option.passes)
            ]
            total = [np.sum(of_one, axis=0) for of_one in zip(*passes, strict=True)]
            found.append([g / option.passes if option.average_passes else g for g in total])
        for position in range(4):
            everybody = [gradients[position] for gradients in found]
            combined = np.sum(everybody, axis=0) / (1 if option.sums else ranks)
            for rank, weights in enumerate(models):
                mine = everybody[rank] / (ranks if option.scale_local else 1)
                gradient = mine if position in option.local else combined
                weights[position] -= training.LEARNING_RATE * gradient
    return models


# In the frameworks -------------------------------------------------------------


def _train_torch(option: Option) -> Weights:
    import polyhvd.torch as hvd
    import torch

    model = training.torch_model()
    parameters = list(model.parameters())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=training.LEARNING_RATE),
        named_parameters=model.named_parameters(),
        **option.arguments(hvd, parameters),
    )
    for position in option.local:
        optimizer.register_local_var(parameters[position])
    for step in range(STEPS):
        optimizer.zero_grad()
        for arrays in parts(step, hvd.rank(), hvd.size(), option.passes):
            x, y = map(torch.from_numpy, arrays)
            torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [p.detach().numpy().T.copy() for p in parameters]


def _train_mxnet(option: Option) -> Weights:
    import polyhvd.mxnet as hvd  # isort: skip
    import mxnet as mx
    from mxnet import autograd, gluon

    net = training.mxnet_model()
    parameters = list(net.collect_params().values())
    trainer = hvd.DistributedTrainer(
        net.collect_params(),
        "sgd",
        {"learning_rate": training.LEARNING_RATE},
        average_aggregated_gradients=option.average_passes,
        **option.arguments(hvd, parameters),
    )
    for position in option.local:
        trainer.register_local_var(parameters[position])
    cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()
    for step in range(STEPS):
        for x, y in parts(step, hvd.rank(), hvd.size(), option.passes):
            with autograd.record():
                loss = cross_entropy(net(mx.nd.array(x)), mx.nd.array(y))
            loss.backward()
            trainer.step(len(x))
    return [p.data().asnumpy().T.copy() for p in parameters]


def _train_tensorflow(option: Option) -> Weights:
    import keras
    import polyhvd.keras as hvd
    import tensorflow as tf

    model = training.keras_model()
    variables = model.trainable_variables
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(training.LEARNING_RATE),
        average_aggregated_gradients=option.average_passes,
        **option.arguments(hvd, variables),
    )
    for position in option.local:
        optimizer.register_local_var(variables[position])
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for step in range(STEPS):
        for x, y in parts(step, hvd.rank(), hvd.size(), option.passes):
            with tf.GradientTape() as tape:
                loss = cross_entropy(y, model(x))
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    return [np.array(w) for w in model.get_weights()]


def train(driver: str, name: str) -> Weights:
    """This rank's weights after the training with an option of OPTIONS."""
    trains = {"torch": _train_torch, "mxnet": _train_mxnet, "tensorflow": _train_tensorflow}
    return trains[driver](OPTIONS[name])


# What is refused ---------------------------------------------------------------

_PASSES, _FACTOR = "backward_passes_per_step", "gradient_predivide_factor"
#: Arguments that no framework takes, and what each says of them.
REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({_PASSES: 0}, f"{_PASSES}=0: expected an integer of 1 or more"),
    ({_PASSES: True}, f"{_PASSES}=True: expected an integer of 1 or more, found bool"),
    ({_PASSES: 2.0}, f"{_PASSES}=2.0: expected an integer of 1 or more, found float"),
    ({_PASSES: 2.5}, f"{_PASSES}=2.5: expected an integer of 1 or more, found float"),
    ({_FACTOR: -1.0}, f"{_FACTOR}=-1.0: expected a positive number, finite"),
    ({_FACTOR: float("inf")}, f"{_FACTOR}=inf: expected a positive number, finite"),
    ({_FACTOR: 2.0, "op": 1}, f"{_FACTOR}=2.0 needs op=Average, and op is Sum"),
    ({_FACTOR: 2.0, "op": 2}, f"{_FACTOR}=2.0 needs op=Average, and op is Adasum"),
    ({"op": 7}, "op=7: expected Average, Sum, Adasum, Min, Max or Product"),
    ({"op": True}, "op=True: expected Average, Sum, Adasum, Min, Max or Product"),
    ({"num_groups": -1}, "num_groups=-1: expected an integer of 0 or more"),
    ({"num_groups": 1.5}, "num_groups=1.5: expected an integer of 0 or more, found float"),
    (
        {"groups": "all"},
        "groups='all': expected an integer of 0 or more, or a list of lists of parameters, found str",
    ),
    ({"groups": ["all"]}, "groups[0]: expected a list of parameters, found str"),
    ({"num_groups": 2, "groups": 2}, "num_groups=2 and groups exclude each other; pass only groups"),
    (
        {"compression": "fp16"},
        "compression='fp16': expected an object with compress() and decompress(), such as "
        "Compression.fp16; it has no compress()",
    ),
    (
        {"process_set": [0]},
        "process_set=[0]: expected a ProcessSet, found list; make one with add_process_set(ranks)",
    ),
)


def _torch_makers() -> dict[str, Callable[..., Any]]:
    import polyhvd.torch as hvd
    import torch

    sgd = torch.optim.SGD([torch.zeros(2, requires_grad=True)], 0.1)
    makers: dict[str, Callable[..., Any]] = {
        "DistributedOptimizer": _with(hvd.DistributedOptimizer, sgd),
    }
    if importlib.util.find_spec("torchmetrics"):
        import polyhvd.lightning

        makers["PolyhvdStrategy"] = _with(polyhvd.lightning.PolyhvdStrategy)
    if importlib.util.find_spec("keras"):
        os.environ["KERAS_BACKEND"] = "torch"  # in a process that has no TensorFlow
        import keras
        import polyhvd.keras as on_torch

        for name in ("DistributedOptimizer", "PartialDistributedOptimizer"):
            makers[f"Keras {name}"] = _with(getattr(on_torch, name), keras.optimizers.SGD())
    return makers


def _mxnet_makers() -> dict[str, Callable[..., Any]]:
    import polyhvd.mxnet as hvd  # isort: skip
    import mxnet as mx

    return {
        "DistributedTrainer": _with(
            hvd.DistributedTrainer, training.mxnet_model().collect_params(), "sgd", {"learning_rate": 0.1}
        ),
        "DistributedOptimizer": _with(hvd.DistributedOptimizer, mx.optimizer.SGD()),
    }


def _tensorflow_makers() -> dict[str, Callable[..., Any]]:
    import keras
    import polyhvd.keras
    import polyhvd.tensorflow as hvd
    import polyhvd.tensorflow.keras
    import tensorflow as tf

    makers: dict[str, Callable[..., Any]] = {}
    for name in ("DistributedOptimizer", "PartialDistributedOptimizer"):
        for module in (hvd, polyhvd.tensorflow.keras, polyhvd.keras):
            makers[f"{module.__name__}.{name}"] = _with(getattr(module, name), keras.optimizers.SGD())
    for name in ("DistributedGradientTape", "PartialDistributedGradientTape"):
        makers[name] = _with(getattr(hvd, name), tf.GradientTape())
    return makers


def _with(make: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    def made(**options: Any) -> Any:
        return make(*arguments, **options)

    made.__signature__ = inspect.signature(make)  # type: ignore[attr-defined]
    return made


def refusals(driver: str) -> list[dict[str, str]]:
    """Of each of REFUSED what everything that takes such arguments says, by its name."""
    from polyhvd.errors import InvalidArgumentError

    makers = {"torch": _torch_makers, "mxnet": _mxnet_makers, "tensorflow": _tensorflow_makers}[driver]()
    own = InvalidArgumentError
    if driver == "mxnet":
        import polyhvd.mxnet.errors

        own = polyhvd.mxnet.errors.InvalidArgumentError
    elif driver == "tensorflow":
        import polyhvd.tensorflow.errors

        own = polyhvd.tensorflow.errors.InvalidArgumentError
    found: list[dict[str, str]] = []
    for arguments, _ in REFUSED:
        said: dict[str, str] = {}
        for name, make in makers.items():
            if not arguments.keys() <= inspect.signature(make).parameters.keys():
                continue
            try:
                made = make(**arguments)
            except Exception as error:
                said[name] = str(error) if type(error) is own else f"{type(error)}: {error}"
            else:
                said[name] = f"made a {type(made).__name__}"
        found.append(said)
    return found
