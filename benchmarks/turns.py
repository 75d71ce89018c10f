"""Two ways to do the same, measured in turns, and a row of a table that compares them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence


def in_turns(one: Callable[[], float], other: Callable[[], float], rounds: int) -> tuple[list[float], ...]:
    """Results of both, in rotating order; a first turn of each does not count."""
    kept: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        for number, measure in list(enumerate((one, other)))[:: 1 if turn % 2 else -1]:
            value = measure()
            if turn:
                kept[number].append(value)
    return kept


def paired(label: str, unit: str, mine: Sequence[float], its: Sequence[float]) -> str:
    """A row of the table: both medians, and that of the ratios."""
    ratio = statistics.median(one / other for one, other in zip(mine, its, strict=True))
    return (
        f"| {label}, {unit} | {statistics.median(mine):.3g} | {statistics.median(its):.3g} "
        f"| {ratio:.2f} | {len(mine)} |"
    )
