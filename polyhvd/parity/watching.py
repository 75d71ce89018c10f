"""Watches a model train on ranks of several frameworks, and reports where they first differ."""

from __future__ import annotations

import contextlib
import functools
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.errors import InvalidArgumentError
from polyhvd.parity import log
from polyhvd.parity.judging import ADVICE, described
from polyhvd.parity.limits import Bounds, Suspicion, computed_in, differences, suspicious
from polyhvd.parity.models import framework_of, reader_of, weights_of
from polyhvd.parity.pages import Page, Pages, Plan
from polyhvd.parity.recording import Recorder, view_of
from polyhvd.parity.traces import FADING, KINDS, Key, Trace, in_order, reported_kind
from polyhvd.runtime import current
from polyhvd.runtime.world import World

__all__ = ["Divergence", "Watch", "watch"]

_WHERE = {
    "weights": "the weights differ before the step",
    "input": "the inputs of the model differ",
    "activation": "the output of layer {layer} differs",
    "statistics": "running statistics of layer {layer} differ, but its output does not",
    "gradient": "a gradient differs, but no activation does",
    "learning rate": "the learning rates differ",
    "update": "an update of the optimizer differs, but no gradient does",
}


#: By how much tensors differ, and by how much they may.
_Apart = dict[Key, tuple[float, float]]
#: For batches of so many sizes.
_PLANS_MAX = 64


@dataclass(frozen=True)
class Divergence:
    """A difference between ranks.

    Args:
        step: counted from 0.
        kind: "weights" (before the step), "input" (the batches differ), "activation", "statistics" (of batch
            normalization), "gradient" (of a weight, on its rank), "learning rate" or "update" (what the
            optimizer has made of a weight, or keeps for it).
        layer: which layer, counted from 0 among those that have weights.
        names: what each rank calls the layer, or the weight.
        rank: world rank that differs from the first one.
        relative: the norm of the difference over that of the first rank's tensor, estimated.
        limit: what is taken for rounding.
        detail: what of that kind it is: "momentum" and "second moment" of an update, "mean" and "variance" of
            statistics.
    """

    step: int
    kind: str
    layer: int
    names: tuple[str, ...]
    rank: int
    relative: float
    limit: float
    detail: str = ""

    def __str__(self) -> str:
        where = _WHERE[self.kind].format(layer=self.layer)
        detail = f"{self.detail} of " if self.detail else ""
        return (
            f"step {self.step}: {where}: {detail}{' / '.join(self.names)}, on rank {self.rank} by "
            f"{self.relative:.2g} of its norm; up to {self.limit:.2g} may be rounding"
        )


class _Step(contextlib.AbstractContextManager[None]):
    """Calls a function at its end, unless that is an error. Quicker than a generator: each step has one."""

    __slots__ = ("_after",)

    def __init__(self, after: Callable[[], None]) -> None:
        self._after = after

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._after()


class Watch:
    """The result of :func:`watch`. A context manager that ends the watch."""

    def __init__(
        self, model: Any, optimizer: Any, prefix: str, limit: float | None, process_set: ProcessSet
    ) -> None:
        #: All that was found, in order; the same on every rank.
        self.divergences: list[Divergence] = []
        #: A layer that stands out of the others below its limit, before the first divergence.
        self.suspicious: Suspicion | None = None
        self.steps = 0
        self._not_finite = ""  # from which step on weights are so on all ranks, in a sentence
        self._prefix = prefix
        self._limit = limit
        self._process_set = process_set
        framework = _framework_of(model)
        if not isinstance(prefix, str) or not prefix:
            raise InvalidArgumentError(f"parity.watch: prefix={prefix!r}: expected a name, such as 'net'")
        if limit is not None and not (isinstance(limit, numbers.Real) and 0 < limit < float("inf")):
            raise InvalidArgumentError(
                f"parity.watch: limit={limit!r}: expected a fraction of a norm above 0, such as 1e-3, or None"
            )
        if hasattr(framework, "check_model"):
            framework.check_model(model)
        if optimizer is not None:
            framework.check_optimizer(optimizer, weights_of(model))
        self._framework, self._optimizer = framework, optimizer
        #: What an optimizer keeps, as tensors with factors; else as copies of them.
        self._states_of = getattr(framework, "kept_of", framework.states_of)
        self._pages = Pages(prefix, process_set)
        self._plans: dict[tuple[int, ...], Plan] = {}
        self._largest = np.zeros(len(KINDS))
        #: Steps, and what was largest in them.
        self._known = np.zeros(1 + len(KINDS))
        self._recorder = Recorder(
            weights_of(model),
            framework.batch_norm_of,
            keeps_all=False,
            view_of=getattr(framework, "view_of", view_of),
        )
        self._ends: list[Callable[[], None]] = []
        self._generation = self._world().placement.generation
        try:
            self._hook(model)
        except BaseException:
            self.close()
            raise

    def _hook(self, model: Any) -> None:
        framework = self._framework
        if hasattr(framework, "run_as_written"):
            self._ends.append(framework.run_as_written(model))
        for number, weight in enumerate(self._recorder.layers):
            if (listener := self._recorder.input_listener(number)) is not None:
                self._ends.append(framework.on_input(weight.layer, listener))
        self._ends.append(framework.on_output(model, self._recorder.record_output))
        if hasattr(framework, "on_evaluation"):  # outermost, around what layers within are given
            self._ends.append(framework.on_evaluation(model, self._recorder.paused))
        if self._optimizer is not None:
            self._ends.append(framework.on_step(self._optimizer, self._stepping))

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the model and the optimizer; what was found stays."""
        while self._ends:
            self._ends.pop()()

    @property
    def first(self) -> Divergence | None:
        """The first divergence of all; None: there is none."""
        return self.divergences[0] if self.divergences else None

    def __str__(self) -> str:
        found = self.first or f"no divergence in {self.steps} steps"
        parts = (found, self.suspicious, self._not_finite)
        return f"parity.watch: {'; '.join(str(part) for part in parts if part)}"

    # Recording ------------------------------------------------------------------

    def _stepping(self, gradient_of: Callable[[Any], Any]) -> _Step:
        generation = self._world().placement.generation
        if generation != self._generation:  # weights are those of another rank, perhaps
            self._generation = generation
            self._recorder.forget_statistics()
        self._recorder.begin()
        self._recorder.gradients("gradient", lambda weight: gradient_of(weight.source))
        return _Step(self._after_step)

    def _after_step(self) -> None:
        self._recorder.update(
            self._framework.rate_of(self._optimizer),
            lambda weight: self._states_of(self._optimizer, weight.source),
        )
        self.step()

    def _world(self) -> World:
        return self._process_set.world or current.world()

    # Comparing ------------------------------------------------------------------

    def step(self) -> Divergence | None:
        """Compare what was recorded since the last step; an optimizer that is watched calls it itself.

        Returns:
            the first divergence of this step; None: there is none.

        Raises:
            HorovodInternalError: a rank was lost.
        """
        self._recorder.passes()
        # A rank that has begun later, in a world that has changed, goes on from what the others know.
        pages = self._pages.exchange(self._recorder.page(), self._known)
        extras = [page.extra for page in pages]
        known = functools.reduce(np.fmax, extras[1:], extras[0])[: len(self._known)]
        self.steps, self._largest = int(known[0]), known[1:]
        ranks = tuple(self._process_set.ranks or range(len(pages)))
        is_logged = bool(current.world().settings.parity_log)
        agree = self._agree(pages)
        sides, apart, suspicion = self._apart(pages, ranks) if is_logged or not agree else ([], [], None)
        found = None if agree else self._first_of(sides, apart, ranks)
        if self.first is None:
            self.suspicious = self.suspicious or suspicion
        if found is None:
            self._not_finite = self._not_finite or self._weights_not_finite(pages[0])
        if is_logged:
            log.note(self._entry(found, suspicion, sides, apart), ranks[0])
        self.steps += 1
        self._known[0], self._known[1:] = self.steps, self._largest
        if found is not None:
            self.divergences.append(found)
        return found

    def _agree(self, pages: Sequence[Page]) -> bool:
        """Return whether there is nothing that could be a divergence."""
        digests = tuple(page.digest for page in pages)
        plan = self._plans.get(digests)
        if plan is None:
            if len(self._plans) >= _PLANS_MAX:
                self._plans.clear()
            plan = self._plans[digests] = Plan([page.facts for page in pages], self._limit)
        self._largest = plan.grown(self._largest, pages[0].rows[1:])
        return plan.accepts([page.rows[1:] for page in pages], self._largest)

    def _weights_not_finite(self, page: Page) -> str:
        """A sentence about the first trained weight with NaNs or infinities; empty: there is none."""
        if not page.rows[1:, 1].any():
            return ""
        trained = {place for place, weight in enumerate(self._recorder.weights) if weight.trainable}
        weights = (
            facts.name
            for facts, row in zip(page.facts, page.rows[1:], strict=True)
            if facts.kind == "weights" and facts.place in trained and row[1]
        )
        name = next(weights, "")
        return name and (
            f"step {self.steps}: {name} has NaNs or infinities before the step, on every rank: later "
            "values cannot be compared"
        )

    def _entry(
        self,
        found: Divergence | None,
        suspicion: Suspicion | None,
        sides: Sequence[dict[Key, Trace]],
        apart: Sequence[_Apart],
    ) -> dict[str, Any]:
        """Return an entry of the log: the largest difference by kind, and by layer relative to its limit."""
        worst: dict[str, float] = {}
        cells = [0.0] * len(self._recorder.layers)
        for key, (relative, limit) in (item for each in apart for item in each.items()):
            kind, layer = reported_kind(key[0]), sides[0][key].layer
            worst[kind] = max(worst.get(kind, 0.0), relative)
            cells[layer] = max(cells[layer], relative / (self._limit or limit))
        return {
            "name": self._prefix,
            "agree": found is None,
            "first": {} if found is None else asdict(found) | {"advice": ADVICE[found.kind]},
            "text": "" if found is None else str(found),
            "suspicious": described(suspicion),
            "not_finite": self._not_finite,
            "worst": worst,
            "margin": max(cells, default=0.0) if worst else None,
            "cells": cells,
            "layers": [weight.name for weight in self._recorder.layers],
        }

    def _apart(
        self, pages: Sequence[Page], ranks: Sequence[int]
    ) -> tuple[list[dict[Key, Trace]], list[_Apart], Suspicion | None]:
        """The records of all ranks, their distances from the first, and a layer that stands out."""
        sides = _with_zeros([page.traces for page in pages])
        largest = {kind: float(self._largest[KINDS.index(kind)]) for kind in FADING}
        precision, begins = computed_in(side.values() for side in sides)
        layers = len(self._recorder.layers)
        bounds = Bounds(self.steps, layers, precision, largest, begins)
        judged = [differences(side, sides[0], bounds) for side in sides[1:]]
        suspicions = (
            suspicious(each, side, sides[0], bounds, rank)
            for each, side, rank in zip(judged, sides[1:], ranks[1:], strict=True)
        )
        suspicion = None if self._limit else next(filter(None, suspicions), None)
        return (
            sides,
            [{key: (relative, limit) for key, relative, limit in each} for each in judged],
            suspicion,
        )

    def _first_of(
        self, sides: Sequence[dict[Key, Trace]], found: Sequence[_Apart], ranks: Sequence[int]
    ) -> Divergence | None:
        for key in in_order(set.intersection(*(set(side) for side in sides))):
            reference = sides[0][key]
            for rank, relatives in zip(ranks[1:], found, strict=True):
                relative, limit = relatives.get(key, (0.0, 1.0))
                limit = self._limit or limit
                if relative > limit:
                    kind, names = reported_kind(key[0]), tuple(each[key].name for each in sides)
                    detail = reference.detail or (key[0] if kind != key[0] else "")
                    place = reference.layer
                    return Divergence(self.steps, kind, place, names, rank, relative, limit, detail)
        return None


def _framework_of(model: Any) -> Any:
    """The module that hooks models like this one.

    Raises:
        InvalidArgumentError: there is none.
    """
    name = framework_of(model)
    framework = None if name is None else reader_of(model)
    if name is None or not hasattr(framework, "on_input") or isinstance(model, (list, tuple, Mapping)):
        found = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise InvalidArgumentError(
            f"parity.watch: expected a model of PyTorch, Gluon or Keras, built, found {found}"
        )
    return framework


def _with_zeros(sides: list[dict[Key, Trace]]) -> list[dict[Key, Trace]]:
    """The same, with zeros for gradients that others have: of layers that a rank has not used."""
    keys = {key for side in sides for key in side if key[0] == "gradient"}
    for side in sides:
        for key in keys - side.keys():
            if (weight := side.get(("weights", key[1]))) is not None:
                model = next(other[key] for other in sides if key in other)
                zeros = np.zeros_like(model.sketch)
                side[key] = replace(model, name=weight.name, norm=0.0, sketch=zeros, not_finite=0)
    return sides


def watch(
    model: Any,
    optimizer: Any = None,
    *,
    prefix: str = "parity.watch",
    limit: float | None = None,
    process_set: ProcessSet = global_process_set,
) -> Watch:
    """Watch a model train on all ranks, each in its framework, and report the first divergence.

    Give every rank the same batches and the same weights to begin with (:func:`polyhvd.parity.load`). In each
    step of the optimizer, ranks compare their weights, what their layers were given and made, the gradients
    of weights before these are averaged, the learning rate, what the optimizer keeps for each weight and what
    it has made of it, and running statistics; by sketches, so that little is sent.

    Models run as they are written: Keras' compiled with ``run_eagerly=True``; what is hybridized in
    Gluon runs layer by layer while it is watched. Passes of an evaluation do not count.

    In each step a watch reads each weight twice, and each gradient, activation and state of the optimizer
    once, and gathers 528 bytes for each of these tensors in one collective. That takes about as long as the
    step itself at most; ``polyhvd docs parity`` has figures.

    Args:
        model: of PyTorch, Gluon or Keras, built.
        optimizer: of the model: of PyTorch, a Trainer of Gluon, or the one that a model of Keras was compiled
            with; None: the program calls ``step()`` of what is returned, on every rank.
        prefix: of the names on the wire; must be unique for each watch of a job.
        limit: differences up to this fraction of a tensor's norm are rounding; None: by dtype.
        process_set: the ranks that take part.

    Returns:
        A :class:`Watch`: ``first`` is the first divergence; ``str()`` of the watch describes it.

    Raises:
        InvalidArgumentError: no such model or optimizer, weights are not made yet, or the optimizer has none
            of them; a model of Keras is compiled without ``run_eagerly=True``; an argument that cannot be.

    Example::

        with parity.watch(model, optimizer) as watched:
            train(model, optimizer, batches)
        assert watched.first is None, watched
    """
    return Watch(model, optimizer, prefix, limit, process_set)
