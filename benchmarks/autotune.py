"""How near the autotuner comes to the best of a grid, on three workloads, and what either gains.

``python -m benchmarks.autotune``: for each workload a job of two ranks that tunes itself, as users' jobs do,
then one that tries a grid and measures its best, what the search chose, and the defaults, in turns.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workloads import KB, MB, resnet50_elements
from polyhvd import _core
from polyhvd.observe.autotune import GRID

#: Elements of the tensors of a step; float32, one operation each.
WORKLOADS: dict[str, tuple[int, ...]] = {
    "161 gradients of ResNet-50, 102 MB": resnet50_elements(),
    "400 tensors of 4 KB": (KB,) * 400,
    "8 tensors of 16 MB": (4 * MB,) * 8,
}
SAMPLES = 40
DEFAULTS = {
    "fusion_bytes_max": 128 << 20,
    "cycle_us": 1000,
    "chunk_bytes": 128 << 10,
    "direct_bytes_max": 128 << 10,
}
#: Values of the autotuner's own grid, of which all combinations are tried.
TRIED = {
    "fusion_bytes_max": (1 << 20, 1 << 24, 1 << 27),
    "cycle_us": (0, 200, 1000),
    "chunk_bytes": (1 << 13, 1 << 15, 1 << 17),
    "direct_bytes_max": (1 << 12, 1 << 15, 1 << 17, 1 << 19),
}
PASSES = 2
ROUNDS = 15
BLOCK_SECONDS = 0.08
STEPS_BETWEEN_LOOKS = 20

Values = dict[str, int]


class Job:
    """This rank's tensors, and steps with them."""

    def __init__(self, elements: Sequence[int]) -> None:
        import polyhvd.numpy as hvd

        self.hvd = hvd
        hvd.init()
        self._tensors = [np.ones(n, np.float32) for n in elements]
        self._names = [f"gradient.{i}" for i in range(len(elements))]

    def step(self) -> None:
        handles = [
            self.hvd.allreduce_async_(tensor, name=name, op=self.hvd.Average)
            for tensor, name in zip(self._tensors, self._names, strict=True)
        ]
        for handle in handles:
            self.hvd.synchronize(handle)

    def agreed(self, value: float) -> float:
        """Rank 0's."""
        return float(self.hvd.broadcast(np.array([value]), 0, name="agreed")[0])

    def seconds(self, values: Values, steps: int) -> float:
        """Return the seconds of a step with these values, which all ranks use by then."""
        from polyhvd.runtime import current

        if self.hvd.rank() == 0:
            current.world().engine.tune(_core.Tuning(**values))
        self.hvd.barrier()
        self.step()
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        return (time.perf_counter() - begin) / steps


def search(job: Job, log: Path) -> None:
    """Train until the autotuner has chosen."""
    chosen = 0.0
    while not chosen:
        for _ in range(STEPS_BETWEEN_LOOKS):
            job.step()
        chosen = job.agreed(float(job.hvd.rank() == 0 and bool(_chosen(log))))
    job.hvd.shutdown()


def _chosen(log: Path) -> Values | None:
    with log.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["phase"] == "best":
                return {name: int(row[name]) for name in GRID}
    return None


def compare(job: Job, found: Values) -> dict[str, Any] | None:
    """Try the grid, then its best, what was found and the defaults in turns; what came out, on rank 0."""
    for _ in range(3):
        job.step()
    steps = max(1, round(job.agreed(BLOCK_SECONDS / job.seconds(DEFAULTS, 5))))
    grid = [dict(zip(TRIED, values, strict=True)) for values in itertools.product(*TRIED.values())]
    times: list[list[float]] = [[] for _ in grid]
    for turn in range(PASSES):
        order = list(range(len(grid)))
        random.Random(turn).shuffle(order)  # the same on all ranks
        for i in order:
            times[i].append(job.seconds(grid[i], steps))
    best = grid[int(job.agreed(min(range(len(grid)), key=lambda i: min(times[i]))))]
    ways = {"best of the grid": best, "found": found, "defaults": DEFAULTS}
    turns: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, values in ways.items():
            turns[way].append(job.seconds(values, steps))
    rank = job.hvd.rank()
    job.hvd.shutdown()
    if rank != 0:
        return None
    medians = {way: statistics.median(each) * 1e3 for way, each in turns.items()}
    return {"ms": medians, "values": ways, "points": len(grid), "steps": steps}


def _launch(arguments: Sequence[str], environment: dict[str, str]) -> None:
    launcher = [sys.executable, "-m", "polyhvd.launch", "-np", "2"]
    command = [*launcher, sys.executable, "-m", "benchmarks.autotune", *arguments]
    subprocess.run(command, check=True, env=os.environ | environment)


def measure(workload: str, folder: Path) -> dict[str, Any]:
    """Both jobs of a workload; what the second came to."""
    log, out = folder / "log.csv", folder / "out.json"
    _launch(
        ["--search", workload, str(log)],
        {
            "POLYHVD_AUTOTUNE": "1",
            "POLYHVD_AUTOTUNE_LOG": str(log),
            "POLYHVD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": str(SAMPLES),
        },
    )
    found = _chosen(log)
    assert found is not None
    _launch(["--compare", workload, json.dumps(found), str(out)], {})
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.autotune", description=__doc__)
    parser.add_argument("--search", nargs=2, metavar=("WORKLOAD", "LOG"), help=argparse.SUPPRESS)
    parser.add_argument("--compare", nargs=3, metavar=("WORKLOAD", "VALUES", "OUT"), help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there, too")
    options = parser.parse_args()
    if options.search:
        search(Job(WORKLOADS[options.search[0]]), Path(options.search[1]))
        return 0
    if options.compare:
        result = compare(Job(WORKLOADS[options.compare[0]]), json.loads(options.compare[1]))
        if result is not None:
            Path(options.compare[2]).write_text(json.dumps(result))
        return 0
    results = {}
    print("| ms a step | best of the grid | found in 40 samples | defaults | found / best |")
    print("|---|---:|---:|---:|---:|", flush=True)
    for workload in WORKLOADS:
        with tempfile.TemporaryDirectory() as folder:
            results[workload] = measure(workload, Path(folder))
        best, found, defaults = (f"{ms:.3g}" for ms in results[workload]["ms"].values())
        ratio = results[workload]["ms"]["found"] / results[workload]["ms"]["best of the grid"]
        print(f"| {workload} | {best} | {found} | {defaults} | {ratio:.2f} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
