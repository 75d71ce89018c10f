"""What is kept of a tensor of a model in training, in so few numbers that each step can keep all. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from polyhvd import _core
from polyhvd.parity.fingerprints import TERMS, roundoff_of, tolerance_of
from polyhvd.training.mapping import Weight

__all__ = [
    "ALONE",
    "CUT",
    "FADING",
    "KINDS",
    "NOISE",
    "Bounds",
    "Facts",
    "Key",
    "Trace",
    "common_input",
    "computed_in",
    "differences",
    "grown",
    "in_order",
    "joined",
    "mean_of",
    "relative_difference",
    "told",
    "totals_of",
    "trace_of",
]

Array = np.ndarray[Any, Any]
#: Kind and place: what names a tensor within a step, the same in every framework.
Key = tuple[str, int]
#: In the order in which one is the cause of another within a step; docs/parity.md says what each is.
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
#: Whose noise is seen beside the tensor itself; of others, beside all of their kind.
ALONE = (*CUT, "loss", "learning rate")
#: From the last layer to the first.
_BACKWARD = ("gradient", "average")
#: What fades as a loss gets near 0, down to rounding errors of what made it.
FADING = (*_BACKWARD, "momentum", "second moment", "update")
#: With numbers such as 1 - 0.999, whose rounding errors are a thousand times as large.
_OF_OPTIMIZERS = ("momentum", "second moment", "update")
#: What an optimizer keeps is a part of what it does.
_TOLD = {"momentum": "update", "second moment": "update"}
#: Errors of many layers and steps add up; those of mistakes are far larger.
_LAYERS_AND_STEPS = 64.0
_LIMIT_MAX = 0.05
#: Tensors that have nothing to do with each other differ by 1.4 of their norm.
_LIMIT_IN_HALF_MAX = 0.7
#: Functions, softmax and the steps of a recurrent cell have errors, too, and are not counted as layers.
_WITHIN_LAYERS = 8
_TERMS_MIN = 256
#: Half a unit in the last place of float32.
_ROUNDOFF = 2.0**-24
#: A tensor that is smaller than this fraction of all of its kind may be rounding alone.
NOISE = 1e-3
#: A gradient that is smaller than this fraction of the limit, by all gradients, is rounding.
_IDLE = 0.01


class Facts(NamedTuple):
    """What a tensor is; see :class:`Trace`. From one step to the next it hardly changes."""

    kind: str
    place: int
    layer: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    detail: str = ""

    @property
    def key(self) -> Key:
        """What it is called in its step."""
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
        """What it is called in its step."""
        return self.kind, self.place

    @classmethod
    def of(cls, facts: Facts, row: Array) -> Trace:
        """What the core has made of a tensor.

        Args:
            facts: what it is.
            row: of ``_core.sketch``; copied.
        """
        kind, place, layer, name, shape, dtype, detail = facts
        sketch = row[2:].copy()
        return cls(kind, place, layer, name, shape, dtype, float(row[0]), sketch, int(row[1]), detail)


def told(kind: str) -> str:
    """What reports call a kind of traces."""
    return _TOLD.get(kind, kind)


def trace_of(
    kind: str,
    place: int,
    layer: int,
    name: str,
    array: Array,
    part: tuple[int, int] = (0, 1),
    detail: str = "",
) -> Trace:
    """The trace of an array.

    Args:
        kind: one of :data:`KINDS`.
        place: of the layer or weight.
        layer: which layer it belongs to, counted from 0 among those that have weights.
        name: of the layer or weight.
        array: in common form.
        part: which of how many equal parts of a whole, cut along the first axis; see :func:`joined`.
        detail: what of its kind it is, for people.
    """
    row = np.empty((1, _core.SKETCH_NUMBERS))
    dense = array if array.flags.c_contiguous else np.ascontiguousarray(array)
    begins = [part[0] * array.size]
    if _core.sketch([dense], row, [0], begins=begins)[0] is None:  # a type that the core does not know
        _core.sketch([dense.astype(np.float64)], row, [0], begins=begins)
    return Trace.of(Facts(kind, place, layer, name, tuple(array.shape), array.dtype.name, detail), row[0])


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
    return sorted(keys, key=lambda key: (KINDS.index(key[0]), -key[1] if key[0] in _BACKWARD else key[1]))


def totals_of(traces: Mapping[Key, Trace], keys: Iterable[Key]) -> dict[str, float]:
    """The norm of all tensors of a kind together."""
    wanted = list(keys)
    return {
        kind: float(np.sqrt(sum(traces[key].norm ** 2 for key in wanted if key[0] == kind))) for kind in KINDS
    }


@dataclass(frozen=True)
class Bounds:
    """What may be rounding in one step.

    Each layer adds its errors, forward and backward, those of :func:`tolerance_of` with as many terms as a
    layer of the model or a gradient adds up. After the first step they are in the weights as well, and
    training makes more of them, by how much nobody knows: then the same is granted to all models.

    Args:
        step: counted from 0.
        layers: with weights; 0: not known.
        terms: most that are added up for one element.
        precision: the lowest in which layers compute, NumPy's name of the dtype.
        largest: of gradients, and of what optimizers make of them, the norm of all in the step so far in
            which it was largest, by kind; see :func:`grown`.
        begins: the place of the first layer that computes in ``precision``: what is made before is not
            rounded to it.
    """

    step: int = 0
    layers: int = 0
    terms: int = TERMS
    precision: str = "float32"
    largest: Mapping[str, float] = field(default_factory=dict)
    begins: int = 0

    def limit(self, trace: Trace | Facts, dtype: str = "") -> float:
        """Up to which fraction of a tensor's norm a difference is taken for rounding.

        Args:
            trace: of the reference.
            dtype: of the other tensor; empty: that of the reference.
        """
        flat = max(_flat_limit(trace.dtype), _flat_limit(dtype))
        if self._is_rounded(trace):
            if trace.kind == "input":  # a framework may have rounded it already
                return max(flat, 4 * roundoff_of(self.precision))
            # Errors of layers and steps are independent: squares add up.
            errors = (_WITHIN_LAYERS + 6 * self.layers) * (1 + self.step)
            return max(flat, min(4 * roundoff_of(self.precision) * math.sqrt(errors), _LIMIT_IN_HALF_MAX))
        is_single = self.precision == trace.dtype == "float32"
        if self.step or not self.layers or trace.kind in _OF_OPTIMIZERS or not is_single:
            return flat
        terms = min(max(self.terms, _TERMS_MIN), TERMS)
        passes = _WITHIN_LAYERS + 2 * self.layers
        return min(flat, passes * tolerance_of(trace.dtype, terms).rtol)

    def _is_rounded(self, trace: Trace | Facts) -> bool:
        """Whether a tensor has errors of a half type, whatever its own type is."""
        if self.precision == "float32" or trace.kind == "learning rate":
            return False
        if trace.kind == "weights":
            return self.step > 0
        return trace.kind not in ("input", "activation") or trace.place >= self.begins


def computed_in(sides: Iterable[Iterable[Trace | Facts]]) -> tuple[str, int]:
    """The lowest precision in which layers compute on any rank, and the place of the first that does.

    Args:
        sides: what each rank has recorded in a step.
    """
    halves = [
        (roundoff_of(each.dtype), each.dtype, each.place)
        for side in sides
        for each in side
        if each.kind in ("input", "activation") and each.dtype in ("float16", "bfloat16")
    ]
    if not halves:
        return "float32", 0
    return max(halves)[1], min(place for _, _, place in halves)


def grown(largest: Mapping[str, float], traces: Mapping[Key, Trace]) -> dict[str, float]:
    """What ``largest`` of :class:`Bounds` is after another step.

    Args:
        largest: before it.
        traces: of the reference.
    """
    totals = totals_of(traces, traces)
    return {kind: max(totals[kind], largest.get(kind, 0.0)) for kind in FADING}


def _flat_limit(dtype: str) -> float:
    return min(_LAYERS_AND_STEPS * tolerance_of(dtype).rtol, _LIMIT_MAX)


def relative_difference(trace: Trace, reference: Trace, total: float) -> float:
    """The difference of two tensors, by the norm of the second; that of what is mere noise counts less."""
    if trace.shape != reference.shape or trace.not_finite != reference.not_finite:
        return float("inf")
    difference = float(np.sqrt(np.square(trace.sketch - reference.sketch).sum()))
    scale = reference.norm if reference.kind in ALONE else reference.norm + NOISE * total
    if difference == 0.0:
        return 0.0
    return difference / scale if scale else float("inf")


def differences(
    traces: Mapping[Key, Trace], references: Mapping[Key, Trace], bounds: Bounds
) -> list[tuple[Key, float, float]]:
    """All tensors that both have, causes before effects: with their differences by the norm, and the limits.

    Left out is what only seems to differ. Zeros around an image are part of a convolution in one framework
    and a layer of its own in another, so that the next layer is given the same. And a weight that has no
    effect, as a bias before batch normalization, has a gradient of rounding errors, of which some optimizers
    make a step like any other: that gradient, that step, and what the weight does until its effect is
    taken away.
    """
    common = traces.keys() & references.keys()
    limits = {key: bounds.limit(references[key], traces[key].dtype) for key in common}
    totals = totals_of(references, common)
    scales = {kind: max(total, bounds.largest.get(kind, 0.0)) for kind, total in totals.items()}
    found = {
        key: relative_difference(traces[key], references[key], scales[key[0]]) for key in in_order(common)
    }
    is_half = bounds.precision != "float32"
    idle = {
        key[1]: references[key].layer
        for key in common
        if key[0] == "gradient"
        and max(side[key].norm for side in (traces, references))
        < (roundoff_of(bounds.precision) if is_half else _IDLE * _flat_limit(references[key].dtype))
        * totals["gradient"]
    }
    layers = set(idle.values())
    for key in common:
        if key[0] in ("update", "statistics"):
            limits[key] += _of_update(key, traces, references)

    def agrees(key: Key) -> bool:
        return found[key] <= limits[key] or is_seeming(key)

    def is_seeming(key: Key) -> bool:
        kind, place = key
        reference = references[key]
        if kind == "data":  # that lies otherwise, and comes to the model as the same
            return place == 0 and ("input", 0) in found and agrees(("input", 0))
        if kind in (*_BACKWARD, *_OF_OPTIMIZERS):
            return place in idle
        if kind == "statistics":  # a bias before it moves the mean
            return reference.detail == "mean" and reference.layer - 1 in layers
        if kind == "weights":
            return place in idle or (reference.detail == "mean" and reference.layer - 1 in layers)
        if kind not in ("input", "activation") or ("activation", place + 1) not in found:
            return False
        may = reference.layer in layers or _is_padded(traces[key], reference)
        return may and agrees(("activation", place + 1))

    return [(key, relative, limits[key]) for key, relative in found.items() if not is_seeming(key)]


def _of_update(key: Key, traces: Mapping[Key, Trace], references: Mapping[Key, Trace]) -> float:
    """What is granted to an update besides.

    It is the difference of two weights, each of which is rounded. And optimizers that divide by the root of a
    second moment make a whole step of the smallest gradient: one that is within a rounding error e of 0, as a
    fraction e of a tensor's elements is, may get any sign. The norm of the differences of those, and of the
    elements next to them, is about the root of e.
    """
    kind, place = key
    granted = 0.0
    weights, update = references.get(("weights", place)), references[key]
    if weights is not None and update.norm:
        granted += 2 * _ROUNDOFF * weights.norm / update.norm
    average = ("average", place) if ("average", place) in references else ("gradient", place)
    if kind == "update" and ("second moment", place) in references and average in references:
        reference = references[average]
        if average in traces and reference.norm:
            apart = np.square(traces[average].sketch - reference.sketch).sum() ** 0.5 / reference.norm
            granted += 2 * math.sqrt(min(float(apart), 1.0))
    return min(granted, _LIMIT_MAX)


def _is_padded(trace: Trace, reference: Trace) -> bool:
    shapes = trace.shape, reference.shape
    return (
        trace.kind in ("input", "activation")
        and len(shapes[0]) == len(shapes[1]) > 2
        and shapes[0][:2] == shapes[1][:2]
        and shapes[0] != shapes[1]
    )


def common_input(array: Array, weight: Weight) -> Array:
    """What a layer is given, as PyTorch's would be: channels first, and rows of images in that order."""
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
