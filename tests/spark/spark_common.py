"""Functions of ranks that tests of Spark share, and functions that find their processes."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

END_S = 5.0
BUSY_S = 400.0  # for what takes a second on an idle machine


def in_world(function: Callable[..., Any], *args: Any) -> Any:
    import polyhvd.numpy as hvd

    hvd.init()
    result = function(hvd, *args)
    hvd.shutdown()
    return result


def sleeping(folder: Path) -> None:
    """Note the process, and wait to be killed."""
    import polyhvd.numpy as hvd

    hvd.init()
    with (folder / f"rank-{hvd.rank()}").open("a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(600)


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it has not come true"
        time.sleep(0.05)


def is_alive(process: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def noted(folder: Path, size: int = 2) -> list[int]:
    """The processes of the ranks, once they are running."""
    files = [folder / f"rank-{rank}" for rank in range(size)]
    wait_until(lambda: all(file.exists() and file.read_text().endswith("\n") for file in files), BUSY_S)
    return [int(file.read_text()) for file in files]


def example_accuracy(name: str) -> float:
    """The accuracy that an example prints at its end."""
    path = Path(__file__).resolve().parents[2] / "examples" / name  # copied beside the tests
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(
        [sys.executable, str(path)], env=environment, capture_output=True, text=True, timeout=BUSY_S
    )
    found = re.search(r"^test accuracy ([\d.]+), 2 ranks$", done.stdout, re.MULTILINE)
    assert found, f"{done.stdout}\n{done.stderr}"
    return float(found[1])
