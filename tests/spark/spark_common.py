"""Functions of ranks that tests of Spark share, and functions that find their processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import ranks_alive
from ranks_alive import wait_until

from polyhvd.data import write_parquet

END_S = 5.0
JVM_END_S = 60.0
BUSY_S = 400.0  # for what takes a second on an idle machine
STEPS = 6
#: Of a plane, on both sides of which are the points of the tests of estimators.
WEIGHTS = np.array([1.0, -2.0, 3.0, 0.5])


def same_in_all_versions(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test of what does not depend on Spark's version: for Spark 3 it is nightly."""
    import pyspark  # not where conftest.py imports this module without Spark

    return test if int(pyspark.__version__.partition(".")[0]) >= 4 else pytest.mark.nightly(test)


def end_session() -> None:
    """End the session of this process and its JVM, since another session would have its settings."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if SparkContext._active_spark_context is None:
        return
    SparkSession.builder.getOrCreate().stop()
    gateway = SparkContext._gateway
    gateway.shutdown()
    gateway.proc.stdin.close()  # with which the JVM ends
    gateway.proc.wait(JVM_END_S)
    SparkContext._gateway = SparkContext._jvm = None


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


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def noted(folder: Path, size: int = 2) -> list[int]:
    """The processes of the ranks, once they are running."""
    files = [folder / f"rank-{rank}" for rank in range(size)]

    def are_noted() -> bool:
        return all(file.exists() and file.read_text().endswith("\n") for file in files)

    wait_until(are_noted, "the ranks run", BUSY_S)
    return [int(file.read_text()) for file in files]


def start_program(text: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start Python code that gets a folder and can import this module; its errors are in a file there."""
    paths = [str(Path(module.__file__ or "").parent) for module in (sys.modules[__name__], ranks_alive)]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(paths)}
    with (folder / "errors").open("wb") as file:
        return subprocess.Popen([sys.executable, "-c", text, str(folder)], env=environment, stderr=file)


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


# Estimators -------------------------------------------------------------------


def write_points(store: Any) -> None:
    """Write two files with columns x and y, of a number of rows that ranks cannot divide equally."""
    points = np.random.default_rng(1).normal(size=(205, 4))
    for number, part in enumerate(np.split(points, [90])):
        path = f"{store.get_train_data_path()}/{number}.parquet"
        write_parquet({"x": part, "y": part @ WEIGHTS}, path, rows_per_group=20)


def columns(arrays: dict[str, Any]) -> dict[str, Any]:
    """Convert the columns of :func:`write_points` as estimators do."""
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


class Killing:
    """A ``transformation_fn`` that kills rank 1 once, after the first epoch.

    Args:
        store: of the fit, whose run_id is "mine".
        flag: a file that it makes.
    """

    def __init__(self, store: Any, flag: Path) -> None:
        self._checkpoint, self._flag = Path(store.get_checkpoint_path("mine")), flag

    def __call__(self, arrays: dict[str, Any]) -> dict[str, Any]:
        import polyhvd

        if polyhvd.rank() == 1 and self._checkpoint.exists() and not self._flag.exists():
            self._flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return arrays


def check_killed_and_resumed(
    regression: Callable[..., Any], weights_of: Callable[[Any], Any], store: Any, folder: Path
) -> None:
    """Check that a killed rank is one error, and that the next fit has the result of one without it.

    Args:
        regression: makes an estimator.
        weights_of: of a model.
        store: for the fit.
        folder: of the test.
    """
    write_points(store)
    given = {"store": store, "feature_cols": ["x"], "label_cols": ["y"], "batch_size": 8, "random_seed": 7}
    given |= {"epochs": 3, "run_id": "mine", "transformation_fn": Killing(store, folder / "flag")}
    with pytest.raises(RuntimeError, match=r"rank 1 .*(SIGKILL|signal 9)"):
        regression(**given).fit_on_parquet()
    run = Path(store.get_checkpoint_path("mine")).parent
    assert files_in(run) == ["checkpoint", "logs/history.json"]
    resumed = regression(**given).fit_on_parquet()
    whole = regression(**{**given, "run_id": "whole"}).fit_on_parquet()
    assert weights_of(resumed) == weights_of(whole)
    assert resumed.getHistory() == whole.getHistory()


def check_ended_by_a_callback(regression: Callable[..., Any], store: Any, callback: Any) -> Any:
    """Check that a fit of 4 epochs that a callback ends after 2 is completed; return one of 5 epochs.

    Args:
        regression: makes an estimator.
        store: for the fit.
        callback: of the first two fits.
    """
    from polyhvd.spark import LocalBackend

    class Unused(LocalBackend):
        def run(self, *args: Any, **kwargs: Any) -> list[Any]:
            raise AssertionError("ranks are started")

    write_points(store)
    given = {"store": store, "feature_cols": ["x"], "label_cols": ["y"], "batch_size": 8, "run_id": "mine"}
    first = regression(**given, callbacks=[callback], epochs=4).fit_on_parquet()
    again = regression(**given, callbacks=[callback], epochs=4, backend=Unused(2)).fit_on_parquet()
    assert again.getHistory() == first.getHistory()
    return regression(**given, epochs=5).fit_on_parquet()


class Slow:
    """A ``transformation_fn`` that notes the processes of the ranks, and takes a while for each batch.

    Args:
        folder: for :func:`started`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, arrays: dict[str, Any]) -> dict[str, Any]:
        if not list(self._folder.glob(f"*-{os.getpid()}")):
            note(self._folder)
        time.sleep(0.05)
        return arrays


def elastic_fit(estimator: Any, frame: Any, folder: Path) -> Any:
    """Fit with run_id "mine" on two executors, and kill a Python worker of Spark after the first epoch.

    Args:
        estimator: without store and backend.
        frame: for ``fit``.
        folder: of the test.
    """
    from polyhvd.spark import SparkBackend, Store

    (folder / "started").mkdir()
    store = Store.create(str(folder / "store"))
    estimator.setStore(store).setBackend(SparkBackend(num_proc=2)).setElastic(True).setRunId("mine")
    estimator.setTransformationFn(Slow(folder / "started"))
    job = ThreadPoolExecutor(1).submit(estimator.fit, frame)
    checkpoint = Path(store.get_checkpoint_path("mine"))
    wait_until(lambda: checkpoint.exists() or job.done(), "a checkpoint is written", BUSY_S)
    assert not job.done(), job.exception()
    ranks = started(folder / "started")
    assert len(ranks) == 2
    os.kill(parent_of(ranks[1]), signal.SIGKILL)
    fitted = job.result(BUSY_S)
    assert len(started(folder / "started")) <= 3, "the other rank keeps its process"
    return fitted


def check_names(module: str) -> None:
    """Check that a module offers what surface.txt has; of estimators and models the parameters.

    To change the file, see what ``python tests/surface/names.py MODULE`` prints.
    """
    folder = Path(__file__).resolve().parent
    sys.path.insert(0, str(folder.parent / "surface"))
    import names

    sections = re.split(r"^\[", (folder / "surface.txt").read_text(), flags=re.MULTILINE)
    recorded = next(part for part in sections if part.startswith(f"{module}]")).splitlines()[1:]
    found = names.offered(module)
    if module != "polyhvd.spark":
        found = [line for line in found if line.startswith("class ")]
    assert found == recorded


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
