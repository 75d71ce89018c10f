"""Counts the instructions of a small allreduce from submit to done, which the machine's load hardly changes.

``python -m benchmarks.instructions``: runs build/core/plain/instructions under callgrind and compares with
benchmarks/instructions.json; --keep writes that file. ``make instructions`` builds the program first.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "build" / "core" / "plain" / "instructions"
KEPT = ROOT / "benchmarks" / "instructions.json"
CALLS = 500
RANKS = (1, 2)
#: How far a count may rise: by number of ranks.
TOLERANCE = {1: 0.03, 2: 0.3}
#: Two ranks wait for each other, and poll more often on a busy machine, by up to a half. The least of several
#: counts has no such polls.
TRIES = 6
COUNTED = "*::counted_calls*"


def compiler() -> str:
    """Return the compilers that the program's ELF comment names."""
    comment = subprocess.run(
        ["readelf", "-p", ".comment", str(PROGRAM)], capture_output=True, text=True, check=True
    ).stdout
    return " ".join(sorted(set(re.findall(r"\]\s+(.+)", comment))))


def count(ranks: int) -> int:
    """Instructions of one call by rank 0's thread, in the mean."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        subprocess.run(
            [
                "valgrind",
                "--tool=callgrind",
                f"--callgrind-out-file={out}",
                f"--toggle-collect={COUNTED}",
                "--fair-sched=yes",
                str(PROGRAM),
                str(ranks),
                str(CALLS),
            ],
            check=True,
            capture_output=True,
        )
        summary = re.search(r"^(?:summary|totals): (\d+)", out.read_text(), re.MULTILINE)
        assert summary is not None
        return round(int(summary[1]) / CALLS)


def least(ranks: int, limit: float) -> int:
    """The least of several counts; the first one that is within the limit is enough."""
    found = count(ranks)
    for _ in range(TRIES - 1):
        if found <= limit:
            break
        found = min(found, count(ranks))
    return found


def measured(before: dict[str, Any] | None = None) -> dict[str, Any]:
    """The content of instructions.json.

    Args:
        before: an earlier one, above whose limits counts are repeated; None: repeat all counts.
    """
    limits = {ranks: 0.0 if before is None else _limit(before, ranks) for ranks in RANKS}
    return {
        "what": "instructions of a cached allreduce of 1 KB, from submit to done, blocking, in C++",
        "compiler": compiler(),
        "by_ranks": {str(ranks): least(ranks, limits[ranks]) for ranks in RANKS},
    }


def _limit(before: dict[str, Any], ranks: int) -> float:
    return float(before["by_ranks"][str(ranks)]) * (1 + TOLERANCE[ranks])


def kept() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(KEPT.read_text())
    return loaded


def risen(found: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """A line for each count that has risen more than it may."""
    lines = []
    for ranks, was in before["by_ranks"].items():
        now = found["by_ranks"][ranks]
        if now > _limit(before, int(ranks)):
            lines.append(
                f"{now} instructions by {ranks} ranks, {was} before: find out why, or say make instructions"
            )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instructions", description=__doc__)
    parser.add_argument(
        "--keep", action="store_true", help="write the counts to benchmarks/instructions.json"
    )
    options = parser.parse_args()
    for need in ("valgrind", "readelf"):
        if shutil.which(need) is None:
            print(f"instructions: {need} is not installed", file=sys.stderr)
            return 1
    before = None if options.keep else kept()
    found = measured(before)
    print(json.dumps(found, indent=1))
    if before is None:
        KEPT.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    if found["compiler"] != before["compiler"]:
        print(f"not compared: the kept counts are of {before['compiler']}")
        return 0
    print("\n".join(lines := risen(found, before)))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
