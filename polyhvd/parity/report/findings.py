"""The value that all forms of the report are made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["SCHEMA", "Check", "Report", "counted", "in_digits"]

#: Of the JSON; the number changes when a field changes its meaning or goes away.
SCHEMA = {"name": "polyhvd.parity", "version": 3}


@dataclass(frozen=True)
class Check:
    """One comparison.

    Args:
        name: in words.
        question: "distribution" (one framework, run in several modes), "frameworks", or "compare" (a call of
            :func:`polyhvd.parity.compare` or a step of :func:`polyhvd.parity.watch` in a script).
        agree: what has come of it.
        first: where the first difference is: step, kind, layer, names, relative, limit and advice; {}: none.
        text: the difference in a sentence.
        suspicious: a layer before the first difference that stands far out of the others, below its limit:
            step, layer, names, relative, limit, others (the largest difference of another layer by its
            limit), rank, text and advice; {}: there is none.
        loss: the largest relative difference of losses; None: losses were not compared.
        worst: the largest relative difference of each kind that was compared.
        margin: the largest difference by its limit; None: none was measured.
        cells: for each step and layer, the largest difference by its limit; of a watch in a script, of the
            first 200 steps.
        times: how often it was made.
    """

    name: str
    question: str
    agree: bool
    first: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    loss: float | None = None
    worst: dict[str, float] = field(default_factory=dict)
    margin: float | None = None
    cells: list[list[float]] = field(default_factory=list)
    times: int = 1
    suspicious: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """All that was found.

    Args:
        case: its name, or the scripts.
        status: the exit status; 0: all agree.
        outcome: its name, such as "agree" and "differ".
        message: what has kept it from being compared, or a summary.
        frameworks: that took part.
        left_out: for which the case has no model, or which cannot compute in its precision.
        steps, ranks: that were asked for.
        optimizer: in numbers.
        precision: in which layers have computed.
        cannot_compute: of those left out, why some cannot compute the case in its precision.
        checks: in the order in which they were made.
        losses: by framework and mode.
        layers: names of layers, by framework; of scripts, by the name of the watch.
        seconds: it took.
        versions: of what is installed.
    """

    case: str
    status: int
    outcome: str
    message: str
    frameworks: list[str]
    left_out: list[str] = field(default_factory=list)
    steps: int = 0
    ranks: int = 0
    optimizer: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    losses: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    layers: dict[str, list[str]] = field(default_factory=dict)
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    precision: str = "float32"
    cannot_compute: dict[str, str] = field(default_factory=dict)

    @property
    def is_of_scripts(self) -> bool:
        """Whether it is of programs of the user's."""
        return not self.frameworks

    @property
    def differing(self) -> list[Check]:
        """The checks that do not agree."""
        return [check for check in self.checks if not check.agree]

    @property
    def suspected(self) -> list[Check]:
        """The checks in which a layer stands out below its limit."""
        return [check for check in self.checks if check.suspicious]


def in_digits(value: float | None) -> str:
    """A difference in two digits; "-": it was not measured."""
    return "-" if value is None else f"{value:.1e}"


def counted(number: int, noun: str) -> str:
    """A number and its noun: "1 step", "2 steps"."""
    return f"{number} {noun}{'s' * (number != 1)}"
