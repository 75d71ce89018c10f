"""Orders of ``polyhvd parity`` to its processes, and their records. Only values."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from polyhvd.parity.case import FRAMEWORKS, BadCaseError, Case, from_file
from polyhvd.parity.catalogue import CASES
from polyhvd.parity.traces import Key, Trace

__all__ = ["FRAMEWORKS", "MODES", "Order", "Run", "Step", "cannot_compute"]

#: One process without polyhvd; one rank; all ranks, each of which has a part of the batch.
MODES = ("plain", "one", "all")
#: Of one seed of the catalogue's data.
_STEPS_MAX = 1_000_000


def cannot_compute(framework: str, precision: str, kinds: Collection[str] = ()) -> str:
    """Why a framework cannot compute a case in a type of numbers on processors; empty: it can.

    Args:
        framework: one of :data:`FRAMEWORKS`.
        precision: one of :data:`polyhvd.parity.case.PRECISIONS`.
        kinds: of layers that the case has.
    """
    if precision == "float32":
        return ""
    if "max_pool" in kinds:
        return "max pooling selects any of several equal numbers, which are common in half types"
    return FRAMEWORKS[framework].cannot_compute(precision, kinds)


@dataclass(frozen=True)
class Order:
    """The request, as every process reads it.

    Args:
        case: a name of the catalogue, or the path of a file.
        options: of :class:`polyhvd.parity.case.Optimizer`, instead of those of the case.
        steps: how many.
        ranks: of each framework.
        folder: for what the processes write.
        seed: of the weights; of the catalogue's data, too.
        precision: instead of that of the case; empty: that.
    """

    case: str
    options: dict[str, Any]
    steps: int
    ranks: int
    folder: str
    seed: int = 0
    precision: str = ""

    def load(self) -> Case:
        """The case, with the options that were asked for.

        Raises:
            BadCaseError: there is none.
        """
        case = CASES.get(self.case) or from_file(Path(self.case))
        try:
            merged = replace(case.optimizer, **self.options)
        except ValueError as error:
            raise BadCaseError(str(error)) from error
        if self.case in CASES and self.seed:
            batch, first = case.batch, self.seed * _STEPS_MAX
            case = replace(case, batch=lambda framework, step: batch(framework, first + step))
        return replace(case, optimizer=merged, precision=self.precision or case.precision)


@dataclass
class Step:
    """One step of a run.

    Args:
        loss: mean over this rank's part of the batch.
        rows: of that part.
        traces: of all that was seen.
    """

    loss: float
    rows: int
    traces: dict[Key, Trace] = field(default_factory=dict)


@dataclass
class Run:
    """The records of one rank in one mode. Can be pickled.

    Args:
        framework, mode: which.
        weights: name, role, common shape, dtype and whether it is trained, of each.
        layers: the names of layers with weights, in order.
        steps: in order.
        problem: what has ended it early; empty: nothing.
    """

    framework: str
    mode: str
    weights: list[tuple[str, str, tuple[int, ...], str, bool]] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    problem: str = ""
