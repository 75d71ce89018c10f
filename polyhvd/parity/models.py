"""Which framework a model belongs to, and the weights that it finds in it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.errors import InvalidArgumentError, UnsupportedError
from polyhvd.installed import Parity, frameworks
from polyhvd.runtime import current
from polyhvd.training.layouts import Layout
from polyhvd.training.mapping import Weight, WeightMapping

__all__ = ["FRAMEWORKS", "Reader", "framework_of", "laid_out", "mapping", "reader_of", "weights_of"]

#: The frameworks that have a part in this, in the order of lists.
FRAMEWORKS: dict[str, Parity] = {
    name: each.parity for name, each in frameworks().items() if each.parity is not None
}
#: The framework of each package of models and tensors. Those that stand on others come first: models of Keras
#: are modules of its backend, too.
_PACKAGES = {
    package: name
    for name in sorted(FRAMEWORKS, key=lambda name: not frameworks()[name].stands_on)
    for package in FRAMEWORKS[name].packages
}


class Reader(Protocol):
    """A framework's module that knows its models and tensors: parity.py of its folder.

    These functions are enough for ``mapping()`` and ``compare()``: frameworks/numpy/parity.py has no other.
    ``load()`` runs models whose module has ``outputs_of`` and ``on_input``, too, and ``watch()`` uses all
    functions of frameworks/torch/parity.py.
    """

    def weights_of(self, model: Any) -> list[Weight]:
        """The weights of a model, or of a list or dict of parameters, in the order of its layers."""

    def to_numpy(self, tensor: Any) -> np.ndarray[Any, Any]:
        """The values of a tensor."""


def framework_of(value: Any) -> str | None:
    """The name of the framework that a model, a tensor or a list of these belongs to; None: of none.

    Args:
        value: a model; a tensor; or a list or dict of tensors, of which the first one counts.
    """
    package = _package_of(value)
    return None if package is None else _PACKAGES[package]


def _package_of(value: Any) -> str | None:
    roots = {cls.__module__.partition(".")[0] for cls in type(value).__mro__}
    for package in _PACKAGES:
        if package in roots:
            return package
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)) and value:
        return _package_of(value[0])
    return None


def reader_of(value: Any) -> Reader:
    """The module that reads models and tensors like this one; it imports their framework.

    Raises:
        InvalidArgumentError: it belongs to no framework.
    """
    name = framework_of(value)
    if name is None:
        raise InvalidArgumentError(
            "expected a model of PyTorch, Gluon or Keras, or a list or dict of parameters, found "
            f"{type(value).__name__}"
        )
    found: Any = importlib.import_module(FRAMEWORKS[name].reader or f"polyhvd.{name}.parity")
    reader: Reader = found
    return reader


def weights_of(model: Any) -> list[Weight]:
    """The weights of a model of any framework, in the order of its layers.

    Args:
        model: a ``torch.nn.Module``, a ``gluon.Block``, a model of Keras, a ``tf.Module``, or a list or dict
            of parameters, variables or arrays.

    Raises:
        InvalidArgumentError: it is something else, or its weights are not made yet.
    """
    return reader_of(model).weights_of(model)


def mapping(
    model: Any,
    *,
    prefix: str = "parity",
    layouts: Mapping[str, Layout] | None = None,
    process_set: ProcessSet = global_process_set,
) -> WeightMapping:
    """Give the weights of a model names and a form that ranks of all frameworks share.

    Every rank calls it with its own framework's model: the same layers in the same order, built, and the same
    ones frozen. Optimizers then take the result as ``mapping``, and gradients are averaged between
    frameworks. Weights are numbered in the order of the layers; kernels of Keras travel transposed, and so do
    those behind a ``Flatten`` of images with channels last, whose columns the other frameworks order
    otherwise.

    Args:
        model: a ``torch.nn.Module``, a ``gluon.Block``, a model of Keras, a ``tf.Module``, or a list or dict
            of parameters, variables or arrays.
        prefix: begins the names on the wire; of several models of one job each has its own.
        layouts: how weights lie that are not known by their layers, by their names in the model.
        process_set: the ranks that have the model.

    Raises:
        InvalidArgumentError: weights are not made yet, or ``layouts`` names one that there is not.
        UnsupportedError: a layer moves axes so that the order of a weight's inputs is not known.
        RankMismatchError: the ranks' models do not match; on every rank, with the first weight that differs.
        NotInitializedError: before ``init()``.

    Example::

        mapping = parity.mapping(model, prefix="generator")
        mapping.broadcast(root_rank=0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), mapping=mapping)
    """
    current.world()
    if not isinstance(prefix, str) or not prefix:
        raise InvalidArgumentError(f"parity.mapping: prefix={prefix!r}: expected a name, such as 'generator'")
    weights = laid_out(weights_of(model), layouts or {}, "layouts")
    return WeightMapping(framework_of(model) or "", weights, prefix, process_set)


def laid_out(weights: list[Weight], layouts: Mapping[str, Layout], what: str) -> list[Weight]:
    """The weights with these layouts instead of those that were found, by name.

    Args:
        weights: of a model.
        layouts: of some of them.
        what: what the caller calls these.

    Raises:
        InvalidArgumentError: there is no such weight, or it has another shape.
        UnsupportedError: a layer moves axes so that the order of a weight's inputs is not known.
    """
    unknown = sorted(layouts.keys() - {weight.name for weight in weights})
    if unknown:
        raise InvalidArgumentError(
            f"{what}: the model has no weight {unknown[0]!r}; it has "
            f"{', '.join(repr(weight.name) for weight in weights)}"
        )
    for weight in weights:
        layout = layouts.get(weight.name)
        if layout is not None and layout.shape != weight.layout.shape:
            raise InvalidArgumentError(
                f"{what}[{weight.name!r}] is of shape {list(layout.shape)}, and the weight "
                f"of {list(weight.layout.shape)}"
            )
    for weight in weights:
        if weight.unfollowed and weight.name not in layouts:
            raise UnsupportedError(
                f"parity: {weight.name!r}: {weight.unfollowed} moves the axes of its inputs in a way that "
                "is not followed, so the order that they have in other frameworks is not known; pass "
                f"{what}={{{weight.name!r}: parity.Layout({weight.layout.shape}, ...)}} with the layout of "
                "the weight, or make the rows with Flatten"
            )
    return [replace(weight, layout=layouts.get(weight.name, weight.layout)) for weight in weights]
