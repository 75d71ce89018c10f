"""Models of Gluon, for jobs and comparisons with other frameworks: their weights, by layer."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.base import _LIB, check_call
from mxnet.gluon import Block, HybridBlock, Parameter, Trainer, nn
from mxnet.gluon.nn.conv_layers import _Conv
from mxnet.ndarray import NDArray

from polyhvd import _core
from polyhvd.errors import InvalidArgumentError
from polyhvd.training.interception import Stepping, intercept
from polyhvd.training.layouts import Layout
from polyhvd.training.mapping import Weight

__all__ = [
    "batch_norm_of",
    "check_optimizer",
    "kept_of",
    "load_file",
    "on_input",
    "on_output",
    "on_step",
    "outputs_of",
    "rate_of",
    "run_as_written",
    "save_file",
    "states_of",
    "to_numpy",
    "view_of",
    "weights_of",
]

_ROLES = {
    "weight": "kernel",
    "bias": "bias",
    "gamma": "scale",
    "beta": "offset",
    "running_mean": "mean",
    "running_var": "variance",
    "i2h_weight": "input kernel",
    "h2h_weight": "state kernel",
    "i2h_bias": "input bias",
    "h2h_bias": "state bias",
}


def weights_of(model: Any) -> list[Weight]:
    """The weights of a block, layer by layer in the order in which they were made; or a list of parameters.

    Args:
        model: a ``gluon.Block``; or parameters in an order that is the same on every rank; or arrays by name,
            as ``mx.nd.load()`` returns them.

    Raises:
        InvalidArgumentError: a parameter is not initialized, or there are none.
    """
    if isinstance(model, Mapping) and any(isinstance(value, NDArray) for value in model.values()):
        return [_stored(name, array) for name, array in model.items()]
    found: list[Weight] = []
    seen: set[int] = set()
    for block, key, parameter in _parameters(model):
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        if parameter._data is None:
            raise InvalidArgumentError(
                f"{parameter.name} has no values yet; initialize() the model and run it once before its "
                "mapping"
            )
        found.append(_weight(block, key, parameter))
    if not found:
        raise InvalidArgumentError(f"{type(model).__name__} has no weights; pass the model that is trained")
    return found


def to_numpy(tensor: Any) -> Any:
    """The values of an array, when they are there; of a row_sparse one with all rows."""
    values = tensor.asnumpy()
    if values.dtype.names:  # as MXNet spells bfloat16
        import ml_dtypes

        return values.view(ml_dtypes.bfloat16)
    return values


#: What the core reads, by MXNet's number of it.
_DTYPES = {
    0: "float32",
    1: "float64",
    2: "float16",
    3: "uint8",
    4: "int32",
    5: "int8",
    6: "int64",
    12: "bfloat16",
}
_DENSE, _CPU = 0, 1


def view_of(source: Any) -> _core.TensorRef | None:
    """Return a view of an array, or of the first array of a parameter, when its values are computed.

    Args:
        source: an array or a parameter.

    Returns:
        a view for the core, which keeps the array alive; None: it is not on the CPU, or not dense.

    Raises:
        HorovodInternalError: a collective that writes to it has failed.
    """
    array = source
    if isinstance(source, Parameter):
        array = source._data[0] if source._data else None
    if not isinstance(array, NDArray):
        return None
    handle, first, second = array.handle, ctypes.c_int(), ctypes.c_int()
    check_call(_LIB.MXNDArrayGetStorageType(handle, ctypes.byref(first)))
    if first.value != _DENSE:
        return None
    check_call(_LIB.MXNDArrayGetContext(handle, ctypes.byref(first), ctypes.byref(second)))
    check_call(_LIB.MXNDArrayGetDType(handle, ctypes.byref(second)))
    dtype = _DTYPES.get(second.value)
    if first.value != _CPU or dtype is None:
        return None
    array.wait_to_read()
    data = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(handle, ctypes.byref(data)))
    return _core.TensorRef(data.value or 0, array.shape, dtype, array)


def _parameters(model: Any) -> Iterator[tuple[Block | None, str, Parameter]]:
    if not isinstance(model, Block):
        values = model.values() if hasattr(model, "values") else model
        yield from ((None, "", parameter) for parameter in values)
        return
    for key, parameter in model._reg_params.items():
        # What Gluon keeps of scale=False and center=False are constants, which other frameworks have not.
        is_one = key == "gamma" and getattr(model, "_kwargs", {}).get("fix_gamma")
        if not is_one and not (key == "beta" and _is_zero(model, parameter)):
            yield model, key, parameter
    for child in model._children.values():
        yield from _parameters(child() if callable(child) and not isinstance(child, Block) else child)


def _is_zero(block: Block, beta: Parameter) -> bool:
    """Return whether a batch normalization with center=False adds nothing."""
    if not isinstance(block, nn.BatchNorm) or beta._differentiable or beta._data is None:
        return False
    return not to_numpy(beta.data(beta.list_ctx()[0])).any()


def _role(block: Block | None, key: str) -> str:
    if isinstance(block, nn.Embedding):
        return "table"
    if key[:1] in "lr" and "_" in key:  # "l0_i2h_weight": of the first layer, from left to right
        key = key.partition("_")[2] if key[1:2].isdigit() else key
    return _ROLES.get(key, "")


def _layout(block: Block | None, role: str, shape: tuple[int, ...]) -> Layout:
    layout = getattr(block, "_kwargs", {}).get("layout", "")
    if role == "kernel" and layout.endswith("C") and len(shape) > 2:  # [units, height, width, inputs]
        return Layout(shape, axes=(0, len(shape) - 1, *range(1, len(shape) - 1)))
    return Layout(shape)


def _stored(name: str, array: NDArray) -> Weight:
    """Return an array of a file as a weight."""

    def write(values: Any) -> None:
        array[:] = mx.nd.array(values, dtype=values.dtype)

    return Weight(
        name=name,
        role="",
        source=array,
        layout=Layout(tuple(array.shape)),
        dtype=str(to_numpy(array).dtype.name),
        trainable=True,
        read=lambda: to_numpy(array),
        write=write,
    )


def _weight(block: Block | None, key: str, parameter: Parameter) -> Weight:
    role = _role(block, key)
    array = parameter.data(parameter.list_ctx()[0])

    def read() -> Any:
        return to_numpy(parameter.data(parameter.list_ctx()[0]))

    def write(values: Any) -> None:
        parameter.set_data(mx.nd.array(values, dtype=values.dtype))

    return Weight(
        name=parameter.name,
        role=role,
        source=parameter,
        layout=_layout(block, role, tuple(array.shape)),
        dtype=str(to_numpy(array).dtype.name),
        trainable=parameter.grad_req != "null",
        read=read,
        write=write,
        layer=block,
        channels_last=_is_channels_last(block),
    )


def _is_channels_last(block: Block | None) -> bool:
    kwargs = getattr(block, "_kwargs", {})
    if not isinstance(block, (nn.BatchNorm, _Conv)):  # whose axis is not a channel: LayerNorm
        return False
    return kwargs.get("layout", "").endswith("C") or kwargs.get("axis", 1) == -1


def _is_trained(layer: Block) -> bool:
    """Return whether a pass is one of training, not of an evaluation between two steps."""
    if autograd.is_recording():
        return True
    own = list(layer._reg_params.values())
    return bool(own) and not isinstance(layer, nn.BatchNorm) and all(each.grad_req == "null" for each in own)


def on_input(layer: Block, listener: Callable[[Any], None], *, trained: bool = True) -> Callable[[], None]:
    """Call ``listener`` with each input of a layer, by default in training; returns a function that ends it.

    A block that is hybridized calls none of those within it: see :func:`run_as_written`.
    """

    def hook(_: Block, given: tuple[Any, ...]) -> None:
        if given and isinstance(given[0], NDArray) and (not trained or _is_trained(layer)):
            listener(given[0])

    return layer.register_forward_pre_hook(hook).detach


def on_output(model: Block, listener: Callable[[Any], None]) -> Callable[[], None]:
    """Call ``listener`` with each output of a model in training; returns a function that ends it."""

    def hook(_: Block, given: tuple[Any, ...], made: Any) -> None:
        first = made[0] if isinstance(made, (list, tuple)) and made else made
        if isinstance(first, NDArray) and autograd.is_recording():
            listener(first)

    return model.register_forward_hook(hook).detach


def run_as_written(model: Block) -> Callable[[], None]:
    """Have hybridized blocks call those within them; returns what ends that: their graphs are kept."""
    active: list[HybridBlock] = []

    def find(block: Block) -> None:
        if isinstance(block, HybridBlock) and block._active:
            active.append(block)

    model.apply(find)
    for block in active:
        block._active = False

    def end() -> None:
        for block in active:
            block._active = True

    return end


def check_optimizer(optimizer: Any, weights: Sequence[Weight]) -> None:
    """Check that a trainer trains a model.

    Raises:
        InvalidArgumentError: it is not a Gluon Trainer, or has none of the model's weights.
    """
    if not isinstance(optimizer, Trainer):
        raise InvalidArgumentError(
            "parity.watch: optimizer: expected a Trainer of Gluon, as the model is, or None, found "
            f"{type(optimizer).__name__}"
        )
    known = {id(parameter) for parameter in optimizer._params}
    if not any(id(weight.source) in known for weight in weights):
        raise InvalidArgumentError(
            f"parity.watch: optimizer: this {type(optimizer).__name__} has none of the model's weights; pass "
            "the one that was made of its collect_params()"
        )


def on_step(optimizer: Any, around: Stepping) -> Callable[[], None]:
    """Have each step within ``around``, which is given what returns the gradient of a source.

    Gluon divides gradients by the batch size in the step; they are returned with that factor. A
    program that calls ``update()`` itself has averaged them in ``allreduce_grads()``: of each, a copy from
    before that counts.
    """
    own: dict[int, NDArray] = {}

    def reduce(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for parameter in optimizer._params:
            if parameter.grad_req != "null":
                own[id(parameter)] = parameter.list_grad()[0].copy()
        return original(*args, **kwargs)

    def step(original: Callable[..., Any], batch_size: int, *args: Any, **kwargs: Any) -> Any:
        factor = optimizer._scale / batch_size

        def gradient_of(source: Parameter) -> tuple[NDArray, float]:
            found = own.get(id(source))
            return source.list_grad()[0] if found is None else found, factor

        with around(gradient_of):
            made = original(batch_size, *args, **kwargs)
        own.clear()
        return made

    ends = [
        intercept(optimizer, "allreduce_grads", reduce),
        intercept(optimizer, "step", step),
        intercept(optimizer, "update", step),
    ]

    def end() -> None:
        for each in ends:
            each()

    return end


def rate_of(optimizer: Any) -> float:
    """The learning rate of a trainer."""
    return float(optimizer.learning_rate)


def kept_of(optimizer: Any, source: Parameter) -> dict[str, tuple[NDArray, float]]:
    """The state that a trainer keeps for a parameter: "momentum" and "second moment", each with a factor.

    The momentum of SGD is returned with its sign changed: Gluon adds it to the weight.
    """
    place = optimizer._param2idx.get(source.name)
    state = optimizer._updaters[0].states.get(place) if optimizer._updaters else None
    name = type(optimizer.optimizer).__name__.lower()
    if state is not None and optimizer.optimizer.multi_precision and np.dtype(source.dtype) == np.float16:
        state = state[0 if name in ("sgd", "nag") else 1]  # the other one is the weight in float32
    if state is None:
        return {}
    arrays = [item for item in (state if isinstance(state, (list, tuple)) else [state]) if item is not None]
    if name == "nag" and optimizer.optimizer.wd:
        return {}  # it decays by the weight after the step, which has its effect only in the next one
    if name in ("sgd", "nag"):
        return {"momentum": (arrays[0], -1.0)}
    kinds = {
        "adam": ("momentum", "second moment"),
        "rmsprop": ("second moment",),
        "adagrad": ("second moment",),
    }
    return {kind: (array, 1.0) for kind, array in zip(kinds.get(name, ()), arrays, strict=False)}


def states_of(optimizer: Any, source: Parameter) -> dict[str, Any]:
    """The result of :func:`kept_of` as arrays, multiplied by their factors."""
    kept = kept_of(optimizer, source)
    return {
        kind: -to_numpy(array) if factor < 0 else to_numpy(array) for kind, (array, factor) in kept.items()
    }


def batch_norm_of(layer: Any) -> tuple[float, bool] | None:
    """How a block updates its running statistics in a step; its variance is the batch's, uncorrected."""
    if not isinstance(layer, nn.BatchNorm):
        return None
    return float(layer._kwargs["momentum"]), False


def load_file(model: Block, path: str) -> None:
    """Give a model the weights of a file, which has to have all of them and no other.

    Args:
        model: to be overwritten.
        path: as ``save_parameters`` or ``export`` have written it.

    Raises:
        InvalidArgumentError: the weights are not those of the model.
    """
    try:
        if not _load_exported(model, path):
            model.load_parameters(path)
    except (AssertionError, ValueError, mx.base.MXNetError) as error:
        raise InvalidArgumentError(f"{path}: {str(error).strip().splitlines()[-1]}") from None


def _load_exported(model: Block, path: str) -> bool:
    """Give a model what ``export`` has written, by the names that its parameters have in all of a program.

    These begin with a name of the model that counts the models of a program: it may be another one here.
    """
    stored = mx.nd.load(path)
    if not isinstance(stored, Mapping) or not all(name[:4] in ("arg:", "aux:") for name in stored):
        return False
    found = _without_prefix({name[4:]: array for name, array in stored.items()})
    wanted = _without_prefix(dict(model.collect_params().items()))
    unlike = sorted(found.keys() ^ wanted.keys())
    if unlike:
        where = "the file" if unlike[0] in found else "the model"
        raise ValueError(
            f"only {where} has {unlike[0]!r}; make the model as in the program that has written it"
        )
    for name, parameter in wanted.items():
        parameter.set_data(found[name])
    return True


def _without_prefix(named: Mapping[str, Any]) -> dict[str, Any]:
    """By names without the beginning that all of them have, up to an underscore."""
    words = [name.split("_") for name in named]
    count = 0
    while len({tuple(each[: count + 1]) for each in words}) == 1 and all(
        len(each) > count + 1 for each in words
    ):
        count += 1
    return dict(zip(("_".join(each[count:]) for each in words), named.values(), strict=True))


def save_file(model: Block, path: str) -> None:
    """Write the parameters of a model, as ``load_parameters`` reads them.

    Args:
        model: whose weights are written.
        path: of the file.
    """
    model.save_parameters(path)


def outputs_of(model: Block, inputs: Sequence[Any]) -> tuple[Any, bool]:
    """Apply a model to arrays of NumPy, not in training mode; return an array, or a list of them.

    Args:
        model: that is run once. What is not initialized gets random values.
        inputs: as it takes them, one after the other.

    Returns:
        the outputs, and whether images in them have their channels last.
    """
    if any(parameter._data is None for _, _, parameter in _parameters(model)):
        with warnings.catch_warnings():  # of those that have values
            warnings.simplefilter("ignore")
            model.initialize()
    made = model(*(mx.nd.array(each, dtype=each.dtype) for each in inputs))
    return [to_numpy(each) for each in made] if isinstance(made, (list, tuple)) else to_numpy(made), False
