"""The weights of models of Keras 3 and Keras 2, on any backend, with how they lie. Imports no Keras."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from polyhvd.errors import InvalidArgumentError, UnsupportedError
from polyhvd.training.drift import Hyperparameters
from polyhvd.training.interception import Stepping, intercept
from polyhvd.training.keras.layouts import Rows, built_shape, layout_of, places_of, unfollowed
from polyhvd.training.keras.orders import Order, Orders, Shape, is_a
from polyhvd.training.layouts import Layout
from polyhvd.training.mapping import Weight

__all__ = [
    "DRIFT_REMEDY",
    "batch_norm_of",
    "check_model",
    "check_optimizer",
    "example_inputs",
    "hyperparameters_of",
    "on_evaluation",
    "on_input",
    "on_output",
    "on_step",
    "outputs_of",
    "path_of",
    "rate_of",
    "states_of",
    "to_numpy",
    "values_of",
    "weights_of",
]

#: What to do where ranks have other weights; see polyhvd/training/drift.py.
DRIFT_REMEDY = (
    "pass hvd.callbacks.BroadcastGlobalVariablesCallback(0) to fit(), or call "
    "hvd.broadcast_variables(model.variables, root_rank=0) before the second step; "
    "register_local_var(variable) of the optimizer excludes variables that each rank keeps for itself"
)

#: What the last part of a variable's name means in a layer.
_ROLES = {
    "kernel": "kernel",
    "depthwise_kernel": "kernel",
    "pointwise_kernel": "kernel",
    "recurrent_kernel": "state kernel",
    "bias": "bias",
    "gamma": "scale",
    "beta": "offset",
    "moving_mean": "mean",
    "moving_variance": "variance",
    "embeddings": "table",
}

#: Attributes of optimizers that are plain numbers, and what reports call them.
_NUMBERS = {
    "momentum": "momentum",
    "weight_decay": "weight decay",
    "rho": "alpha",
    "beta_1": "beta 1",
    "beta_2": "beta 2",
    "epsilon": "epsilon",
}


def weights_of(model: Any) -> list[Weight]:
    """The weights of a model, layer by layer in the order in which they were made.

    Args:
        model: of Keras, built, or a layer.

    Raises:
        InvalidArgumentError: it has no weights, as it is not built.
    """
    found: list[Weight] = []
    seen: set[int] = set()
    layers = list(_layers(model))
    orders, rows = Orders(layers), Rows()
    for layer in layers:
        rows.see(layer)
        units = orders.units_of(layer)
        for variable in _own_variables(layer):
            if id(variable) in seen:
                continue
            seen.add(id(variable))
            order = orders.of(layer)
            if order is None:
                order = rows.of(variable.shape[0] if len(variable.shape) else 0)
            if is_a(layer, *_CELLS):
                found += _of_cell(layer, variable, order)
            else:
                found.append(_weight(layer, variable, order, units))
        rows.leave(layer)
    if not found:
        raise InvalidArgumentError(
            f"{type(model).__name__} has no weights yet; build() it, or call it once, before its mapping"
        )
    return found


def _layers(model: Any) -> Iterator[Any]:
    """A layer and all within it; a layer that has weights itself comes before its inner layers."""
    if hasattr(model, "_flatten_modules"):  # Keras 2
        yield from model._flatten_layers(include_self=True, recursive=True)
        return
    # Keras 3 has this method, too, but goes through the layers of a layer from the last to the first.
    waiting, seen = [model], set[int]()
    while waiting:
        layer = waiting.pop()
        if id(layer) not in seen:
            seen.add(id(layer))
            yield layer
            waiting += reversed(_as_called(layer))


def _as_called(layer: Any) -> list[Any]:
    """The layers of a layer; those of a graph in the order in which the program has called them.

    Keras has the layers of a graph by their depth, so that those of several branches are mixed.
    """
    calls: dict[int, int] = {}
    for nodes in getattr(getattr(layer, "_functional", None) or layer, "_nodes_by_depth", {}).values():
        for node in nodes:
            name = str(getattr(node.output_tensors[0], "name", "")) if node.output_tensors else ""
            base, _, number = name.rpartition("_")
            if not node.is_input and base == "keras_tensor" and number.isdigit():
                known = calls.get(id(node.operation), int(number))
                calls[id(node.operation)] = min(known, int(number))
    found: list[Any] = layer._layers
    return sorted(found, key=lambda each: calls.get(id(each), -1))


def _own_variables(layer: Any) -> list[Any]:
    for trained, other in (
        ("_trainable_variables", "_non_trainable_variables"),  # Keras 3
        ("_trainable_weights", "_non_trainable_weights"),
    ):
        if hasattr(layer, trained):
            return [*getattr(layer, trained), *getattr(layer, other)]
    return []


#: Order of gates in Keras by that of PyTorch and Gluon: update, reset, new there; reset, update, new here.
_CELLS = {"LSTMCell": None, "GRUCell": (1, 0, 2), "SimpleRNNCell": None}


def _of_cell(cell: Any, variable: Any, order: Order) -> list[Weight]:
    """A variable of a recurrent cell, as the weights that other frameworks have: they have two biases."""
    weight = _weight(cell, variable, order)
    gates = next(order for name, order in _CELLS.items() if is_a(cell, name))
    shape = tuple(variable.shape)
    if weight.role != "bias":
        if weight.role == "state kernel":
            return [replace(weight, layout=Layout(shape, axes=(1, 0), blocks=gates))]
        layout = Layout(shape, axes=(1, 0), blocks=gates, order=places_of(order, shape[0]))
        return [replace(weight, role="input kernel", layout=layout)]
    if len(shape) == 2:  # the two of a GRU

        def part(row: int) -> Weight:
            def write(array: Any) -> None:
                values = to_numpy(variable)
                values[row] = array
                variable.assign(values)

            role = ("input bias", "state bias")[row]
            layout = Layout(shape[1:], blocks=gates)
            return replace(
                weight,
                role=role,
                layout=layout,
                read=lambda: to_numpy(variable)[row],
                write=write,
                is_whole=False,
            )

        return [part(0), part(1)]
    if is_a(cell, "GRUCell"):
        raise UnsupportedError(
            f"{weight.name}: a GRU with reset_after=False computes something else than those of PyTorch and "
            "Gluon; make it with reset_after=True"
        )
    # The cell adds one bias where others add two: their sum.
    state = replace(
        weight,
        role="state bias",
        read=lambda: np.zeros(shape, weight.dtype),
        write=lambda array: variable.assign(to_numpy(variable) + array),
        is_whole=False,
    )
    return [replace(weight, role="input bias", is_whole=False), state]


def _weight(layer: Any, variable: Any, order: Order, units: Shape | None = None) -> Weight:
    path = path_of(variable)
    last = path.rpartition("/")[2].partition(":")[0]
    dtype = variable.dtype if isinstance(variable.dtype, str) else variable.dtype.name
    role, shape = _ROLES.get(last, ""), tuple(variable.shape)
    return Weight(
        name=path,
        role=role,
        source=variable,
        layout=layout_of(layer, last, role, shape, order, units),
        dtype=dtype,
        trainable=bool(variable.trainable),
        read=lambda: to_numpy(variable),
        write=lambda array: _write(variable, array),
        layer=layer,
        channels_last=_is_channels_last(layer),
        rows=order.parts,
        unfollowed=unfollowed(layer, role, shape, order),
    )


def _is_channels_last(layer: Any) -> bool:
    if is_a(layer, "BatchNormalization"):
        return bool(layer.axis in (-1, [-1]) or layer.axis != 1)
    return getattr(layer, "data_format", None) == "channels_last"


def on_input(layer: Any, listener: Callable[[Any], None], *, trained: bool = True) -> Callable[[], None]:
    """Call ``listener`` with each input of a layer, in any pass; returns a function that ends it."""

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        listener(args[0] if args else next(iter(kwargs.values()), None))
        return original(*args, **kwargs)

    return intercept(layer, "call", call)


def on_output(model: Any, listener: Callable[[Any], None]) -> Callable[[], None]:
    """Call ``listener`` with each output of a model; returns a function that ends it."""

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        listener(made)
        return made

    return intercept(model, "call", call)


def example_inputs(model: Any) -> list[Any] | None:
    """Random arrays of NumPy that a model takes, as it takes them; None: its shapes are not known.

    Args:
        model: of Keras.
    """
    rng = np.random.default_rng(0)
    found: list[Any] = []
    for shape, dtype in _inputs_of(model):
        if None in shape[1:]:
            return None
        is_whole = "int" in dtype or dtype == "bool"
        size = (2, *shape[1:])
        made = rng.integers(0, 2, size) if is_whole else rng.standard_normal(size)
        found.append(made.astype(dtype if is_whole else "float32"))
    return found or None


def _inputs_of(model: Any) -> list[tuple[tuple[Any, ...], str]]:
    """Shapes, of any batch, and dtypes of the inputs of a model, as far as they are known."""
    try:
        tensors = list(model.inputs or ())
    except (AttributeError, TypeError):
        tensors = []
    found = [
        (tuple(tensor.shape), tensor.dtype if isinstance(tensor.dtype, str) else tensor.dtype.name)
        for tensor in tensors
    ]
    if not found and (built := built_shape(model)) is not None:
        found = [((None, *built[1:]), "float32")]
    return found


def outputs_of(model: Any, inputs: Sequence[Any]) -> tuple[Any, bool]:
    """Apply a model to arrays of NumPy, not in training mode; return an array, or a list of them.

    Args:
        model: that is run once.
        inputs: as the other frameworks take them. A model whose images have their channels last gets them so.

    Returns:
        the outputs, and whether images in them have their channels last.
    """
    shapes = [shape for shape, _ in _inputs_of(model)]
    given, last = [], False
    for number, array in enumerate(inputs):
        if array.ndim > 2 and number < len(shapes):
            shape = shapes[number]
            moved = np.moveaxis(array, 1, -1)
            if not _fits(array.shape, shape) and _fits(moved.shape, shape):
                array, last = np.ascontiguousarray(moved), True
        given.append(array)
    made = model(given if len(given) > 1 else given[0], training=False)
    return [to_numpy(each) for each in made] if isinstance(made, (list, tuple)) else to_numpy(made), last


def _fits(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    pairs = zip(shape, expected, strict=False)
    return len(shape) == len(expected) and all(e is None or e == s for s, e in pairs)


def on_evaluation(model: Any, around: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
    """Have what a model does in validation and prediction within ``around``; returns what ends that."""

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        training = kwargs.get("training", args[1] if len(args) > 1 else None)
        with nullcontext() if training is None or training else around():
            return original(*args, **kwargs)

    return intercept(model, "call", call)


def check_optimizer(optimizer: Any, weights: Sequence[Weight]) -> None:
    """Check that an optimizer trains a model. One without weights, since it is not built, is accepted.

    Raises:
        InvalidArgumentError: it is not an optimizer of Keras 3, or has none of the model's weights.
    """
    if not callable(getattr(optimizer, "apply", None)) or not hasattr(optimizer, "_trainable_variables"):
        raise InvalidArgumentError(
            "parity.watch: optimizer: expected one of Keras 3, as the model is, or None, found "
            f"{type(optimizer).__name__}"
        )
    known = {id(variable) for variable in optimizer._trainable_variables}
    if known and not any(id(weight.source) in known for weight in weights):
        raise InvalidArgumentError(
            f"parity.watch: optimizer: this {type(optimizer).__name__} has none of the model's weights; pass "
            "the one that the model was compiled with"
        )


def check_model(model: Any) -> None:
    """Check that the steps of a model run as its code is written, so that tensors in them have values.

    Raises:
        InvalidArgumentError: it is compiled for a graph.
    """
    if not getattr(model, "compiled", getattr(model, "_is_compiled", False)):
        return  # steps are the program's own
    tensorflow = sys.modules.get("tensorflow")
    is_eager = tensorflow is not None and tensorflow.config.functions_run_eagerly()
    if not is_eager and not is_a(model, "TorchTrainer") and not model.run_eagerly:
        raise InvalidArgumentError(
            f"parity.watch: {type(model).__name__} {model.name!r} is compiled for a graph, in which tensors "
            "have no values; compile it with run_eagerly=True"
        )


def on_step(optimizer: Any, around: Stepping) -> Callable[[], None]:
    """Have each step within ``around``, which is given what returns the gradient of a source."""

    def apply(original: Callable[..., Any], grads: Any, trainable_variables: Any = None) -> Any:
        given = list(grads)
        variables = optimizer._trainable_variables if trainable_variables is None else trainable_variables
        by_source = {id(variable): gradient for variable, gradient in zip(variables, given, strict=True)}
        with around(lambda source: by_source.get(id(source))):
            return original(given, trainable_variables)

    return intercept(optimizer, "apply", apply)


def rate_of(optimizer: Any) -> float:
    """The learning rate of an optimizer."""
    return float(to_numpy(optimizer.learning_rate))


#: Where optimizers of Keras 3 keep what, and by which factor it is what docs/parity.md has.
_STATES = {
    "momentums": ("momentum", -1.0),  # of SGD: what is added to the weight
    "_momentums": ("momentum", 1.0),
    "_velocities": ("second moment", 1.0),
    "_accumulators": ("second moment", 1.0),
}


def states_of(optimizer: Any, source: Any) -> dict[str, Any]:
    """The state that an optimizer keeps for a variable, as arrays: "momentum" and "second moment"."""
    trained = getattr(optimizer, "_trainable_variables", [])
    place = next((i for i, variable in enumerate(trained) if variable is source), None)
    found: dict[str, Any] = {}
    for attribute, (kind, factor) in _STATES.items():
        kept = getattr(optimizer, attribute, None)
        if place is not None and isinstance(kept, (list, tuple)) and place < len(kept):
            found[kind] = to_numpy(kept[place]) * np.float32(factor)
    return found


def batch_norm_of(layer: Any) -> tuple[float, bool] | None:
    """How a layer updates its running statistics in a step; its variance is the batch's, uncorrected."""
    if not is_a(layer, "BatchNormalization") or not hasattr(layer, "moving_variance"):
        return None
    return float(layer.momentum), False


def hyperparameters_of(
    optimizer: Any, variables: Sequence[Any], local: Sequence[bool], rate: float | None = None
) -> Hyperparameters:
    """The hyperparameters with which ranks train variables together; empty if they share none.

    Args:
        optimizer: of Keras.
        variables: that it trains.
        local: which of them each rank keeps for itself.
        rate: the learning rate; None: as it is now.
    """
    if all(local):
        return {}
    first = list(local).index(False)
    values = {}
    for attribute, name in _NUMBERS.items():
        value = getattr(optimizer, attribute, None)
        if isinstance(value, (float, int)) and not isinstance(value, bool):
            values[name] = float(value)
    if rate is None:
        with contextlib.suppress(AttributeError, TypeError, ValueError):  # a rate that cannot be read here
            rate = rate_of(optimizer)
    if rate is not None:
        values["learning rate"] = rate
    return {first: (path_of(variables[first]), values)}


def values_of(variables: Sequence[Any], local: Sequence[bool]) -> Iterator[tuple[str, Any] | None]:
    """Name and values of each variable; None in the place of those that each rank keeps for itself."""
    for variable, stays in zip(variables, local, strict=True):
        yield None if stays else (path_of(variable), to_numpy(variable))


def path_of(variable: Any) -> str:
    """The name of a variable, with those of its layers where Keras has them."""
    return str(getattr(variable, "path", variable.name))


def to_numpy(variable: Any) -> Any:
    """A copy of a variable's values."""
    value = variable.numpy() if hasattr(variable, "numpy") else variable
    return np.array(value)


def _write(variable: Any, array: Any) -> None:
    variable.assign(array)
