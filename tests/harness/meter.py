"""Measures the cost of each test: CPU and wall seconds, processes started, and frameworks imported.

A pytest plugin, enabled if COSTS names a file: each test adds a line of JSON to it. ``tools/costs.py`` adds
them up. CPU seconds are user and system time of the pytest process and of its descendants. The work of a
long-lived process between two tests counts for the second one.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import IO

import pytest

_COUNTED = Path(__file__).resolve().parent / "counted"
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_SHORT_S = 0.05  # reading /proc costs some milliseconds: tests of a file that are shorter share it


def cpu_seconds(root: int) -> float:
    """User and system time of a process, of its descendants, and of those that they have waited for."""
    parents: dict[int, int] = {}
    times: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as stat:
                fields = stat.read().rpartition(b")")[2].split()
        except OSError:  # it has just ended
            continue
        parents[int(name)] = int(fields[1])
        times[int(name)] = sum(int(field) for field in fields[11:15])
    belongs = {root: True, 0: False}

    def is_below(pid: int) -> bool:
        if pid not in belongs:
            belongs[pid] = is_below(parents.get(pid, 0))
        return belongs[pid]

    return _TICK_S * sum(ticks for pid, ticks in times.items() if is_below(pid))


class Costs:
    """Rows of a session, written as tests end."""

    def __init__(self, path: str) -> None:
        self._rows: IO[str] = open(path, "w")  # noqa: SIM115
        handle, self._events = tempfile.mkstemp(prefix="polyhvd-costs-")
        os.close(handle)
        os.chmod(self._events, 0o666)  # some tests' processes have another user
        self._outer = os.environ.get("TEST_COSTS", "")
        os.environ["TEST_COSTS"] = self._events
        paths = [str(_COUNTED), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        self._seen = 0
        self._cpu_s = cpu_seconds(os.getpid())
        self._wall_s = time.monotonic()

    def add(self, name: str) -> None:
        """Write what has been spent since the last row."""
        now, cpu_s = time.monotonic(), cpu_seconds(os.getpid())
        with open(self._events, "rb") as events:
            events.seek(self._seen)
            letters = events.read().decode()
        self._seen += len(letters)
        row = {
            "test": name,
            # The sum shrinks when a process ends whose parent does not wait for it.
            "cpu_s": round(max(0.0, cpu_s - self._cpu_s), 2),
            "wall_s": round(now - self._wall_s, 3),
            "events": {letter: letters.count(letter) for letter in sorted(set(letters))},
        }
        self._rows.write(json.dumps(row) + "\n")
        self._rows.flush()
        self._cpu_s, self._wall_s = cpu_s, now

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        result = yield
        last_of_file = nextitem is None or nextitem.path != item.path
        if last_of_file or time.monotonic() - self._wall_s > _SHORT_S:
            self.add(item.nodeid)
        return result

    def pytest_collection_finish(self) -> None:
        self.add("(collecting)")

    def close(self) -> None:
        self.add("(closing)")
        self._rows.close()
        if self._outer:  # of the step that this session is a part of
            with open(self._events) as events, open(self._outer, "a") as outer:
                outer.write(events.read())
        os.unlink(self._events)


def register(config: pytest.Config) -> None:
    """Measure this session if it is asked for."""
    if path := os.environ.pop("COSTS", ""):
        costs = Costs(path)
        config.pluginmanager.register(costs, "costs")
        config.add_cleanup(costs.close)
