"""Which combinations of a test's parameters make test runs; make nightly runs all of them.

A test with the marker ``sample(count)`` runs with ``count`` of its combinations, and the others get the
marker ``nightly``. Every value of every parameter is used about equally often, in each test and in each file.
The choice depends only on the names of the tests.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable

import pytest

__all__ = ["declare", "mark_others_nightly"]


def declare(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line(
        "markers", "sample(count): make test runs this many of the test's combinations of parameters"
    )


def mark_others_nightly(items: Iterable[pytest.Item]) -> None:
    """Add the marker ``nightly`` to the combinations that are not chosen."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    uses: dict[str, Counter[tuple[str, str]]] = {}  # of the values in each file
    for name, combinations in sorted(tests.items()):
        marker = combinations[0].get_closest_marker("sample")
        assert marker is not None
        kept = _choose(combinations, *marker.args, uses.setdefault(name.partition("::")[0], Counter()))
        for item in combinations:
            if item not in kept:
                item.add_marker(pytest.mark.nightly)


def _choose(
    combinations: list[pytest.Item], count: int, in_file: Counter[tuple[str, str]]
) -> list[pytest.Item]:
    """Take, ``count`` times, the combination whose values this test has used least.

    Of several the one whose values its file has used least is taken, then the first by a hash of the names.
    """
    left = sorted(combinations, key=lambda item: zlib.crc32(item.nodeid.encode()))
    uses: Counter[tuple[str, str]] = Counter()

    def used(item: pytest.Item) -> tuple[int, int]:
        values = _values(item)
        return sum(uses[value] for value in values), sum(in_file[value] for value in values)

    kept: list[pytest.Item] = []
    while left and len(kept) < count:
        best = min(left, key=used)
        left.remove(best)
        kept.append(best)
        uses.update(_values(best))
        in_file.update(_values(best))
    return kept


def _values(item: pytest.Item) -> list[tuple[str, str]]:
    """The parameters of a combination, with their values."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return []
    return [(name, getattr(value, "__name__", str(value))) for name, value in callspec.params.items()]
