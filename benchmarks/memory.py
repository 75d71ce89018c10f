"""Resident memory of a rank beyond the interpreter and its tensors, and how it grows with the steps.

``python -m benchmarks.memory``: two ranks on this host, a small model and then a big one.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workloads import resnet50_elements

MB = 1 << 20
SMALL = (256,) * 8
#: 408 MB of gradients, separate tensors: ResNet-50's, four times.
BIG = resnet50_elements() * 4
SETTLE_STEPS = 300
KINDS = ("RssAnon", "RssFile", "RssShmem")


def resident() -> dict[str, int]:
    """Bytes by kind: private memory, mapped files, and shared memory that this rank has touched."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return {kind: int(fields[kind].split()[0]) << 10 for kind in KINDS}


def difference(after: dict[str, int], before: dict[str, int], tensors: int = 0) -> dict[str, float]:
    """In MB, with their sum; the tensors are private memory."""
    found = {kind: (after[kind] - before[kind]) / MB for kind in KINDS}
    found["RssAnon"] -= tensors / MB
    return {**found, "all": sum(found.values())}


def step(hvd: Any, gradients: list[Any], model: str) -> None:
    handles = [
        hvd.allreduce_async_(gradient, name=f"{model}.{i}", op=hvd.Sum)
        for i, gradient in enumerate(gradients)
    ]
    for handle in handles:
        hvd.synchronize(handle)


def measure(steps: int) -> dict[str, Any]:
    """The memory of this rank at each point."""
    begin = resident()
    import polyhvd.numpy as hvd

    imported = resident()
    hvd.init()
    started = resident()
    small = [np.zeros(n, np.float32) for n in SMALL]
    for _ in range(SETTLE_STEPS):
        step(hvd, small, "small")
    settled = resident()
    for _ in range(steps):
        step(hvd, small, "small")
    later = resident()
    big = [np.full(n, 0, np.float32) for n in BIG]
    for _ in range(3):
        step(hvd, big, "big")
    end = resident()
    bytes_of_tensors = sum(gradient.nbytes for gradient in big)
    points = {
        "import": difference(imported, begin),
        "init": difference(started, begin),
        "small model": difference(settled, begin),
        "big model": difference(end, begin, bytes_of_tensors),
        f"growth over {steps} steps": difference(later, settled),
    }
    hvd.barrier()
    gathered = hvd.allgather_object(points)
    rank = hvd.rank()
    hvd.shutdown()
    return {"rank": rank, "ranks": gathered}


def table(ranks: list[dict[str, dict[str, float]]]) -> str:
    """MB of the rank that holds most, at each point."""
    lines = ["| MB, of the largest rank | private | files | shared | all |", "|---|---:|---:|---:|---:|"]
    for point in ranks[0]:
        largest = max((rank[point] for rank in ranks), key=lambda kinds: kinds["all"])
        cells = " | ".join(f"{value:.2f}" for value in largest.values())
        lines.append(f"| {point} | {cells} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000, help="of the small model (100000)")
    parser.add_argument("--np", type=int, default=2, metavar="N", help="ranks (2)")
    parser.add_argument("--json", action="store_true", help="print every rank's figures instead of a table")
    options = parser.parse_args()
    if "POLYHVD_RANK" in os.environ:
        found = measure(options.steps)
        if found["rank"] == 0:
            print(json.dumps(found["ranks"]) if options.json else table(found["ranks"]))
        return 0
    command = [sys.executable, "-m", "polyhvd.launch", "--no-tag", "-np", str(options.np), sys.executable]
    return subprocess.call([*command, "-m", "benchmarks.memory", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
