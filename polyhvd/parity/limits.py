"""Which differences between two runs are rounding: a limit for each tensor of a step. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from polyhvd.parity.fingerprints import roundoff_of, tolerance_of
from polyhvd.parity.traces import (
    BACKWARD,
    FADING,
    NOISE,
    OF_OPTIMIZERS,
    SCALED_BY_ITSELF,
    Facts,
    Key,
    Trace,
    in_order,
    totals_of,
)

__all__ = [
    "CARRIED",
    "FORWARD",
    "GROWTH",
    "IDLE_KINDS",
    "KINKS",
    "NOTABLE",
    "Bounds",
    "Limit",
    "Suspicion",
    "computed_in",
    "differences",
    "grown",
    "idle_below",
    "relative_difference",
    "suspicious",
    "units_of",
]

#: Kinds whose limits follow from what is added up for them, and from what the tensors before them differ by.
_BY_TERMS = ("data", "input", "activation", "statistics", "loss", *BACKWARD)
#: Kinds from which a difference passes on to those that come after them.
CARRIED = ("weights", "input", "activation", "loss", *BACKWARD)
FORWARD = ("weights", "input", "activation")
#: Of weights without effect these are not judged.
IDLE_KINDS = ("weights", *BACKWARD, *OF_OPTIMIZERS)
#: A layer may make a difference so many times as large, by the norm: its condition number.
GROWTH = 16.0
#: Kinds that are sums over a batch, whose terms cancel, and by how much their norm is smaller then.
_CANCEL = ("statistics", "loss", *BACKWARD)
_CANCELLED = 8.0
#: For functions, and for sums that cannot be seen, so many terms are granted to every tensor.
_TERMS_MIN = 64
#: So many units at a kink are expected where rounding may decide between two gradients.
KINKS = 0.01
#: A layer is suspicious from this fraction of its limit on, if no other layer reaches a quarter of that.
NOTABLE = 1 / 3
_FAR = 4.0
#: Errors of many steps add up, and optimizers have numbers such as 1 - 0.9999, whose rounding errors are ten
#: thousand times as large.
_STEPS = 64.0
_LIMIT_MAX = 0.05
#: Tensors that have nothing to do with each other differ by 1.4 of their norm.
_LIMIT_IN_HALF_MAX = 0.7
#: In half types, functions, softmax and the steps of a recurrent cell are not counted as layers.
_WITHIN_LAYERS = 8
#: Half a unit in the last place of float32.
_ROUNDOFF = 2.0**-24
#: A gradient that is smaller than this fraction of the limit, by all gradients, is rounding.
_IDLE = 0.01


class Limit(NamedTuple):
    """Up to which fraction of its norm a tensor may differ.

    Args:
        own: by rounding in the tensor itself.
        most: with what comes from the tensors before it.
    """

    own: float
    most: float


@dataclass(frozen=True)
class Suspicion:
    """A layer whose activations differ far more, by their limit, than those of the others, though below it.

    Args:
        step: counted from 0.
        layer: counted from 0 among those that have weights.
        names: of the layer in the reference, and in the other run.
        relative: the norm of the difference over that of the reference.
        limit: what is taken for rounding.
        others: the largest difference of another layer by its limit.
        rank: world rank that differs from the first one; None: of a whole run.
    """

    step: int
    layer: int
    names: tuple[str, ...]
    relative: float
    limit: float
    others: float
    rank: int | None = None

    def __str__(self) -> str:
        rank = "" if self.rank is None else f" on rank {self.rank}"
        return (
            f"suspicious: step {self.step}, layer {self.layer}, activation: "
            f"{' / '.join(dict.fromkeys(self.names))} differs{rank} by {self.relative:.2g} of its norm, "
            f"{self.relative / self.limit:.0%} of its limit; other layers reach at most {self.others:.0%} "
            "of theirs"
        )


@dataclass(frozen=True)
class Bounds:
    """Differences that may be rounding in one step.

    Args:
        step: counted from 0.
        layers: with weights.
        precision: the lowest in which layers compute, NumPy's name of the dtype.
        largest: of gradients, and of what optimizers make of them, the norm of all in the step so far in
            which it was largest, by kind; see :func:`grown`.
        begins: the place of the first layer that computes in ``precision``: what is made before is not
            rounded to it.
    """

    step: int = 0
    layers: int = 0
    precision: str = "float32"
    largest: Mapping[str, float] = field(default_factory=dict)
    begins: int = 0

    def limits(
        self, references: Collection[Trace | Facts], dtypes: Mapping[Key, str] | None = None
    ) -> dict[Key, Limit]:
        """The limit of each tensor.

        Args:
            references: all tensors of a step.
            dtypes: of the other side's; None: those of the references.
        """
        terms = _terms_of(references)
        return {
            each.key: self._limit(each, terms[each.key], (dtypes or {}).get(each.key, ""))
            for each in references
        }

    def _limit(self, trace: Trace | Facts, terms: int, dtype: str) -> Limit:
        flat = max(_flat_limit(trace.dtype), _flat_limit(dtype))
        if self._is_rounded(trace):
            if trace.kind == "input":  # a framework may have rounded it already
                flat = max(flat, 4 * roundoff_of(self.precision))
            else:  # Errors of layers and steps are independent: squares add up.
                errors = (_WITHIN_LAYERS + 6 * self.layers) * (1 + self.step)
                rounded = min(4 * roundoff_of(self.precision) * math.sqrt(errors), _LIMIT_IN_HALF_MAX)
                flat = max(flat, rounded)
            return Limit(flat, flat)
        roundoff = max(roundoff_of(trace.dtype), roundoff_of(dtype))
        is_flat = trace.kind not in _BY_TERMS or (trace.kind == "statistics" and self.step)
        if is_flat or roundoff > _ROUNDOFF:
            return Limit(flat, flat)
        own = max(tolerance_of(each, max(terms, _TERMS_MIN)).rtol for each in (trace.dtype, dtype))
        if trace.kind in _CANCEL:
            own *= _CANCELLED
        return Limit(min(own, flat), flat)

    def _is_rounded(self, trace: Trace | Facts) -> bool:
        """Return whether a tensor has errors of a half type, whatever its own type is."""
        if self.precision == "float32" or trace.kind == "learning rate":
            return False
        if trace.kind == "weights":
            return self.step > 0
        return trace.kind not in ("input", "activation") or trace.place >= self.begins


def _terms_of(references: Iterable[Trace | Facts]) -> dict[Key, int]:
    """How many numbers are added up for one element of each tensor, as far as shapes determine it."""
    inputs: dict[int, int] = {}  # of a layer
    units: dict[int, int] = {}
    given: dict[int, tuple[int, ...]] = {}
    normalizes = set()
    for each in references:
        if each.kind == "weights" and len(each.shape) > 1:
            inputs[each.layer] = max(inputs.get(each.layer, 0), math.prod(each.shape[1:]))
            units[each.layer] = max(units.get(each.layer, 0), each.shape[0])
        elif each.kind in ("input", "activation"):
            given[each.place] = each.shape
        elif each.kind == "statistics":
            normalizes.add(each.layer)
    rows = max([0, *map(_rows, given.values())])

    def of(each: Trace | Facts) -> int:
        layer = each.layer
        if each.kind == "activation":
            shapes = given.get(layer, ()), each.shape
            sums = [_rows(shape if layer in normalizes else (1, *shape[1:])) for shape in shapes]
            return max(inputs.get(layer, 0), *sums)
        if each.kind in (*BACKWARD, "statistics", "loss"):
            return max(_rows(given[layer]) if layer in given else rows, units.get(layer + 1, 0))
        return 1

    return {each.key: of(each) for each in references}


def _rows(shape: Sequence[int]) -> int:
    """The elements of a batch for each of its features or channels."""
    features = shape[1 if len(shape) == 4 else -1] if len(shape) > 1 else 1
    return math.prod(shape) // max(features, 1)


def units_of(references: Iterable[Trace | Facts]) -> int:
    """How many numbers all layers make, each of which may lie at a kink of a function."""
    return sum(math.prod(each.shape) for each in references if each.kind == "activation")


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
    """``largest`` of :class:`Bounds` after another step.

    Args:
        largest: before it.
        traces: of the reference.
    """
    totals = totals_of(traces, traces)
    return {kind: max(totals[kind], largest.get(kind, 0.0)) for kind in FADING}


def _flat_limit(dtype: str) -> float:
    return min(_STEPS * tolerance_of(dtype).rtol, _LIMIT_MAX)


def relative_difference(trace: Trace, reference: Trace, total: float) -> float:
    """The difference of two tensors, by the norm of the second; that of what is mere noise counts less."""
    if trace.shape != reference.shape or trace.not_finite != reference.not_finite:
        return float("inf")
    difference = float(np.sqrt(np.square(trace.sketch - reference.sketch).sum()))
    scale = reference.norm if reference.kind in SCALED_BY_ITSELF else reference.norm + NOISE * total
    if difference == 0.0:
        return 0.0
    return difference / scale if scale else float("inf")


def differences(
    traces: Mapping[Key, Trace], references: Mapping[Key, Trace], bounds: Bounds
) -> list[tuple[Key, float, float]]:
    """All tensors that both have, causes before effects: with their differences by the norm, and the limits.

    Apparent differences are left out. Zeros around an image are part of a convolution in one framework
    and a separate layer in another, so that the next layer is given the same. And a weight that has no
    effect, as a bias before batch normalization, has a gradient of rounding errors, of which some optimizers
    make a step like any other: that gradient, that step, and what the weight does until its effect is
    taken away.
    """
    common = traces.keys() & references.keys()
    totals = totals_of(references, common)
    scales = {kind: max(total, bounds.largest.get(kind, 0.0)) for kind, total in totals.items()}
    found = {
        key: relative_difference(traces[key], references[key], scales[key[0]]) for key in in_order(common)
    }
    idle = {
        key[1]: references[key].layer
        for key in common
        if key[0] == "gradient"
        and max(side[key].norm for side in (traces, references))
        < idle_below(bounds.precision, references[key].dtype) * totals["gradient"]
    }
    layers = set(idle.values())
    faded = {kind: scales[kind] / totals[kind] if totals[kind] else 1.0 for kind in BACKWARD}
    limits = _limits(traces, references, bounds, found, idle, faded)

    def agrees(key: Key) -> bool:
        return found[key] <= limits[key] or is_seeming(key)

    def is_seeming(key: Key) -> bool:
        kind, place = key
        reference = references[key]
        if kind == "data":  # that lies otherwise, and comes to the model as the same
            return place == 0 and ("input", 0) in found and agrees(("input", 0))
        if kind in (*BACKWARD, *OF_OPTIMIZERS):
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


def idle_below(precision: str, dtype: str) -> float:
    """A gradient that is smaller than this fraction of all gradients is rounding.

    Args:
        precision: the lowest in which layers compute.
        dtype: of the gradient.
    """
    return _IDLE * _flat_limit(dtype) if precision == "float32" else roundoff_of(precision)


def suspicious(
    judged: Iterable[tuple[Key, float, float]],
    traces: Mapping[Key, Trace],
    references: Mapping[Key, Trace],
    bounds: Bounds,
    rank: int | None = None,
) -> Suspicion | None:
    """The layer that stands far out of the others, below its limit; None: there is none.

    Half types have no limits by layers, so that there is none in them.

    Args:
        judged: what :func:`differences` has returned.
        traces, references, bounds: of it.
        rank: of the traces.
    """
    if bounds.precision != "float32":
        return None
    shares = {
        key: (relative / limit, relative, limit)
        for key, relative, limit in judged
        if key[0] == "activation" and relative
    }
    if not shares:
        return None
    key = max(shares, key=lambda each: shares[each][0])
    share, relative, limit = shares.pop(key)
    others = max((other for other, *_ in shares.values()), default=0.0)
    if not max(NOTABLE, _FAR * others) <= share <= 1.0:
        return None
    names = references[key].name, traces[key].name
    return Suspicion(bounds.step, references[key].layer, names, relative, limit, others, rank)


def _limits(
    traces: Mapping[Key, Trace],
    references: Mapping[Key, Trace],
    bounds: Bounds,
    found: Mapping[Key, float],
    idle: Mapping[int, int],
    faded: Mapping[str, float],
) -> dict[Key, float]:
    """The limit of each tensor: the rounding of its sums, and what the tensors before it pass on.

    Args:
        found: by how much tensors differ, causes before effects.
        idle: weights without effect, and their layers.
        faded: by how much gradients of a kind have been larger in an earlier step.
    """
    of_layers: dict[tuple[str, int], float] = {}
    for key in found:
        if key[0] in BACKWARD:
            place = key[0], references[key].layer
            of_layers[place] = math.hypot(of_layers.get(place, 0.0), references[key].norm)
    each_limit = bounds.limits([references[key] for key in found], {key: traces[key].dtype for key in found})
    has_kinks = units_of(references[key] for key in found)
    limits: dict[Key, float] = {}
    carried = forward = 0.0
    layers = set(idle.values())
    for key, relative in found.items():
        kind = key[0]
        own, most = each_limit[key]
        if kind in BACKWARD and (norm := references[key].norm):
            own *= faded[kind] * of_layers[kind, references[key].layer] / norm
        limits[key] = min(own + GROWTH * carried, most)
        if kind in BACKWARD and forward * has_kinks >= KINKS:
            limits[key] = most
        if kind in ("update", "statistics"):
            limits[key] += _of_update(key, traces, references)
        is_idle = (
            key[1] in idle if kind in IDLE_KINDS else kind in FORWARD and references[key].layer in layers
        )
        if kind in CARRIED and not is_idle and math.isfinite(relative):
            carried = max(carried, relative)
            forward = max(forward, relative) if kind in FORWARD else forward
    return limits


def _of_update(key: Key, traces: Mapping[Key, Trace], references: Mapping[Key, Trace]) -> float:
    """The other terms of the limit of an update.

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
