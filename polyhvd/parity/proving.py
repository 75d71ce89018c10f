"""Proof that two models compute the same with the same weights, and the layer where they do not."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polyhvd.errors import InvalidArgumentError
from polyhvd.parity.comparing import array_of
from polyhvd.parity.models import framework_of, reader_of
from polyhvd.parity.recording import first_of, layers_of
from polyhvd.parity.traces import common_input
from polyhvd.training.mapping import Weight

__all__ = ["Finding", "Ran", "can_run", "candidates", "finding", "given_arrays", "ran"]

Array = np.ndarray[Any, Any]

#: By which fraction of their norms outputs of deep models may differ: in float32, and in half types.
_LIMIT, _LIMIT_OF_HALVES = 1e-3, 5e-2
_HALVES = ("float16", "bfloat16")


@dataclass(frozen=True)
class Ran:
    """The outputs of a model for inputs. Can be pickled.

    Args:
        outputs: in the order of the model.
        given: what each layer was given, in common form, by the name of its first weight.
        layers: these names, in the order of the layers.
        has_halves: whether weights are of a half type.
        framework: of the model.
    """

    outputs: list[Array] = field(default_factory=list)
    given: dict[str, Array] = field(default_factory=dict)
    layers: list[str] = field(default_factory=list)
    has_halves: bool = False
    framework: str = ""


@dataclass(frozen=True)
class Finding:
    """Why two models differ.

    Args:
        text: what differs, in a sentence.
        is_mapping: whether weights are in another order than the other model's.
    """

    text: str
    is_mapping: bool


def can_run(model: Any) -> bool:
    """Return whether a value is a model that can be run, not a dict of its weights."""
    if framework_of(model) is None or isinstance(model, (list, tuple, Mapping)):
        return False
    return hasattr(reader_of(model), "outputs_of")


def given_arrays(inputs: Any) -> list[Array]:
    """The inputs that a caller has passed.

    Raises:
        InvalidArgumentError: they are not arrays.
    """
    arrays = [
        np.ascontiguousarray(each) for each in (inputs if isinstance(inputs, (list, tuple)) else [inputs])
    ]
    if not arrays or any(array.dtype.kind not in "fiubV" or not array.ndim for array in arrays):
        raise InvalidArgumentError(
            "parity.load: check: expected an array of NumPy that the models take, a list of them, False or "
            f"None, found {type(inputs).__name__}"
        )
    return arrays


def candidates(model: Any) -> list[list[Array]]:
    """Random inputs of a model, in the forms that others may take; none: its input shapes are not known.

    Images have channels first in others. Whether sequences have, their first layer decides.
    """
    framework = reader_of(model)
    made = framework.example_inputs(model) if hasattr(framework, "example_inputs") else None
    if made is None or any(array.ndim > 2 and len({*array.shape[1:]}) == 1 for array in made):
        return []
    moved = [np.ascontiguousarray(np.moveaxis(array, -1, 1)) if array.ndim > 2 else array for array in made]
    if all(array.ndim <= 2 for array in made):
        return [made]
    return [moved, made] if any(array.ndim > 3 for array in made) else [made, moved]


def ran(model: Any, weights: Sequence[Weight], inputs: Sequence[Array]) -> Ran:
    """Run a model, not as in training.

    Args:
        model: that is run once.
        weights: of it.
        inputs: images with channels first.
    """
    framework: Any = reader_of(model)
    given: dict[str, Array] = {}
    layers = [weight for weight in layers_of(weights) if weight.role not in ("input kernel", "state kernel")]
    with contextlib.ExitStack() as hooks:
        if hasattr(framework, "run_as_written"):
            hooks.callback(framework.run_as_written(model))
        for weight in layers:

            def record(tensor: Any, weight: Weight = weight) -> None:
                tensor = first_of(tensor)
                if tensor is not None and weight.name not in given:
                    given[weight.name] = common_input(array_of(tensor)[1], weight)

            hooks.callback(framework.on_input(weight.layer, record, trained=False))
        made, is_last = framework.outputs_of(model, inputs)
    outputs = [
        np.moveaxis(each, -1, 1) if is_last and each.ndim > 2 else each
        for each in (made if isinstance(made, list) else [made])
    ]
    halves = any(weight.dtype in _HALVES for weight in weights)
    return Ran(outputs, given, [weight.name for weight in layers], halves, framework_of(model) or "")


def finding(mine: Ran, other: Ran, pairs: Mapping[str, str]) -> Finding | None:
    """Return where a model differs from the one whose weights it has; None: their outputs agree.

    Args:
        mine: of the model.
        other: of the one that the weights are from.
        pairs: for weights of the first, the names of those in the second.
    """
    limit = _LIMIT_OF_HALVES if mine.has_halves or other.has_halves else _LIMIT
    if len(mine.outputs) != len(other.outputs):
        counts = f"{len(mine.outputs)} and {len(other.outputs)}"
        return Finding(f"the models return {counts} outputs for the same inputs", False)
    parts = [_outputs_apart(a, b) for a, b in zip(mine.outputs, other.outputs, strict=True)]
    apart = float(np.max(parts, initial=0.0))
    if apart <= limit:
        return None
    if np.isnan(apart):
        return Finding("the models return NaNs or infinities for the same inputs", False)
    before = ""
    named = [(name, pairs[name]) for name in mine.layers if pairs.get(name) in other.given]
    for name, theirs in named:
        here, there = mine.given.get(name), other.given[theirs]
        if here is not None and _is_reordered(here, there, limit):
            layer = before if here.ndim > 2 and before else _pair(name, theirs)
            return Finding(
                f"the mapping is wrong for layer {layer}: on the same inputs, layer {_pair(name, theirs)} "
                f"is given the same numbers as in {other.framework}, in another order",
                True,
            )
        before = _pair(name, theirs)
    if named and any(_is_reordered(a, b, limit) for a, b in zip(mine.outputs, other.outputs, strict=True)):
        return Finding(
            f"the mapping is wrong for layer {before}: the outputs are the same numbers as in "
            f"{other.framework}, in another order",
            True,
        )
    differs = [
        (name, theirs)
        for name, theirs in named
        if name in mine.given and _apart(mine.given[name], other.given[theirs]) > limit
    ]
    where = "after the inputs of the last layer" if not differs else f"before layer {_pair(*differs[0])}"
    return Finding(
        f"outputs on the same inputs differ by {apart:.2g} of their norm; up to {limit:.2g} may be rounding. "
        f"With the same weights, the models compute something else {where}; compare epsilons, padding, "
        "activations and the order of layers",
        False,
    )


def _pair(name: str, theirs: str) -> str:
    return f"{name!r} / {theirs!r}"


def _apart(one: Array, other: Array) -> float:
    """The norm of the difference over that of the first; infinity: their shapes differ."""
    if one.shape != other.shape:
        return np.inf
    wide = one.astype(np.float64), other.astype(np.float64)
    norm = float(np.linalg.norm(wide[0]))
    difference = float(np.linalg.norm(wide[0] - wide[1]))
    return difference / norm if norm else difference


def _outputs_apart(one: Array, other: Array) -> float:
    """:func:`_apart`; images may have their channels last."""
    forms = [[each, np.moveaxis(each, -1, 1)] if each.ndim > 2 else [each] for each in (one, other)]
    return float(np.min([_apart(a, b) for a in forms[0] for b in forms[1]]))


def _is_reordered(one: Array, other: Array, limit: float) -> bool:
    """Return whether samples have the same numbers in another order."""
    if not one.ndim or one.size != other.size or len(one) != len(other) or _apart(one, other) <= limit:
        return False
    rows = [np.sort(each.astype(np.float64).reshape(len(each), -1), axis=1) for each in (one, other)]
    return _apart(*rows) <= limit
