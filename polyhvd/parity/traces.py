"""Short records of a model's tensors in training, so few numbers that each step can keep all. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from polyhvd import _core
from polyhvd.training.mapping import Weight

__all__ = [
    "BACKWARD",
    "CUT",
    "FADING",
    "KINDS",
    "NOISE",
    "OF_OPTIMIZERS",
    "SCALED_BY_ITSELF",
    "Facts",
    "Key",
    "Trace",
    "common_input",
    "in_order",
    "joined",
    "mean_of",
    "reported_kind",
    "totals_of",
    "trace_of",
]

Array = np.ndarray[Any, Any]
#: Kind and place: what names a tensor within a step, the same in every framework.
Key = tuple[str, int]
#: In the order in which one is the cause of another within a step; docs/parity.md describes each.
KINDS = (
    "weights",
    "data",
    "input",
    "activation",
    "statistics",
    "loss",
    "gradient",
    "average",
    "learning rate",
    "momentum",
    "second moment",
    "update",
)
#: Of which each rank has a part.
CUT = ("data", "input", "activation")
#: Differences of these are scaled by the tensor's norm; those of others, by all tensors of their kind, too.
SCALED_BY_ITSELF = (*CUT, "loss", "learning rate")
#: From the last layer to the first.
BACKWARD = ("gradient", "average")
#: What fades as a loss gets near 0, down to rounding errors of what made it.
FADING = (*BACKWARD, "momentum", "second moment", "update")
#: With numbers such as 1 - 0.999, whose rounding errors are a thousand times as large.
OF_OPTIMIZERS = ("momentum", "second moment", "update")
#: What an optimizer keeps is a part of what it does.
_REPORTED_AS = {"momentum": "update", "second moment": "update"}
#: A tensor that is smaller than this fraction of all of its kind may be only rounding.
NOISE = 1e-3


class Facts(NamedTuple):
    """A description of a tensor; see :class:`Trace`. From one step to the next it hardly changes."""

    kind: str
    place: int
    layer: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    detail: str = ""

    @property
    def key(self) -> Key:
        """Its key within a step."""
        return self.kind, self.place


@dataclass(frozen=True)
class Trace:
    """A tensor in common form.

    The sketch is linear: the norm of the difference of two estimates that of the tensors' difference (Alon,
    Matias and Szegedy, "The space complexity of approximating the frequency moments", STOC 1996). Each
    element has a sign by its place, and is added to one of 64 sums by a kernel of the core.
    """

    kind: str
    place: int  # of a layer or weight
    layer: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    norm: float
    sketch: Array
    not_finite: int
    detail: str = ""  # what of its kind it is

    @property
    def key(self) -> Key:
        """Its key within a step."""
        return self.kind, self.place

    @classmethod
    def of(cls, facts: Facts, row: Array) -> Trace:
        """Convert the core's record of a tensor.

        Args:
            facts: what it is.
            row: of ``_core.sketch``; copied.
        """
        kind, place, layer, name, shape, dtype, detail = facts
        sketch = row[2:].copy()
        return cls(kind, place, layer, name, shape, dtype, float(row[0]), sketch, int(row[1]), detail)


def reported_kind(kind: str) -> str:
    """The name of a kind of traces in reports."""
    return _REPORTED_AS.get(kind, kind)


def trace_of(
    kind: str,
    place: int,
    layer: int,
    name: str,
    array: Array,
    part: tuple[int, int] = (0, 1),
) -> Trace:
    """The trace of an array.

    Args:
        kind: one of :data:`KINDS`.
        place: of the layer or weight.
        layer: which layer it belongs to, counted from 0 among those that have weights.
        name: of the layer or weight.
        array: in common form.
        part: which of how many equal parts of a whole, cut along the first axis; see :func:`joined`.
    """
    row = np.empty((1, _core.SKETCH_NUMBERS))
    dense = array if array.flags.c_contiguous else np.ascontiguousarray(array)
    begins = [part[0] * array.size]
    if _core.sketch([dense], row, [0], begins=begins)[0] is None:  # a type that the core does not know
        _core.sketch([dense.astype(np.float64)], row, [0], begins=begins)
    return Trace.of(Facts(kind, place, layer, name, tuple(array.shape), array.dtype.name), row[0])


def mean_of(parts: Sequence[Trace]) -> Trace:
    """The trace of the mean of tensors of one shape."""
    first = parts[0]
    if len(parts) == 1 or any(part.shape != first.shape for part in parts):
        return first
    sketch = np.mean([part.sketch for part in parts], axis=0)
    norm = float(np.sqrt(np.square(sketch).sum()))
    return replace(first, norm=norm, sketch=sketch, not_finite=sum(part.not_finite for part in parts))


def joined(parts: Sequence[Trace]) -> Trace:
    """The trace of a whole from those of all its parts, which were made with ``part``."""
    first = parts[0]
    if len(parts) == 1:
        return first
    rows = sum(part.shape[0] for part in parts) if first.shape else 0
    return replace(
        first,
        shape=(rows, *first.shape[1:]) if first.shape else (),
        norm=float(np.sqrt(sum(part.norm**2 for part in parts))),
        sketch=np.sum([part.sketch for part in parts], axis=0),
        not_finite=sum(part.not_finite for part in parts),
    )


def in_order(keys: Iterable[Key]) -> list[Key]:
    """Causes before effects. Gradients come about from the last layer to the first."""
    return sorted(keys, key=lambda key: (KINDS.index(key[0]), -key[1] if key[0] in BACKWARD else key[1]))


def totals_of(traces: Mapping[Key, Trace], keys: Iterable[Key]) -> dict[str, float]:
    """The norm of all tensors of a kind together."""
    wanted = list(keys)
    return {
        kind: float(np.sqrt(sum(traces[key].norm ** 2 for key in wanted if key[0] == kind))) for kind in KINDS
    }


def common_input(array: Array, weight: Weight) -> Array:
    """The input of a layer in PyTorch's layout: channels first, and rows of images in that order."""
    common = weight.layout.common_shape
    if weight.role == "kernel" and len(common) == 2 and array.shape[-1] != common[1]:
        return array.reshape(len(array), -1)  # a dense layer of Gluon's takes images as they are
    if weight.rows and array.shape[-1] == sum(map(math.prod, weight.rows)):
        ends = np.cumsum([math.prod(part) for part in weight.rows])[:-1]
        parts = zip(np.split(array, ends, axis=-1), weight.rows, strict=True)
        lead = array.shape[:-1]
        return np.concatenate(
            [
                np.moveaxis(each.reshape(*lead, *part), -1, len(lead)).reshape(*lead, -1)
                for each, part in parts
            ],
            axis=-1,
        )
    if weight.role == "kernel" and len(common) == 2:
        return array
    return np.moveaxis(array, -1, 1) if weight.channels_last and array.ndim > 2 else array
