"""Functions of ranks that tests of Spark share, and functions that find their processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

END_S = 5.0
BUSY_S = 400.0  # for what takes a second on an idle machine
STEPS = 6


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


# Elastic jobs -----------------------------------------------------------------


class Found(NamedTuple):
    """What a rank returns."""

    process: int
    rank: int
    size: int
    steps: int
    total: float


def note(folder: Path) -> None:
    """Have started() list this process."""
    (folder / f"{time.time():.6f}-{os.getpid()}").touch()


def started(folder: Path) -> list[int]:
    """The processes that have noted themselves, in their order."""
    return [int(path.name.partition("-")[2]) for path in sorted(folder.glob("[0-9]*-*"))]


def train(folder: Path, size: int = 2, lost_rank: int | None = None) -> Found:
    """Count steps until the test lets ``size`` ranks end; one of them may be killed after the second step."""
    import polyhvd.numpy as hvd

    note(folder)
    hvd.init()
    state = hvd.elastic.ArrayState(total=np.zeros(2), steps=0)
    deadline = time.monotonic() + BUSY_S

    @hvd.elastic.run
    def loop(state: Any) -> None:
        may_end = False
        while state.steps < STEPS or hvd.size() < size or not may_end:
            assert time.monotonic() < deadline
            is_full = hvd.size() >= size
            if is_full and state.steps >= 2 and hvd.rank() == lost_rank and not (folder / "lost").exists():
                (folder / "lost").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            mine = np.array([1.0, (folder / "go").exists()])
            one, go = hvd.allreduce(mine, op=hvd.Average, name="ones")
            state.total, state.steps, may_end = state.total + one, state.steps + 1, go == 1
            if is_full and state.steps >= STEPS:
                (folder / f"reached-{hvd.rank()}").touch()
            time.sleep(0.02)
            state.commit()

    loop(state)
    return Found(os.getpid(), hvd.rank(), hvd.size(), state.steps, float(state.total[0]))


def check(found: list[Found], size: int = 2) -> None:
    assert [(item.rank, item.size) for item in found] == [(rank, size) for rank in range(size)]
    assert len({item.steps for item in found}) == 1
    assert all(item.total == item.steps for item in found), "a step for each that was counted"
