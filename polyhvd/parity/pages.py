"""What ranks tell each other of a step that is watched, and whether nothing in it needs a closer look."""

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
from polyhvd.parity.traces import ALONE, KINDS, NOISE, Bounds, Facts, Key, Trace, computed_in
from polyhvd.runtime import current

__all__ = ["Page", "Pages", "Plan"]

Array = np.ndarray[Any, Any]
#: Descriptions that are kept, of ranks and of batches of other sizes; then all ranks forget all of them.
_KNOWN_MAX = 256
#: Numbers of the first row that are for the exchange itself.
_HEAD = 3
#: Far more than what the order of a sum can change in float64, and far less than any limit.
_MARGIN = 1e-9


@dataclass(frozen=True)
class Page:
    """All that one rank has to tell of one step.

    Args:
        digest: of the facts, below 2^52, so that a float64 has it exactly.
        facts: of each tensor.
        rows: [1 + tensors, numbers of a sketch]; the first one is for :class:`Pages` to write to.
    """

    digest: int
    facts: tuple[Facts, ...]
    rows: Array

    @property
    def told(self) -> Array:
        """What that rank has told besides, and zeros."""
        return self.rows[0, _HEAD:]

    @property
    def traces(self) -> dict[Key, Trace]:
        """Of each tensor, by what it is called."""
        return {facts.key: Trace.of(facts, row) for facts, row in zip(self.facts, self.rows[1:], strict=True)}


class Pages:
    """Exchanges pages: numbers in each step, and facts in those in which some that are new have come up.

    Args:
        prefix: begins the names on the wire.
        process_set: the ranks that take part.
    """

    def __init__(self, prefix: str, process_set: ProcessSet) -> None:
        self._prefix = prefix
        self._process_set = process_set
        #: By digest.
        self._known: dict[int, tuple[Facts, ...]] = {}
        #: Tells apart what ranks know: the same digests, but where one has begun later than the others.
        self._knowledge = 0

    def exchange(self, mine: Page, told: Array) -> list[Page]:
        """Those of all ranks, in their order.

        Args:
            mine: of this rank; its first row is overwritten.
            told: a few numbers besides.

        Raises:
            HorovodInternalError: a rank was lost.
        """
        mine.rows[0, :_HEAD] = len(mine.facts), mine.digest, self._knowledge
        mine.told[: len(told)] = told
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
        told = allgather_object(mine, name=f"{self._prefix}.facts", process_set=self._process_set)
        if forgets or len(self._known) + len(digests) > _KNOWN_MAX:
            self._known.clear()
        self._known.update(zip(digests, told, strict=True))
        self._knowledge = functools.reduce(operator.xor, self._known)


def _cut(rows: Array) -> list[Array]:
    """The rows of each rank; the first of these says how many follow."""
    sides, at = [], 0
    while at < len(rows):
        end = at + 1 + int(rows[at, 0])
        sides.append(rows[at:end])
        at = end
    return sides


class Plan:
    """Whether pages agree at a glance.

    It accepts only what :func:`polyhvd.parity.traces.differences` takes for rounding, and leaves to that what
    has to be looked at with care.

    Args:
        sides: of each rank, what its tensors are.
        limit: up to which fraction of a tensor's norm a difference is rounding; None: by dtype.
    """

    def __init__(self, sides: Sequence[tuple[Facts, ...]], limit: float | None) -> None:
        reference = sides[0]
        precision, begins = computed_in(sides)
        bounds = Bounds(precision=precision, begins=begins)
        self._limits = np.array([limit or bounds.limit(facts) for facts in reference]) * (1 - _MARGIN)
        self._kinds = np.array([KINDS.index(facts.kind) for facts in reference], np.intp)
        self._noise = np.array([0.0 if facts.kind in ALONE else NOISE for facts in reference])
        places = {facts.key: (place, facts.shape) for place, facts in enumerate(reference)}
        self._orders: list[Array | None] = []
        #: Whether all have tensors of the same keys and shapes: else nothing is accepted.
        self.fits = True
        for side in sides:
            mine = {facts.key: (place, facts.shape) for place, facts in enumerate(side)}
            self.fits = (
                self.fits
                and mine.keys() == places.keys()
                and all(mine[key][1] == shape for key, (_, shape) in places.items())
            )
            order = [mine[facts.key][0] for facts in reference] if self.fits else []
            self._orders.append(None if order == list(range(len(order))) else np.array(order, np.intp))

    def grown(self, largest: Array, side: Array) -> Array:
        """What :func:`polyhvd.parity.traces.grown` keeps, of each of :data:`KINDS`.

        Args:
            largest: before this step.
            side: of the first rank its sketches, one in a row.
        """
        norms = side[:, 0]
        with np.errstate(all="ignore"):
            totals = np.sqrt(np.bincount(self._kinds, norms * norms, len(KINDS)))
        return np.fmax(largest, totals)

    def accepts(self, sides: Sequence[Array]) -> bool:
        """Whether there is nothing but rounding between the first rank and the others.

        Args:
            sides: of each rank its sketches, one in a row.
        """
        if not self.fits:
            return False
        first, *others = (
            side if order is None else side[order] for side, order in zip(sides, self._orders, strict=True)
        )
        apart = [other for other in others if not np.array_equal(other, first)]
        if not apart:
            return True
        with np.errstate(all="ignore"):
            norms = first[:, 0]
            totals = np.sqrt(np.bincount(self._kinds, norms * norms))
            allowed = self._limits * (norms + self._noise * totals[self._kinds])
            for other in apart:
                difference = other[:, 2:] - first[:, 2:]
                relative = np.sqrt(np.einsum("ij,ij->i", difference, difference))
                if not ((relative <= allowed) & (other[:, 1] == first[:, 1])).all():
                    return False
        return True
