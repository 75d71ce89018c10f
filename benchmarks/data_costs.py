"""Costs of a loader besides its speed: ``python -m benchmarks.data_costs COST FOLDER`` prints JSON.

FOLDER has the files of :func:`benchmarks.data.write`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from polyhvd.data import ParquetLoader, write_parquet

FILES, CALL_S = 10_000, 0.01
#: Bytes of the data set whose epoch shows how much memory is used.
LARGE = 10 << 30


def resident() -> float:
    """Megabytes of memory that are this process's."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line)
    return int(line.split()[1]) / 1024


def files(folder: Path) -> dict[str, float]:
    """Seconds until the loader of many files is made, until its first batch, and from there to that of the
    next epoch, where each call of the file system takes 10 ms."""
    from fsspec.implementations.local import LocalFileSystem

    class Slow(LocalFileSystem):  # type: ignore[misc]
        protocol = ("slow",)
        cachable = False

        def ls(self, *args: Any, **options: Any) -> Any:
            time.sleep(CALL_S)
            return super().ls(*args, **options)

        def info(self, *args: Any, **options: Any) -> Any:
            time.sleep(CALL_S if "path" not in options and isinstance(args[0], str) else 0)
            return super().info(*args, **options)

        def _open(self, *args: Any, **options: Any) -> Any:
            time.sleep(CALL_S)
            return super()._open(*args, **options)

    many = folder / "many"
    many.mkdir()
    write_parquet({"x": np.arange(10)}, many / "0.parquet")
    for number in range(1, FILES):
        os.link(many / "0.parquet", many / f"{number}.parquet")
    begin = time.perf_counter()
    loader = ParquetLoader(str(many), batch_size=64, placement=lambda: (0, 1), filesystem=Slow())
    made = time.perf_counter()
    next(iter(loader))
    first = time.perf_counter()
    loader.set_epoch(1)
    next(iter(loader))
    return {"open_s": made - begin, "first_s": first - begin, "next_s": time.perf_counter() - first}


def memory(folder: Path) -> dict[str, float]:
    """Megabytes by which the process grows over its imports in an epoch, and those of the files."""
    large = folder / "large"
    large.mkdir()
    sources = sorted((folder / "rows").glob("*.parquet"))
    count = max(1, LARGE // sum(path.stat().st_size for path in sources))
    for copy in range(count):
        for path in sources:
            os.link(path, large / f"{copy}-{path.name}")
    for _ in ParquetLoader(folder / "rows", batch_size=128, placement=lambda: (0, 1)):
        break  # what is imported when it is needed
    before = most = resident()
    for number, _ in enumerate(ParquetLoader(large, batch_size=128, placement=lambda: (0, 1))):
        if number % 50 == 0:
            most = max(most, resident())
    total = sum(path.stat().st_size for path in large.iterdir())
    return {"grown_mb": most - before, "files_mb": total / (1 << 20)}


def waiting(folder: Path) -> dict[str, float]:
    """The part of the time that steps of a few milliseconds have waited for their data."""
    import polyhvd.numpy as hvd

    hvd.init()
    weights = np.ones((784, 150), np.float32)
    loader = ParquetLoader(folder / "rows", batch_size=128, seed=1)
    for _ in range(2):  # the first epoch begins with an empty queue
        before, begin = hvd.counters()["data_wait_us"], time.perf_counter()
        for batch in loader:
            x = batch["image"].astype(np.float32)
            weights -= 1e-9 * (x.T @ (x @ weights))
        steps_s = time.perf_counter() - begin
        waited_s = 1e-6 * (hvd.counters()["data_wait_us"] - before)
    hvd.shutdown()
    return {"part": waited_s / steps_s}


COSTS: dict[str, Callable[[Path], dict[str, float]]] = {"files": files, "memory": memory, "waiting": waiting}


if __name__ == "__main__":
    print(json.dumps(COSTS[sys.argv[1]](Path(sys.argv[2]))))
