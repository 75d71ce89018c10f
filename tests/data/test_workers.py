"""``workers=``: batches that are made in processes, and what becomes of these."""

from __future__ import annotations

import gc
import io
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from depth import repeats  # tests/harness, on the path by tests/conftest.py
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import DEADLINE_S, ROOT, wait_until
from PIL import Image
from ranks_alive import is_running

from polyhvd.data import DataError, ParquetLoader, prefetch, write_parquet
from polyhvd.data.handover import receive, send
from polyhvd.data.workers import Workers

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class MineError(Exception):
    """Has other arguments than its text."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(f"row {row}: {reason}")
        self.row = row


def alone() -> tuple[int, int]:
    return 0, 1


def written(folder: Path, rows: int = 60, **columns: Any) -> Path:
    x = np.arange(rows, dtype=np.int64)
    columns = {"x": x, "image": np.stack([x, x + 0.5], axis=1), **columns}
    write_parquet({**columns, "name": [f"row {n}" for n in x]}, folder / "x.parquet", rows_per_group=5)
    return folder


def loader_of(source: Path, **options: Any) -> ParquetLoader:
    return ParquetLoader(source, **{"batch_size": 4, "placement": alone, "workers": 2, **options})


def children() -> set[int]:
    """Processes of this one that run."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            status = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(status[1]) == os.getpid() and status[0] != "Z":
            found.add(int(stat.parent.name))
    return found


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = children()
    yield
    gc.collect()
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("polyhvd-data")]
    assert children() <= before


def equal(first: Any, second: Any) -> bool:
    """Whether two batches have the same bits, types and forms."""
    if type(first.arrays) is not type(second.arrays) or first.weight != second.weight:
        return False
    pairs = zip(
        first.arrays.values() if isinstance(first.arrays, dict) else first.arrays,
        second.arrays.values() if isinstance(second.arrays, dict) else second.arrays,
        strict=True,
    )
    return np.array_equal(first.indices, second.indices) and all(
        a.dtype == b.dtype and a.shape == b.shape and a.tolist() == b.tolist() and a.flags.writeable
        for a, b in pairs
    )


# The same batches


def scaled(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "image": (batch["image"].astype(np.float32) / 3)[:, ::-1], "n": np.array(len(batch))}


def as_pair(batch: dict[str, Any]) -> tuple[Any, Any]:
    return batch["image"], -batch["x"]


TRANSFORMS = {"none": None, "scaled": scaled, "pair": as_pair}


@given(
    rows=st.integers(1, 60),
    steps=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=3),
    batch=st.integers(1, 9),
    last=st.sampled_from(["even", "short", "drop"]),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**40),
    workers=st.integers(1, 3),
    transform=st.sampled_from(sorted(TRANSFORMS)),
    prefetch_bytes=st.sampled_from([0, 500, 1 << 20]),
)
@settings(max_examples=repeats(5, 100), deadline=None)
def test_batches_are_those_without_workers_over_changes_of_the_world(
    tmp_path_factory: pytest.TempPathFactory,
    rows: int,
    steps: list[tuple[int, int]],
    batch: int,
    last: str,
    shuffle: bool,
    seed: int,
    workers: int,
    transform: str,
    prefetch_bytes: int,
) -> None:
    """Each world goes on from the state of the one before, in a loader that has just been made."""
    folder = written(tmp_path_factory.mktemp("files"), rows)
    options = {"batch_size": batch, "last": last, "shuffle": shuffle, "seed": seed}
    options |= {"transform": TRANSFORMS[transform], "prefetch_bytes": prefetch_bytes}
    state: Any = None
    seen: list[int] = []
    for number, (size, count) in enumerate(steps):
        following = state
        for rank in range(size):
            place = lambda rank=rank, size=size: (rank, size)  # noqa: E731
            counts = (0, workers) if rank == seed % size else (0,)
            loaders = [loader_of(folder, workers=n, placement=place, **options) for n in counts]
            for loader in loaders if state is not None else ():
                loader.load_state_dict(state)
            for done, batches in enumerate(zip(*loaders, strict=True), 1):
                assert equal(batches[0], batches[-1])
                seen += batches[-1].indices.tolist() if batches[-1].weight else []
                for loader in loaders:
                    loader.advance()
                if done == count and number < len(steps) - 1:
                    break
            following = loaders[0].state_dict()
        state = following
    if last != "drop":
        assert sorted(seen) == list(range(rows))


def test_images_are_decoded_in_workers(tmp_path: Path) -> None:
    images = []
    for number in range(20):
        file = io.BytesIO()
        Image.fromarray(np.full((8, 6, 3), number, np.uint8)).save(file, "PNG")
        images.append(file.getvalue())
    write_parquet({"image": images}, tmp_path / "x.parquet", rows_per_group=4)
    for batch in loader_of(tmp_path, decode=["image"]):
        assert batch["image"].shape == (4, 8, 6, 3)
        assert batch["image"][:, 0, 0, 0].tolist() == batch.indices.tolist()


def test_rows_that_cannot_be_decoded_are_left_out_as_without_workers(tmp_path: Path) -> None:
    def number(data: bytes) -> int:
        if int(data) < 9 or int(data) % 7 == 0:
            raise LookupError("it is bad")
        return int(data)

    write_parquet({"x": [str(n).encode() for n in range(60)]}, tmp_path / "x.parquet", rows_per_group=4)
    options = {"decode": {"x": number}, "on_error": "skip", "shuffle": False}
    expected, found = (list(loader_of(tmp_path, workers=workers, **options)) for workers in (0, 2))
    assert [batch.weight for batch in expected[:3]] == [0, 0, 0.75]
    assert all(map(equal, expected, found))


def test_epochs_use_the_same_processes_and_a_loop_that_is_left_does_not_disturb_the_next(
    tmp_path: Path,
) -> None:
    def with_process(batch: dict[str, Any]) -> dict[str, Any]:
        return {**batch, "process": np.array(os.getpid())}

    loader = loader_of(written(tmp_path), transform=with_process, seed=3)
    plain = loader_of(tmp_path, workers=0, seed=3)
    processes = set()
    for epoch in range(4):
        loader.set_epoch(epoch)
        plain.set_epoch(epoch)
        for number, (batch, expected) in enumerate(zip(loader, plain, strict=True)):
            processes.add(int(batch["process"]))
            assert batch["x"].tolist() == expected["x"].tolist()
            if epoch % 2 and number == 3:
                break
    assert len(processes) == 2
    assert os.getpid() not in processes


def test_transform_knows_the_rank_that_it_works_for(tmp_path: Path) -> None:
    import polyhvd.numpy as hvd

    def ranked(batch: dict[str, Any]) -> dict[str, Any]:
        return {"place": np.array([hvd.rank(), hvd.size()])}

    hvd.init()
    try:
        loader = loader_of(written(tmp_path), transform=ranked, placement=None)
        assert next(iter(loader))["place"].tolist() == [0, 1]
    finally:
        hvd.shutdown()


# Memory


def test_arrays_are_handed_over_without_files() -> None:
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with first, second:
        arrays = {"a": np.arange(1000.0), "empty": np.empty((0, 3)), "text": np.array(["x", None], object)}
        send(first, 7, arrays)
        number, found, size = receive(second)
        assert (number, size >= 8000) == (7, True)
        assert all(found[name].tolist() == arrays[name].tolist() for name in arrays)
        assert "memfd:polyhvd-data" in Path("/proc/self/maps").read_text()
        del found
        assert "memfd:polyhvd-data" not in Path("/proc/self/maps").read_text()
        descriptors = len(os.listdir("/proc/self/fd"))
        with pytest.raises(TypeError):
            send(first, 8, threading.Lock())
        assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize(("prefetch_bytes", "ahead"), [(0, 2 + 1), (10 * 80_000, 10)])
def test_workers_are_ahead_by_the_given_bytes_and_one_batch_each(
    tmp_path: Path, prefetch_bytes: int, ahead: int
) -> None:
    made = tmp_path / "made"
    made.mkdir()

    def enlarged(batch: dict[str, Any]) -> dict[str, Any]:
        (made / str(batch["x"][0])).touch()
        return {"large": np.zeros(9_900)}

    (tmp_path / "files").mkdir()
    written(tmp_path / "files", 400)
    loader = loader_of(
        tmp_path / "files", transform=enlarged, columns=["x"], prefetch_bytes=prefetch_bytes, shuffle=False
    )
    for taken, _ in enumerate(loader, 1):
        wait_until(
            lambda taken=taken: len(list(made.iterdir())) >= taken + ahead,  # type: ignore[misc]
            "batches are made ahead",
        )
        time.sleep(0.05)
        assert len(list(made.iterdir())) <= taken + ahead + 1
        if taken == 5:
            break


# Errors


def failing(batch: dict[str, Any]) -> dict[str, Any]:
    if 22 in batch["x"]:
        raise MineError(22, "it is odd")
    return batch


@pytest.mark.parametrize("workers", [0, 2])
def test_exception_in_transform_has_its_class_traceback_and_batch(tmp_path: Path, workers: int) -> None:
    loader = loader_of(written(tmp_path), transform=failing, workers=workers, shuffle=False)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    with pytest.raises(MineError) as raised:
        next(batches)
    assert (str(raised.value), raised.value.row) == ("row 22: it is odd", 22)
    assert raised.traceback[-1].name == "failing"
    lines = "".join(traceback.format_exception(raised.value))
    assert f'{__file__}", line {failing.__code__.co_firstlineno + 2}, in failing' in lines
    assert 'raise MineError(22, "it is odd")\n' in lines
    if sys.version_info >= (3, 11):
        assert raised.value.__notes__ == ["in batch 5 of epoch 0, counted from 0"]


def test_cause_of_an_exception_is_handed_over(tmp_path: Path) -> None:
    def caused(batch: dict[str, Any]) -> dict[str, Any]:
        try:
            int("x")
        except ValueError as error:
            raise KeyError("mine") from error
        return batch

    with pytest.raises(KeyError, match="mine") as raised:
        next(iter(loader_of(written(tmp_path), transform=caused)))
    assert isinstance(raised.value.__cause__, ValueError)
    assert "caused" in "".join(traceback.format_exception(raised.value.__cause__))


def test_damaged_image_is_named_as_without_workers(tmp_path: Path) -> None:
    write_parquet({"image": [b"no image"]}, tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x\.parquet: row group 0, row 0, column 'image' cannot be decoded"):
        next(iter(loader_of(tmp_path, decode=["image"])))


def test_transform_that_cannot_be_sent_is_an_error(tmp_path: Path) -> None:
    lock = threading.Lock()

    def locked(batch: dict[str, Any]) -> dict[str, Any]:
        with lock:
            return batch

    with pytest.raises(ValueError, match=r"workers=2: transform .* cannot be sent to another process.*lock"):
        next(iter(loader_of(written(tmp_path), transform=locked)))


def test_result_that_cannot_be_sent_is_an_error(tmp_path: Path) -> None:
    def locked(batch: dict[str, Any]) -> Any:
        return {"lock": threading.Lock()}

    with pytest.raises(TypeError, match=r"what transform returned cannot be pickled.*lock"):
        next(iter(loader_of(written(tmp_path), transform=locked)))


class Unreadable:
    """Can be pickled, but not unpickled."""

    def __init__(self, *how: Any) -> None:
        self.how = how

    def __reduce__(self) -> Any:
        return self.how


@pytest.mark.parametrize("how", [(len, ()), (int, ("x",))])
def test_result_that_cannot_be_received_is_an_error(tmp_path: Path, how: tuple[Any, ...]) -> None:
    loader = loader_of(
        written(tmp_path),
        transform=lambda batch: {"x": batch["x"], "it": Unreadable(*how) if 4 in batch["x"] else 0},
        shuffle=False,
    )
    batches = iter(loader)
    next(batches)
    with pytest.raises(TypeError, match=r"cannot be unpickled, which workers= needs: \w+Error"):
        next(batches)


@contextmanager
def no_further_file() -> Iterator[list[int]]:
    """The process cannot open files; closing those that are yielded allows as many."""
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, limits[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        yield taken
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in taken:
            os.close(descriptor)


def test_task_that_cannot_be_sent_or_received_is_an_error() -> None:
    workers = Workers(1, lambda number: number + 1)
    assert workers.submit((1,)).result() == 2
    with no_further_file() as taken:
        with pytest.raises(DataError, match=r"worker 1 of 1 .* cannot get the rows .*Too many open files"):
            workers.submit((2,))
        os.close(taken.pop())  # for the memory of the task
        task = workers.submit((3,))
        taken.append(os.open("/dev/null", os.O_RDONLY))
        with pytest.raises(RuntimeError, match="too many open files"):
            task.result()
    assert workers.submit((4,)).result() == 5
    workers.close()


@pytest.mark.parametrize("where", ["attribute", "argument"])
def test_exception_that_cannot_be_sent_as_it_is_keeps_its_text(tmp_path: Path, where: str) -> None:
    def unsuitable(batch: dict[str, Any]) -> Any:
        error = LookupError("no space", *[threading.Lock()] * (where == "argument"))
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error

    kind = LookupError if where == "attribute" else RuntimeError
    with pytest.raises(kind, match="no space"):
        next(iter(loader_of(written(tmp_path), transform=unsuitable)))


def test_module_that_workers_cannot_import_is_an_error() -> None:
    class Unsuitable:
        def __reduce__(self) -> Any:
            return __import__, ("no_such_module",)

    workers = Workers(1, Unsuitable())  # type: ignore[arg-type]
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        workers.submit(()).result()
    workers.close()


@pytest.mark.parametrize("workers", [-1, 1.5, "2"])
def test_bad_number_of_workers_is_refused(tmp_path: Path, workers: Any) -> None:
    with pytest.raises(ValueError, match="workers"):
        loader_of(written(tmp_path), workers=workers)


# Ends


def test_worker_that_is_killed_is_an_error_and_the_next_loop_has_others(tmp_path: Path) -> None:
    def doomed(batch: dict[str, Any]) -> dict[str, Any]:
        if 22 in batch["x"] and not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return batch

    (tmp_path / "files").mkdir()
    loader = loader_of(written(tmp_path / "files"), transform=doomed, shuffle=False)
    seen: list[int] = []
    batches = iter(loader)
    for _ in range(5):
        seen += next(batches)["x"].tolist()
    loader.advance()
    with pytest.raises(DataError, match=r"worker \d of 2 of the data loader \(process \d+\) was killed by"):
        next(batches)
    for batch in loader:
        seen += batch["x"].tolist()
    assert seen == list(range(60))


def test_worker_that_stays_stopped_is_an_error_that_names_it(tmp_path: Path) -> None:
    def stopping(batch: dict[str, Any]) -> dict[str, Any]:
        if 22 in batch["x"] and not (tmp_path / "stopped").exists():
            (tmp_path / "stopped").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        return batch

    (tmp_path / "files").mkdir()
    loader = loader_of(written(tmp_path / "files"), transform=stopping, shuffle=False, read_timeout_s=2)
    message = r"worker \d of 2 of the data loader \(process \d+\) was stopped by a signal, .* within 2 s"
    with pytest.raises(DataError, match=message):
        list(loader)
    assert len(list(loader)) == 10


@pytest.mark.parametrize("workers", [0, 1])
def test_transform_that_never_returns_is_reported_and_then_an_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    workers: int,
) -> None:
    monkeypatch.setenv("POLYHVD_STALL_CHECK_TIME_SECONDS", "1")
    monkeypatch.setattr(prefetch, "_LAST_ITEM_S", 0.01)

    def hanging(batch: dict[str, Any]) -> dict[str, Any]:
        while 22 in batch["x"] and not (tmp_path / "ended").exists():
            time.sleep(0.01)
        return batch

    (tmp_path / "files").mkdir()
    loader = loader_of(written(tmp_path / "files"), workers=workers, transform=hanging, shuffle=False)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    loader.advance()
    caplog.clear()
    monkeypatch.setenv("POLYHVD_STALL_SHUTDOWN_TIME_SECONDS", "3")  # from here on: workers take long to start
    began = time.monotonic()
    with pytest.raises(DataError, match="STALL_SHUTDOWN_TIME_SECONDS=3 limits the wait") as raised:
        next(batches)
    assert time.monotonic() - began < DEADLINE_S / 2
    (record,) = [record for record in caplog.records if "waiting for 1 s so far" in record.getMessage()]
    for text in (record.getMessage(), str(raised.value)):
        assert ("worker 1 of 1 of the data loader" if workers else "batch 5 of epoch 0 is not ready") in text
        assert workers or "in hanging" in text
    assert not workers or "in hanging" in capfd.readouterr().err
    caplog.clear()
    rest = iter(loader)
    if not workers:  # the call still runs
        with pytest.raises(DataError, match="of a loop that was left is still being made"):
            next(rest)
        assert any("the next loop waits for it" in record.getMessage() for record in caplog.records)
        rest = iter(loader)
    (tmp_path / "ended").touch()
    monkeypatch.delenv("POLYHVD_STALL_SHUTDOWN_TIME_SECONDS")
    monkeypatch.setattr(prefetch, "_LAST_ITEM_S", DEADLINE_S)  # the loop's end waits for its thread
    assert [batch["x"][0] for batch in rest] == [*range(20, 60, 4)]


PROGRAM = """
import os, signal, sys, time
import numpy as np
from polyhvd.data import ParquetLoader

how = sys.argv[2]

def transform(batch):
    if how == "stuck" and 30 in batch["x"]:
        time.sleep(1000)
    return {**batch, "large": np.zeros(100_000), "process": np.array(os.getpid())}

loader = ParquetLoader(
    sys.argv[1], batch_size=2, workers=2, transform=transform, placement=lambda: (0, 1), shuffle=False
)
processes = set()
for number, batch in enumerate(loader):
    processes.add(int(batch["process"]))
    if number == 5:
        print(*processes, flush=True)
        if how == "end":
            print(time.monotonic(), flush=True)
            sys.exit(0)
        if how == "interrupt":
            os.killpg(0, signal.SIGINT)
        if how == "stuck":
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "fork":
            child = os.fork()
            if child == 0:
                del batch, loader
                sys.exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.parametrize(
    ("how", "code"),
    [("end", 0), ("interrupt", -signal.SIGINT), ("stuck", -signal.SIGKILL), ("fork", 0)],
)
def test_nothing_is_left_of_a_program_however_it_ends(tmp_path: Path, how: str, code: int) -> None:
    (tmp_path / "files").mkdir()
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    shared = set(os.listdir("/dev/shm"))
    ended = subprocess.run(
        [sys.executable, str(script), str(written(tmp_path / "files", 400)), how],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        start_new_session=True,
    )
    assert ended.returncode == code, ended.stderr
    assert ended.stderr == "" or how == "interrupt"
    assert "worker" not in ended.stderr
    first, *others = ended.stdout.splitlines()
    for exited_at in map(float, others):
        assert time.monotonic() - exited_at < 15
    processes = [int(process) for process in first.split()]
    assert len(processes) == 2
    wait_until(lambda: not any(map(is_running, processes)), "the workers have ended", 30)
    assert not [name for name in set(os.listdir("/dev/shm")) - shared if "polyhvd-data" in name]


UNKILLABLE = """
import os, subprocess, sys, time
from polyhvd.data import DataError, ParquetLoader

def transform(batch):
    if 22 in batch["x"]:
        time.sleep(1000)
    return batch

subprocess.Popen.kill = lambda process: None
options = {"batch_size": 4, "workers": 1, "shuffle": False, "placement": lambda: (0, 1)}
loader = ParquetLoader(sys.argv[1], transform=transform, **options)
batches = iter(loader)
for _ in range(5):
    next(batches)
os.environ["POLYHVD_STALL_SHUTDOWN_TIME_SECONDS"] = "2"  # from here on: workers take long to start
try:
    next(batches)
except DataError as error:
    print(error)
"""


def test_worker_that_does_not_end_when_it_is_killed_is_left(tmp_path: Path) -> None:
    """As one that waits for a file system that does not answer."""
    (tmp_path / "files").mkdir()
    ended = subprocess.run(
        [sys.executable, "-c", UNKILLABLE, str(written(tmp_path / "files"))],
        env={**os.environ, "PYTHONPATH": str(ROOT), "POLYHVD_STALL_CHECK_TIME_SECONDS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert ended.returncode == 0, ended.stderr
    assert "STALL_SHUTDOWN_TIME_SECONDS=2 limits the wait" in ended.stdout
    assert re.search(r"worker 1 of 1 .* \(process \d+\) was killed and has not ended", ended.stderr)
