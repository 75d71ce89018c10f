"""Pairs the weights of two models, with a default for a weight that only one model has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from polyhvd.errors import InvalidArgumentError
from polyhvd.training.mapping import Weight

__all__ = ["Convert", "Given", "Names", "converted", "given_of", "paired"]

Array = np.ndarray[Any, Any]
Names = Mapping[str, str] | Callable[[str], str | None]
Convert = Callable[[dict[str, Array]], Mapping[str, Array]]

#: What may follow where a normalization has no scale or no offset: it is 1, or 0, there.
_BEHIND = {"scale": ("offset", "mean"), "offset": ("mean",)}
_CONSTANTS = {"scale": 1.0, "offset": 0.0}


@dataclass(frozen=True)
class Given:
    """A weight to be loaded, in common form. Can be pickled.

    Args:
        name: in its model; empty: a constant, as a normalization has no such weight.
        role: as of :class:`Weight`.
        array: its values.
        per_group: whether it is of Gluon's GroupNorm, which has a number for each group, not each channel.
    """

    name: str
    role: str
    array: Array
    per_group: bool = False


def given_of(weights: Sequence[Weight]) -> list[Given]:
    """Copies of weights, in common form.

    Args:
        weights: of a model.
    """
    return [
        Given(w.name, w.role, np.array(w.layout.array_to_common(w.read()), order="C"), _is_per_group(w))
        for w in weights
    ]


def converted(given: Sequence[Given], convert: Convert | None) -> list[Given]:
    """The result of a user's function for the given weights.

    Args:
        given: in common form.
        convert: as of :func:`polyhvd.parity.load`; None: they stay as they are.

    Raises:
        InvalidArgumentError: it returns something else than arrays by name.
    """
    if convert is None:
        return list(given)
    known = {other.name: other for other in given}
    made = convert({other.name: other.array for other in given})
    if not isinstance(made, Mapping):
        raise InvalidArgumentError(
            f"parity.load: convert: expected a dict of arrays by name, found {type(made).__name__}; nothing "
            "was loaded"
        )
    found = []
    for name, value in made.items():
        array = np.ascontiguousarray(value)
        if not isinstance(name, str) or array.dtype.kind not in "fiubV":
            raise InvalidArgumentError(
                f"parity.load: convert: {name!r}: expected an array of numbers by its name, found "
                f"{type(value).__name__}; nothing was loaded"
            )
        same = known.get(name)
        found.append(
            Given(name, "", array)
            if same is None or same.array.shape != array.shape
            else replace(same, array=array)
        )
    return found


def paired(
    mine: Sequence[Weight],
    given: Sequence[Given],
    names: Names | None,
    sides: tuple[str, str],
    *,
    partial: bool = False,
) -> list[tuple[Weight, Given]]:
    """Which weights belong together, in the order of the model.

    Args:
        mine: those of the model.
        given: those that are to be loaded.
        names: as of :func:`polyhvd.parity.load`.
        sides: what the two are called.
        partial: whether weights of the model may have no counterpart; pairs by name.

    Raises:
        InvalidArgumentError: weights are missing, left over or of other shapes.
    """
    if names is not None or partial:
        mine, given = _by_name(mine, given, {} if names is None else names, partial)
    else:
        given = _aligned(mine, given)
    pairs = []
    for position in range(max(len(mine), len(given))):
        weight = mine[position] if position < len(mine) else None
        other = given[position] if position < len(given) else None
        if weight is not None and other is not None:
            other = _by_channel(weight, other)
        if weight is None or other is None or not _fit(weight, other):
            raise InvalidArgumentError(
                f"parity.load: the models do not match: at weight {position}, {sides[0]} has "
                f"{_of_weight(weight)}, {sides[1]} {_of_given(other)}; nothing was loaded. "
                f"{_hint(weight, other)}"
            )
        pairs.append((weight, other))
    return pairs


def _by_name(
    mine: Sequence[Weight], given: Sequence[Given], names: Names, partial: bool
) -> tuple[list[Weight], list[Given]]:
    """Return the weights to be written, and the given ones in the same order."""
    known = {weight.name for weight in mine}
    renamed: dict[str, Given] = {}
    for other in given:
        name = names(other.name) if callable(names) else names.get(other.name, other.name)
        if name is None:
            continue
        if name not in known or name in renamed:
            problem = "which another one has, too" if name in renamed else "which the model does not have"
            raise InvalidArgumentError(
                f"parity.load: names: {other.name!r} is called {name!r}, {problem}; nothing was loaded. The "
                f"model has {', '.join(map(repr, sorted(known)))}"
            )
        renamed[name] = other
    missing = [weight.name for weight in mine if weight.name not in renamed]
    if missing and not (partial and renamed):
        hint = "" if partial else "; partial=True leaves such weights as they are"
        raise InvalidArgumentError(
            f"parity.load: names: nothing is called {missing[0]!r}; nothing was loaded. There are "
            f"{', '.join(repr(other.name) for other in given)}{hint}"
        )
    written = [weight for weight in mine if weight.name in renamed]
    return written, [renamed[weight.name] for weight in written]


def _aligned(mine: Sequence[Weight], given: Sequence[Given]) -> list[Given]:
    """Return the given weights, with constants where their normalization has no scale or offset, and without
    the constant ones that the model's normalization does not have."""
    made: list[Given] = []
    place = 0
    for weight in mine:
        while place < len(given) and _is_needless(weight, given[place]):
            place += 1
        other = given[place] if place < len(given) else None
        shape = weight.layout.common_shape
        if other is not None and other.role in _BEHIND.get(weight.role, ()) and other.array.shape == shape:
            made.append(Given("", weight.role, np.full(shape, _CONSTANTS[weight.role], other.array.dtype)))
            continue
        if other is not None:
            made.append(other)
        place += 1
    return [*made, *given[place:]]


def _is_needless(weight: Weight, other: Given) -> bool:
    return weight.role in _BEHIND.get(other.role, ()) and bool(np.all(other.array == _CONSTANTS[other.role]))


def _is_per_group(weight: Weight) -> bool:
    cls = type(weight.layer)
    return cls.__name__ == "GroupNorm" and cls.__module__.partition(".")[0] == "mxnet"


def _by_channel(weight: Weight, other: Given) -> Given:
    """A number for each group as one for each of its channels, or the reverse where they are the same."""
    shape = weight.layout.common_shape
    if weight.role != other.role or other.array.shape == shape or len(shape) != 1 or other.array.ndim != 1:
        return other
    if other.per_group and shape[0] % len(other.array) == 0:
        return replace(other, array=np.repeat(other.array, shape[0] // len(other.array)), per_group=False)
    if _is_per_group(weight) and len(other.array) % shape[0] == 0:
        rows = other.array.reshape(shape[0], -1)
        if np.all(rows == rows[:, :1]):
            return replace(other, array=rows[:, 0].copy())
    return other


def _hint(weight: Weight | None, other: Given | None) -> str:
    if weight is not None and other is not None and _is_per_group(weight) and weight.role == other.role:
        return (
            "Gluon's GroupNorm has one number for each group, and those of the channels of a group differ: "
            "multiply by them in a custom layer"
        )
    return (
        "Make both with the same layers in the same order, or pass names= to pair the weights, "
        "or convert= to make one model's weights from the other's"
    )


def _fit(weight: Weight, other: Given) -> bool:
    roles = {weight.role, other.role} - {""}
    return len(roles) < 2 and weight.layout.common_shape == other.array.shape


def _of_weight(weight: Weight | None) -> str:
    if weight is None:
        return "no more"
    return f"{weight.name!r} ({weight.role or 'weight'} {list(weight.layout.common_shape)} in common form)"


def _of_given(given: Given | None) -> str:
    if given is None:
        return "has no more"
    return f"has {given.name!r} ({given.role or 'weight'} {list(given.array.shape)})"
