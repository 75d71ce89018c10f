"""Weights from a model of one framework into the same model of another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polyhvd.collectives.objects import broadcast_object
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.errors import InvalidArgumentError
from polyhvd.parity.models import framework_of, laid_out, weights_of
from polyhvd.runtime import current
from polyhvd.training.layouts import Layout
from polyhvd.training.mapping import Weight

__all__ = ["Given", "Loaded", "given_of", "load", "paired", "write"]

Array = np.ndarray[Any, Any]
Names = Mapping[str, str] | Callable[[str], str | None]


@dataclass(frozen=True)
class Loaded:
    """A weight that was loaded, and the one that it was loaded from, by their names in the models."""

    name: str
    source: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Given:
    """A weight to be loaded, in common form. Can be pickled."""

    name: str
    role: str
    array: Array


def load(
    model: Any,
    *,
    from_: Any,
    names: Names | None = None,
    layouts: Mapping[str, Layout] | None = None,
    from_layouts: Mapping[str, Layout] | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Loaded]:
    """Overwrite the weights of a model with those of the same one in another framework, or on another rank.

    Weights are paired in the order of the layers, or by name with ``names``. Layouts are mapped as
    :func:`polyhvd.parity.mapping` does, and so are gates and biases of LSTM, GRU and plain recurrent cells.
    All is checked before anything is written.

    Args:
        model: of PyTorch, Gluon or Keras, built; or a list or dict of parameters, variables or arrays.
        from_: a model likewise; a dict of tensors, as a file of weights is read; or the world rank whose
            model is meant: then every rank calls this with its own model, and that rank's stays as it is.
        names: for a weight of ``from_``, its name in ``model``: a dict, or a function that returns the name,
            or None for a weight that is left out. Those that a dict does not have keep their names.
        layouts, from_layouts: how weights lie that are not known by their layers, by name, of either side.
        process_set: the ranks that take part, if ``from_`` is a rank.

    Returns:
        the pairs, in the order of ``model``.

    Raises:
        InvalidArgumentError: weights are missing, left over or of other shapes; nothing was written.
        UnsupportedError: a cell has no counterpart in other frameworks.

    Example::

        parity.load(torch_model, from_=gluon_net)
        parity.load(model, from_=torch.load("model.pt"), names=lambda name: name.replace("conv1", "stem"))
        parity.load(model, from_=0)  # on every rank, whatever its framework is
    """
    mine = laid_out(weights_of(model), layouts or {}, "layouts")
    if isinstance(from_, int) and not isinstance(from_, bool):
        is_root = current.world().placement.rank == from_
        told = given_of(mine) if is_root else None
        given = broadcast_object(told, from_, name="parity.load", process_set=process_set)
        source = f"rank {from_}"
    else:
        given = given_of(laid_out(weights_of(from_), from_layouts or {}, "from_layouts"))
        is_root, source = False, framework_of(from_) or ""
    pairs = paired(mine, given, names, (framework_of(model) or "", source))
    if not is_root:
        write(pairs)
    return [Loaded(weight.name, other.name, weight.layout.common_shape) for weight, other in pairs]


def given_of(weights: Sequence[Weight]) -> list[Given]:
    """Copies of weights, in common form.

    Args:
        weights: of a model.
    """
    return [Given(w.name, w.role, np.array(w.layout.array_to_common(w.read()), order="C")) for w in weights]


def paired(
    mine: Sequence[Weight], given: Sequence[Given], names: Names | None, sides: tuple[str, str]
) -> list[tuple[Weight, Given]]:
    """Which weights belong together, in the order of the model.

    Args:
        mine: those of the model.
        given: those that are to be loaded.
        names: as of :func:`load`.
        sides: what the two are called.

    Raises:
        InvalidArgumentError: weights are missing, left over or of other shapes.
    """
    if names is not None:
        given = _by_name(mine, given, names)
    pairs = []
    for position in range(max(len(mine), len(given))):
        weight = mine[position] if position < len(mine) else None
        other = given[position] if position < len(given) else None
        if weight is None or other is None or not _fit(weight, other):
            raise InvalidArgumentError(
                f"parity.load: the models are not alike: at weight {position}, {sides[0]} has "
                f"{_of_weight(weight)}, {sides[1]} {_of_given(other)}; nothing was loaded. Make both with "
                "the same layers in the same order, or say with names= which weights belong together"
            )
        pairs.append((weight, other))
    return pairs


def _by_name(mine: Sequence[Weight], given: Sequence[Given], names: Names) -> list[Given]:
    """Those given, in the order of the model."""
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
    if missing:
        raise InvalidArgumentError(
            f"parity.load: names: nothing is called {missing[0]!r}; nothing was loaded. There are "
            f"{', '.join(repr(other.name) for other in given)}"
        )
    return [renamed[weight.name] for weight in mine]


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


def write(pairs: Sequence[tuple[Weight, Given]]) -> None:
    """Overwrite the weights of a model.

    Args:
        pairs: as :func:`paired` returns them.
    """
    for weight, other in pairs:
        lying = weight.layout.array_from_common(other.array)
        weight.write(np.array(lying, dtype=_dtype(weight.dtype), order="C"))


def _dtype(name: str) -> np.dtype[Any]:
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes  # takes a while, and is seldom needed

    return np.dtype(ml_dtypes.bfloat16)
