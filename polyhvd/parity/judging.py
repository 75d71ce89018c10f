"""Which runs of a case agree, and where the others first differ. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from polyhvd.parity.limits import Bounds, Suspicion, differences, grown, relative_difference, suspicious
from polyhvd.parity.runs import MODES, Run, Step
from polyhvd.parity.traces import (
    CUT,
    KINDS,
    Key,
    Trace,
    in_order,
    joined,
    mean_of,
    reported_kind,
    trace_of,
)

__all__ = ["Finding", "Pair", "Verdict", "described", "judge"]

#: Kinds that are of no layer.
_OF_NO_LAYER = ("data", "loss", "learning rate")
#: What runs are called in a report, by mode.
NAMES = {"plain": "one process, without polyhvd", "one": "1 rank", "all": "{ranks} ranks"}


@dataclass(frozen=True)
class Finding:
    """The first divergence of two runs.

    Args:
        step: counted from 0.
        kind: what differs, see ``polyhvd docs parity``.
        layer: counted from 0 among those that have weights; None: what differs is of no layer.
        names: of the layer or weight in the reference, and in the other run.
        relative: the norm of the difference over that of the reference.
        limit: what is taken for rounding.
        detail: what of that kind it is, such as "momentum" or "variance".
    """

    step: int
    kind: str
    layer: int | None
    names: tuple[str, str]
    relative: float
    limit: float
    detail: str = ""

    def __str__(self) -> str:
        name = self.names[0] if self.names[0] == self.names[1] else " / ".join(self.names)
        detail = f" ({self.detail})" if self.detail else ""
        layer = "" if self.layer is None else f", layer {self.layer}"
        verb, whose = ("differ", "their") if self.kind == "data" else ("differs", "its")  # "the inputs ..."
        return (
            f"step {self.step}{layer}, {self.kind}{detail}: {name} {verb} by {self.relative:.2g} of "
            f"{whose} norm; up to {self.limit:.2g} may be rounding"
        )

    @property
    def advice(self) -> str:
        """Advice about where to look."""
        return ADVICE[self.kind]


#: Where to look, by kind.
ADVICE = {
    "weights": "The weights differ before the step: compare how they are initialized, loaded and broadcast, "
    "and look for code outside of the optimizer that changes them.",
    "data": "The batches differ: compare what the data pipelines return in this step, and in which order "
    "(shuffling, shards, the last batch).",
    "input": "The batches agree, but the inputs of the first layer differ: compare the preprocessing "
    "(scaling, order of axes, padding).",
    "statistics": "The activations agree, but running statistics of this layer differ: compare the momentum "
    "of batch normalization (0.9 in Gluon and Keras corresponds to 0.1 in PyTorch).",
    "average": "The gradients of the ranks agree, but their average differs: compare the reduction (mean or "
    "sum, which ranks, compression, clipping before it, gradients of which step).",
    "learning rate": "The gradients agree, but the learning rates differ: compare the schedules, and when "
    "they count a step.",
    "activation": "The forward pass of this layer differs: compare its weights, its options (GELU with erf "
    "or tanh, epsilon, padding, slopes, dropout, gate order), and the precision of its sums (TF32, half "
    "types).",
    "gradient": "Activations and losses agree, but this gradient differs before it is averaged: compare what "
    "the loss is divided by, and the backward passes of the layers after this one.",
    "update": "The gradients agree, but the updates of the optimizer differ: compare its settings with the "
    "table of optimizers in: polyhvd docs parity (epsilon, decay, momentum, bias correction, clipping).",
    "loss": "All activations agree, but the losses differ: compare the loss functions (mean or sum, half of "
    "the square).",
}


def described(suspicion: Suspicion | None) -> dict[str, Any]:
    """A layer that stands out, as reports have it; {}: there is none."""
    if suspicion is None:
        return {}
    return asdict(suspicion) | {"text": str(suspicion), "advice": ADVICE["activation"]}


@dataclass(frozen=True)
class Pair:
    """Two runs, compared.

    Args:
        question: "distribution" (one framework, run in several modes) or "frameworks".
        frameworks, modes: of the reference, and of the other.
        first: where they part; None: they agree.
        loss: the largest relative difference of losses.
        worst: the largest relative difference of each kind.
        cells: for each step and layer the largest ratio of a difference to its limit.
        suspicious: the layer, before they part, that stands out below its limit; None: there is none.
    """

    question: str
    frameworks: tuple[str, str]
    modes: tuple[str, str]
    first: Finding | None
    loss: float
    worst: dict[str, float]
    cells: list[list[float]] = field(default_factory=list)
    suspicious: Suspicion | None = None

    @property
    def agree(self) -> bool:
        """Whether there is no difference but rounding."""
        return self.first is None

    def title(self, ranks: int) -> str:
        """Both in words.

        Args:
            ranks: of a run on several.
        """
        one, two = (NAMES[mode].format(ranks=ranks) for mode in self.modes)
        if self.question == "distribution":
            return f"{self.frameworks[0]}: {two} against {one}"
        return f"{self.frameworks[1]} against {self.frameworks[0]}: {one}"


@dataclass(frozen=True)
class Verdict:
    """The result of comparing all runs.

    Args:
        problem: what forbids a comparison: "models", "nan", "batches" or nothing.
        message: the problem in a sentence.
        pairs: what was compared.
        layers: names of layers, by framework.
        losses: of each run, by framework and mode.
        left_out: frameworks for which the case has no model.
    """

    problem: str = ""
    message: str = ""
    pairs: tuple[Pair, ...] = ()
    layers: dict[str, list[str]] = field(default_factory=dict)
    losses: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def agree(self) -> bool:
        """Whether everything was compared, and agrees."""
        return not self.problem and bool(self.pairs) and all(pair.agree for pair in self.pairs)


def judge(runs: Sequence[Run], *, same_on_ranks: bool = True, precision: str = "float32") -> Verdict:
    """Compare all runs of a case.

    Args:
        runs: of all frameworks, modes and ranks; of ranks in their order.
        same_on_ranks: whether a run on several ranks has to do what one does.
        precision: in which layers have computed.

    Returns:
        the verdict; if models or batches differ, or there are NaNs, it reports only that.
    """
    whole = _whole([run for run in runs if run.problem != "none"])
    left_out = tuple(dict.fromkeys(run.framework for run in runs if run.problem == "none"))
    verdict = Verdict(
        layers={framework: next(iter(modes.values())).layers for framework, modes in whole.items()},
        losses={
            f: {m: [s.loss for s in run.steps] for m, run in modes.items()} for f, modes in whole.items()
        },
        left_out=left_out,
    )
    for problem, check in (("models", _unlike_models), ("batches", _unlike_batches), ("nan", _not_finite)):
        if message := check(whole):
            return replace(verdict, problem=problem, message=message)
    return replace(verdict, pairs=tuple(_pairs(whole, precision, same_on_ranks=same_on_ranks)))


def _whole(runs: Sequence[Run]) -> dict[str, dict[str, Run]]:
    """By framework and mode, those of several ranks put together."""
    found: dict[str, dict[str, Run]] = {}
    for framework in dict.fromkeys(run.framework for run in runs):
        for mode in MODES:
            parts = [run for run in runs if (run.framework, run.mode) == (framework, mode)]
            if parts:
                steps = [_joined_step(steps) for steps in zip(*(part.steps for part in parts), strict=False)]
                found.setdefault(framework, {})[mode] = replace(parts[0], steps=steps)
    return found


def _joined_step(parts: Sequence[Step]) -> Step:
    """Each rank has a part of batches and activations, and a term of gradients; the rest is one for all."""
    if len(parts) == 1:
        return parts[0]
    traces = {}
    for key in parts[0].traces.keys() & parts[-1].traces.keys():
        sides = [part.traces[key] for part in parts if key in part.traces]
        if key[0] in CUT:
            traces[key] = joined(sides)
        else:  # statistics may be each rank's own
            traces[key] = (mean_of if key[0] in ("gradient", "statistics") else _farthest)(sides)
    loss = sum(part.loss for part in parts) / len(parts)
    return Step(loss, sum(part.rows for part in parts), traces)


def _farthest(sides: Sequence[Trace]) -> Trace:
    """That of the first rank; of one that differs from it, if there is one: it will be found to differ."""
    apart = [relative_difference(side, sides[0], sides[0].norm) for side in sides]
    farthest = max(range(len(sides)), key=apart.__getitem__)
    return sides[farthest] if apart[farthest] > Bounds().limits(sides[:1])[sides[0].key].most else sides[0]


def _unlike_models(whole: Mapping[str, Mapping[str, Run]]) -> str:
    sides = [(framework, next(iter(modes.values())).weights) for framework, modes in whole.items()]
    for (one, mine), (other, theirs) in itertools.pairwise(sides):
        for place in range(max(len(mine), len(theirs))):
            pair = [side[place] if place < len(side) else None for side in (mine, theirs)]
            if pair[0] is None or pair[1] is None or _differ(pair[0], pair[1]):
                found = " and ".join(
                    f"{framework} has {_described(weight)}"
                    for framework, weight in zip((one, other), pair, strict=True)
                )
                return (
                    f"the models do not match: at weight {place}, {found}; build them with the same layers "
                    "in the same order, and with the same weights frozen"
                )
    return ""


def _differ(mine: tuple[object, ...], theirs: tuple[object, ...]) -> bool:
    roles = {mine[1], theirs[1]} - {""}
    trained = mine[4] == theirs[4] or mine[1] == "state bias"  # Keras has one bias where others freeze one
    return len(roles) > 1 or mine[2:4] != theirs[2:4] or not trained


def _described(weight: tuple[object, ...] | None) -> str:
    if weight is None:
        return "no more"
    name, role, shape, dtype, trained = weight
    state = "" if trained else ", not trained"
    return f"{name!r} ({role or 'weight'} {dtype} {list(shape)} in common form{state})"  # type: ignore[call-overload]


def _unlike_batches(whole: Mapping[str, Mapping[str, Run]]) -> str:
    runs = [run for modes in whole.values() for run in modes.values()]
    for run in runs:
        if len(run.steps) != len(runs[0].steps):
            return (
                f"the batches differ in number: {runs[0].framework} ({runs[0].mode}) has trained "
                f"{len(runs[0].steps)} steps, {run.framework} ({run.mode}) {len(run.steps)}; "
                "let batch() return as many for every framework"
            )
    for step, steps in enumerate(zip(*(run.steps for run in runs), strict=False)):
        for run, item in zip(runs, steps, strict=True):
            if item.rows != steps[0].rows:
                return (
                    f"the batches differ in size: in step {step}, {runs[0].framework} has {steps[0].rows} "
                    f"rows, {run.framework} {item.rows}; let batch() return the same rows for every framework"
                )
    return ""


def _not_finite(whole: Mapping[str, Mapping[str, Run]]) -> str:
    for framework, modes in whole.items():
        for mode, run in modes.items():
            for number, step in enumerate(run.steps):
                for key in in_order(step.traces):
                    trace = step.traces[key]
                    if trace.not_finite:
                        return (
                            f"{framework} ({mode}) has {trace.not_finite} NaNs or infinities in step {number}"
                            f", layer {trace.layer}, {trace.kind} of {trace.name}: later values cannot be "
                            "compared; lower the learning rate, or look for the logarithm of 0 or a division "
                            "by 0"
                        )
                if not math.isfinite(step.loss):
                    return (
                        f"the loss of {framework} ({mode}) is {step.loss} in step {number}, but all outputs "
                        "of the model are finite: check the loss and its targets"
                    )
    return ""


def _pairs(whole: Mapping[str, Mapping[str, Run]], precision: str, *, same_on_ranks: bool) -> list[Pair]:
    pairs = []
    for modes in whole.values():
        for one, two in (("plain", "one"), ("plain", "all"), ("one", "all")):
            if one in modes and two in modes and (two != "all" or same_on_ranks):
                pairs.append(_pair("distribution", modes[one], modes[two], precision))
    for first, second in itertools.combinations(whole.values(), 2):
        pairs += [
            _pair("frameworks", first[mode], second[mode], precision)
            for mode in ("plain", "all")
            if mode in first and mode in second
        ]
    return pairs


def _pair(question: str, reference: Run, other: Run, precision: str) -> Pair:
    worst = dict.fromkeys(map(reported_kind, KINDS), 0.0)
    cells: list[list[float]] = []
    firsts: list[Finding] = []
    suspicions: list[Suspicion] = []
    layers = len(reference.layers)
    largest: dict[str, float] = {}
    for step, (one, two) in enumerate(zip(reference.steps, other.steps, strict=False)):
        largest = grown(largest, one.traces)
        bounds = Bounds(step, layers, precision, largest)
        sides = _with_loss(one, layers), _with_loss(two, layers)
        finding, suspicion, row = _step(*sides, bounds, worst, question)
        cells.append(row)
        if suspicion is not None and not firsts:
            suspicions.append(suspicion)
        if finding is not None:
            firsts.append(finding)
    return Pair(
        question,
        (reference.framework, other.framework),
        (reference.mode, other.mode),
        firsts[0] if firsts else None,
        worst["loss"],
        worst,
        cells,
        suspicions[0] if suspicions else None,
    )


def _with_loss(step: Step, layers: int) -> dict[Key, Trace]:
    """All traces; a loss of nothing has rounding errors as well."""
    loss = np.array([step.loss, 1e-3])
    last = max(layers - 1, 0)
    trace = replace(trace_of("loss", 0, last, "the loss", loss), dtype="float32")
    return {**step.traces, trace.key: trace}


def _step(
    traces: Mapping[Key, Trace],
    others: Mapping[Key, Trace],
    bounds: Bounds,
    worst: dict[str, float],
    question: str,
) -> tuple[Finding | None, Suspicion | None, list[float]]:
    """The first difference of a step, a layer that stands out, and of each layer the largest by its limit."""
    first = None
    row = [0.0] * bounds.layers
    judged = differences(others, traces, bounds)
    for key, relative, limit in judged:
        one, two = traces[key], others[key]
        if question == "distribution" and one.shape != two.shape and key[0] in ("input", "activation"):
            continue  # of something that has no row for each sample, and is cut elsewhere
        kind = reported_kind(key[0])
        worst[kind] = max(worst[kind], relative)
        if bounds.layers:
            row[one.layer] = max(row[one.layer], relative / limit)
        if relative > limit and first is None:
            detail = one.detail or (key[0] if kind != key[0] else "")
            layer = None if kind in _OF_NO_LAYER else one.layer
            first = Finding(bounds.step, kind, layer, (one.name, two.name), relative, limit, detail)
    return first, suspicious(judged, others, traces, bounds), row
