"""The data that ranks exchange for a step that is watched, and whether any of it needs a closer look."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polyhvd import _core
from polyhvd.collectives.adapter import OpKind
from polyhvd.collectives.objects import allgather_object
from polyhvd.collectives.operation import process_set_id
from polyhvd.collectives.process_sets import ProcessSet
from polyhvd.parity.limits import (
    CARRIED,
    FORWARD,
    GROWTH,
    IDLE_KINDS,
    KINKS,
    NOTABLE,
    Bounds,
    computed_in,
    idle_below,
    units_of,
)
from polyhvd.parity.traces import BACKWARD, KINDS, NOISE, SCALED_BY_ITSELF, Facts, Key, Trace, in_order
from polyhvd.runtime import current

__all__ = ["Page", "Pages", "Plan"]

Array = np.ndarray[Any, Any]
#: Descriptions that are kept, of ranks and of batches of other sizes; then all ranks forget all of them.
_KNOWN_MAX = 256
#: Numbers of the first row that are for the exchange itself.
_HEAD = 3
#: Far more than what the order of a sum can change in float64, and far less than any limit.
_MARGIN = 1e-9
_GRADIENT = KINDS.index("gradient")


@dataclass(frozen=True)
class Page:
    """The data that one rank sends for one step.

    Args:
        digest: of the facts, below 2^52, so that a float64 has it exactly.
        facts: of each tensor.
        rows: [1 + tensors, numbers of a sketch]; the first one is for :class:`Pages` to write to.
    """

    digest: int
    facts: tuple[Facts, ...]
    rows: Array

    @property
    def extra(self) -> Array:
        """Further numbers that this rank sends, followed by zeros."""
        return self.rows[0, _HEAD:]

    @property
    def traces(self) -> dict[Key, Trace]:
        """The trace of each tensor, by its key."""
        return {facts.key: Trace.of(facts, row) for facts, row in zip(self.facts, self.rows[1:], strict=True)}


class Pages:
    """Exchanges pages: numbers in each step, and facts only in steps that have new ones.

    Args:
        prefix: begins the names on the wire.
        process_set: the ranks that take part.
    """

    def __init__(self, prefix: str, process_set: ProcessSet) -> None:
        self._prefix = prefix
        self._process_set = process_set
        #: By digest.
        self._known: dict[int, tuple[Facts, ...]] = {}
        #: A checksum of the known digests: it differs on a rank that has begun later than the others.
        self._knowledge = 0

    def exchange(self, mine: Page, extra: Array) -> list[Page]:
        """Return the pages of all ranks, in their order.

        Args:
            mine: of this rank; its first row is overwritten.
            extra: a few further numbers.

        Raises:
            HorovodInternalError: a rank was lost.
        """
        mine.rows[0, :_HEAD] = len(mine.facts), mine.digest, self._knowledge
        mine.extra[: len(extra)] = extra
        world = self._process_set.world or current.world()
        handle = world.engine.submit(
            OpKind.ALLGATHER,
            f"{self._prefix}.step",
            (mine.rows,),
            None,
            process_set=process_set_id(self._process_set),
            blocking=True,
        )
        handle.wait()
        buffer = np.frombuffer(memoryview(handle.buffers()[0]), np.float64)
        sides = _cut(buffer.reshape(-1, _core.SKETCH_NUMBERS))
        digests = [int(rows[0, 1]) for rows in sides]
        # Both are the same on every rank.
        is_common = all(rows[0, 2] == sides[0][0, 2] for rows in sides)
        if not is_common or not self._known.keys() >= set(digests):
            self._learn(mine.facts, digests, forgets=not is_common)
        return [Page(digest, self._known[digest], rows) for digest, rows in zip(digests, sides, strict=True)]

    def _learn(self, mine: tuple[Facts, ...], digests: Sequence[int], *, forgets: bool) -> None:
        facts = allgather_object(mine, name=f"{self._prefix}.facts", process_set=self._process_set)
        if forgets or len(self._known) + len(digests) > _KNOWN_MAX:
            self._known.clear()
        self._known.update(zip(digests, facts, strict=True))
        self._knowledge = functools.reduce(operator.xor, self._known)


def _cut(rows: Array) -> list[Array]:
    """The rows of each rank; the first one has the number of those that follow."""
    sides, at = [], 0
    while at < len(rows):
        end = at + 1 + int(rows[at, 0])
        sides.append(rows[at:end])
        at = end
    return sides


class Plan:
    """Decides quickly whether pages agree.

    It accepts only differences that :func:`polyhvd.parity.limits.differences` attributes to rounding. That
    function checks all others.

    Args:
        sides: of each rank, what its tensors are.
        limit: up to which fraction of a tensor's norm a difference is rounding; None: by dtype and terms.
    """

    def __init__(self, sides: Sequence[tuple[Facts, ...]], limit: float | None) -> None:
        places = {facts.key: (place, facts) for place, facts in enumerate(sides[0])}
        #: Rows of the first rank, causes before effects.
        reference = [places[key][1] for key in in_order(places)]
        precision, begins = computed_in(sides)
        known = Bounds(precision=precision, begins=begins).limits(reference)
        limits = np.array([(limit, limit) if limit else known[facts.key] for facts in reference])
        self._own, self._most = (limits * (1 - _MARGIN)).T if reference else np.zeros((2, 0))
        self._kinds = np.array([KINDS.index(facts.kind) for facts in reference], np.intp)
        self._noise = np.array([0.0 if facts.kind in SCALED_BY_ITSELF else NOISE for facts in reference])
        self._is_carried, self._is_forward, is_backward, self._may_idle = (
            np.array([facts.kind in kinds for facts in reference], bool)
            for kinds in (CARRIED, FORWARD, BACKWARD, IDLE_KINDS)
        )
        looks = limit is None and precision == "float32"  # for a layer that is suspicious
        self._below = np.array(
            [NOTABLE if looks and each.kind == "activation" else 1.0 for each in reference]
        )
        self._near = self._own * self._below
        self._units = units_of(reference)
        backward = [(facts.kind, facts.layer) for facts in reference if facts.kind in BACKWARD]
        self._backward = np.flatnonzero(is_backward)
        #: Of gradients, which of all layers and kinds they are of.
        groups = {group: number for number, group in enumerate(dict.fromkeys(backward))}
        self._groups = np.array([groups[group] for group in backward], np.intp)
        # Of each row that of the gradient by which a weight is without effect; the last one is of no weight.
        gradients = {each.place: row for row, each in enumerate(reference) if each.kind == "gradient"}
        self._gradients = np.array([gradients.get(facts.place, -1) for facts in reference], np.intp)
        self._idle_below = np.array(
            [idle_below(precision, facts.dtype) * (facts.kind == "gradient") for facts in reference]
        )
        self._layers = np.array([facts.layer for facts in reference], np.intp)
        self._orders: list[Array] = []
        #: Whether all have tensors of the same keys and shapes: else nothing is accepted.
        self.fits = True
        for side in sides:
            mine = {facts.key: (place, facts.shape) for place, facts in enumerate(side)}
            self.fits = (
                self.fits
                and mine.keys() == places.keys()
                and all(mine[key][1] == facts.shape for key, (_, facts) in places.items())
            )
            order = [mine[facts.key][0] for facts in reference] if self.fits else []
            self._orders.append(np.array(order, np.intp))
        self._first = np.array([places[facts.key][0] for facts in reference], np.intp)

    def grown(self, largest: Array, side: Array) -> Array:
        """The result of :func:`polyhvd.parity.limits.grown`, of each of :data:`KINDS`.

        Args:
            largest: before this step.
            side: of the first rank its sketches, one in a row.
        """
        return np.fmax(largest, self._totals(side[self._first, 0]))

    def _totals(self, norms: Array) -> Array:
        """The norm of all tensors of each kind together."""
        with np.errstate(all="ignore"):
            totals: Array = np.sqrt(np.bincount(self._kinds, norms * norms, len(KINDS)))
        return totals

    def accepts(self, sides: Sequence[Array], largest: Array | None = None) -> bool:
        """Return whether there is nothing but rounding between the first rank and the others.

        Args:
            sides: of each rank its sketches, one in a row.
            largest: what :meth:`grown` has returned for this step; None: this step is the first one.
        """
        if not self.fits:
            return False
        first, *others = (side[order] for side, order in zip(sides, self._orders, strict=True))
        apart = [other for other in others if not np.array_equal(other, first)]
        if not apart:
            return True
        norms = first[:, 0]
        totals = self._totals(norms)
        scales = totals if largest is None else np.fmax(totals, largest)
        with np.errstate(all="ignore"):
            beside = norms + self._noise * scales[self._kinds]
            far = [each for other in apart if (each := self._beyond_own(first, other, beside)) is not None]
            if not far:
                return True
            own = self._own_of(norms, totals, scales)
            return all(self._agrees(first, *each, own, totals[_GRADIENT]) for each in far)

    def _beyond_own(self, first: Array, other: Array, scales: Array) -> tuple[Array, Array] | None:
        """A side and its relative differences; None: all are within their own rounding."""
        difference = other[:, 2:] - first[:, 2:]
        distance = np.sqrt(np.einsum("ij,ij->i", difference, difference))
        agree = (distance <= self._near * scales) & (other[:, 1] == first[:, 1])
        return None if agree.all() else (other, np.where(distance == 0.0, 0.0, distance / scales))

    def _own_of(self, norms: Array, totals: Array, scales: Array) -> Array:
        """By how much each tensor may differ by the rounding of its sums."""
        rows = self._backward
        mine, kinds = norms[rows], self._kinds[rows]
        of_layers = np.sqrt(np.bincount(self._groups, mine * mine))[self._groups]
        own: Array = self._own.copy()
        own[rows] *= np.where(mine > 0, scales[kinds] / totals[kinds] * of_layers / mine, 1.0)
        return own

    def _agrees(self, first: Array, other: Array, relative: Array, own: Array, gradients: float) -> bool:
        are_idle = np.fmax(first[:, 0], other[:, 0]) < self._idle_below * gradients
        are_idle = np.concatenate([are_idle, [False]])
        seeming = self._may_idle & are_idle[self._gradients]
        carried = np.where(self._is_carried & np.isfinite(relative) & ~seeming, relative, 0.0)
        if seeming.any():
            of_layers = np.isin(self._layers, self._layers[seeming]) & self._is_forward
            carried[of_layers] = 0.0
        before = np.maximum.accumulate(np.concatenate([[0.0], carried[:-1]]))
        limits = np.minimum(own + GROWTH * before, self._most)
        if carried[self._is_forward].max(initial=0.0) * self._units >= KINKS:
            limits[self._backward] = self._most[self._backward]
        agree = ((relative <= limits * self._below) | seeming) & (other[:, 1] == first[:, 1])
        return bool(agree.all())
