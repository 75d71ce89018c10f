"""Weights from a model of one framework into the same model of another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polyhvd.collectives.objects import broadcast_object
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.parity.models import framework_of, laid_out, weights_of
from polyhvd.parity.pairing import Convert, Given, Names, converted, given_of, paired
from polyhvd.runtime import current
from polyhvd.training.layouts import Layout
from polyhvd.training.mapping import Weight

__all__ = ["Loaded", "load", "write"]


@dataclass(frozen=True)
class Loaded:
    """A weight that was loaded, and the one that it was loaded from, by their names in the models.

    Args:
        name: in the model that was written to.
        source: in the other; empty: a scale of 1 or an offset of 0, as its normalization has none.
        shape: in common form.
    """

    name: str
    source: str
    shape: tuple[int, ...]


def load(
    model: Any,
    *,
    from_: Any,
    names: Names | None = None,
    convert: Convert | None = None,
    partial: bool = False,
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
        convert: a function that is given the weights of ``from_`` as arrays in common form, by name, and
            returns such a dict: split, joined, reordered, added or left out. Its order and its names count.
        partial: True: pair by name, and let weights of ``model`` that nothing in ``from_`` is called keep
            their values, such as those of a new last layer.
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
    if not is_root:
        given = converted(given, convert)
    else:
        names, partial = None, False
    pairs = paired(mine, given, names, (framework_of(model) or "", source), partial=partial)
    if not is_root:
        write(pairs)
    return [Loaded(weight.name, other.name, weight.layout.common_shape) for weight, other in pairs]


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
