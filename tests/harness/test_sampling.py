"""Sampling: which combinations of a test's parameters are not nightly."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sampling import mark_others_nightly


class Item:
    """What sampling needs of a test."""

    def __init__(self, name: str, count: int, **params: Any) -> None:
        self.nodeid = f"{name}[{'-'.join(map(str, params.values()))}]"
        self.callspec = SimpleNamespace(params=params)
        self.markers: list[Any] = [SimpleNamespace(name="sample", args=(count,))]

    def get_closest_marker(self, name: str) -> Any:
        return next((mark for mark in self.markers if mark.name == name), None)

    def add_marker(self, mark: Any) -> None:
        self.markers.append(mark.mark)


def combinations(name: str, count: int) -> list[Item]:
    return [
        Item(name, count, pool=pool, victim=victim, size=size)
        for pool, victim, size in itertools.product("abcd", (0, -1), (1, 20, 300))
    ]


def kept(items: list[Item]) -> list[Item]:
    mark_others_nightly(items)  # type: ignore[arg-type]
    return [item for item in items if item.get_closest_marker("nightly") is None]


def test_every_value_is_used_about_equally_often() -> None:
    found = kept(combinations("a.py::test_a", 8))
    assert len(found) == 8
    for name, values in (("pool", 4), ("victim", 2), ("size", 3)):
        uses = Counter(item.callspec.params[name] for item in found)
        assert len(uses) == values
        assert max(uses.values()) - min(uses.values()) <= 2, uses


def test_tests_of_a_file_that_run_once_use_different_values() -> None:
    items = [item for i in range(4) for item in combinations(f"a.py::test_{i}", 1)]
    assert {item.callspec.params["pool"] for item in kept(items)} == set("abcd")


def test_the_choice_does_not_depend_on_the_order_of_tests() -> None:
    items = [item for i in range(4) for item in combinations(f"a.py::test_{i}", 3)]
    again = [item for i in range(4) for item in combinations(f"a.py::test_{i}", 3)][::-1]
    assert {item.nodeid for item in kept(items)} == {item.nodeid for item in kept(again)}


def test_a_test_without_the_marker_stays() -> None:
    item = Item("a.py::test_a", 1)
    item.markers = []
    assert kept([item]) == [item]


def test_a_framework_s_case_runs_on_one_of_its_numbers_of_ranks() -> None:
    """The hook that drops the others has to run after the one that finds out which tests run on ranks."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "tests/torch/test_torch_amp.py"]
    found = {}
    for ranks in ("one", "all"):
        env = {**os.environ, "TEST_RANKS": ranks}
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=120)
        found[ranks] = [line for line in done.stdout.splitlines() if "::" in line]
    cases = {re.sub(r"np[23]", "np", line) for line in found["all"]}
    assert len(found["one"]) == len(cases) < len(found["all"])
