"""Adds up the costs of tests that ``tests/harness/meter.py`` has measured, and measures steps of ``.ci/run``.

``python tools/costs.py dearest`` shows the most expensive tests and files of the suite's last run.
``python tools/costs.py step NAME COMMAND...`` runs a step and copies its output to build/ci/NAME.log.
``python tools/costs.py beside NAME COMMAND...`` is for a step beside others: it only writes the log.
``python tools/costs.py close STATUS`` ends a run of ``.ci/run``. All of it needs only Python.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "costs"  # a file for each pytest process of the suite
STEPS = ROOT / "build" / "ci"
#: Letters that processes write, see tests/harness/counted/sitecustomize.py.
IMPORTS = {"t": "tensorflow", "m": "mxnet", "o": "torch", "j": "jax"}
_HEADINGS = ("CPU s", "wall s", "processes", *IMPORTS.values())
_TESTS_SHOWN, _FILES_SHOWN = 50, 20
_LAST_LINES = 50
_COUNTED = ("failed", "error", "errors", "passed", "skipped")


@dataclass
class Cost:
    """The cost of a test, a file, a folder or a step."""

    cpu_s: float = 0.0
    wall_s: float = 0.0
    events: Counter[str] = field(default_factory=Counter)

    def add(self, row: dict[str, object]) -> None:
        """Add a row of a file of costs."""
        self.cpu_s += float(row["cpu_s"])  # type: ignore[arg-type]
        self.wall_s += float(row["wall_s"])  # type: ignore[arg-type]
        self.events.update(row["events"])  # type: ignore[call-overload]

    def columns(self) -> list[str]:
        """Return the columns of the table."""
        processes = self.events["p"] + self.events["f"]
        counts = [processes, *(self.events[letter] for letter in IMPORTS)]
        return [f"{self.cpu_s:.0f}", f"{self.wall_s:.0f}", *map(str, counts)]


def read(folder: Path) -> list[dict[str, object]]:
    """All rows of the last run."""
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.open()]


def added(rows: Iterable[dict[str, object]], key: Callable[[str], str]) -> dict[str, Cost]:
    """The rows whose names have the same key as one, the dearest first."""
    costs: dict[str, Cost] = {}
    for row in rows:
        costs.setdefault(key(str(row["test"])), Cost()).add(row)
    return dict(sorted(costs.items(), key=lambda item: -item[1].cpu_s))


def folder_of(test: str) -> str:
    """tests/torch for its tests, tests for those that lie in no folder."""
    return test.partition("::")[0].rpartition("/")[0] or test


def table(costs: dict[str, Cost], name: str, total: bool = True) -> str:
    """Costs as text, a line each."""
    if total:
        everything = Cost()
        for cost in costs.values():
            everything.add({"cpu_s": cost.cpu_s, "wall_s": cost.wall_s, "events": cost.events})
        costs = {**costs, "all": everything}
    rows = [[name, *_HEADINGS], *([key, *cost.columns()] for key, cost in costs.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    )


def dearest() -> None:
    """Show what is worth a change."""
    rows = read(FOLDER)
    if not rows:
        sys.exit(f"no costs in {FOLDER}: run make test first")
    tests = dict(list(added(rows, str).items())[:_TESTS_SHOWN])
    files = dict(list(added(rows, lambda test: test.partition("::")[0]).items())[:_FILES_SHOWN])
    print(table(tests, "test", total=False), table(files, "file", total=False), sep="\n\n", end="\n\n")
    print(table(added(rows, folder_of), "folder"))


def step(name: str, command: Sequence[str], shown: bool = True) -> int:
    """Run a step of .ci/run and note what it has cost; its exit status."""
    STEPS.mkdir(parents=True, exist_ok=True)
    log, events = STEPS / f"{name}.log", STEPS / f"{name}.events"
    events.write_text("")
    paths = [str(ROOT / "tests" / "harness" / "counted"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "TEST_COSTS": str(events), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    print(f"==== {name}: {' '.join(command)}", flush=True)
    began = time.monotonic()
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=not shown
    )
    if not shown:  # the run ends it when another step has failed
        signal.signal(signal.SIGTERM, lambda *_: os.killpg(process.pid, signal.SIGTERM))
    assert process.stdout is not None
    with log.open("wb", buffering=0) as file:
        while data := os.read(process.stdout.fileno(), 1 << 16):
            file.write(data)
            if shown:
                sys.stdout.buffer.write(data)
                sys.stdout.flush()
    status = abs(process.wait())
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    row = {
        "test": name,
        "status": status,
        "cpu_s": used.ru_utime + used.ru_stime,
        "wall_s": time.monotonic() - began,
        "events": Counter(events.read_text()),
    }
    with (STEPS / "steps.jsonl").open("a") as rows:
        rows.write(json.dumps(row) + "\n")
    print(f"==== {name}: status {status}, {row['cpu_s']:.0f} CPU s, {row['wall_s']:.0f} s", flush=True)
    return status


def close(status: int) -> None:
    """Show what all steps have cost, the end of one that has failed, and the closing line of the run."""
    steps = STEPS / "steps.jsonl"
    rows = [json.loads(line) for line in steps.open()] if steps.exists() else []
    print(table(added(rows, str), "step"))
    for failed in [row["test"] for row in rows if row["status"]][:1] if status else ():
        lines = (STEPS / f"{failed}.log").read_text(errors="replace").splitlines()[-_LAST_LINES:]
        print(f"==== {failed} has failed; its last lines:", *lines, sep="\n")
    counted: Counter[str] = Counter()
    for path in STEPS.glob("*.log"):
        for total in re.findall(
            r"^=+ total: (.*) in [\d.]+s =+$", path.read_text(errors="replace"), re.MULTILINE
        ):
            counted.update({word: int(number) for number, word in re.findall(r"(\d+) (\w+)", total)})
    shown = [f"{counted[word]} {word}" for word in _COUNTED if word in counted]
    if shown:
        print(f"==== {', '.join(shown)} in {sum(float(row['wall_s']) for row in rows):.2f}s ====")


def main() -> None:
    """See above."""
    verb, *arguments = sys.argv[1:] or ["dearest"]
    if verb == "dearest":
        dearest()
    elif verb == "close":
        close(int(arguments[0]))
    elif verb in ("step", "beside") and len(arguments) > 1:
        sys.exit(step(arguments[0], arguments[1:], shown=verb == "step"))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
