"""Stores in local folders and in fsspec's memory, and backends. No session of Spark is needed."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from spark_common import check_names

import polyhvd.spark
from polyhvd.rendezvous.auth import new_secret, parse_secret
from polyhvd.rendezvous.server import Server
from polyhvd.spark import DBFSLocalStore, FilesystemStore, LocalBackend, LocalStore, Store, worker
from polyhvd.spark.estimators import preparing
from polyhvd.spark.estimators.checkpoint import Checkpoint
from polyhvd.spark.estimators.looping import LoopTrainer
from polyhvd.spark.estimators.model import _series
from polyhvd.spark.estimators.training import Run
from polyhvd.spark.slot import _Rank
from polyhvd.spark.worker import Kind, _Watch


def prefixes(folder: Path) -> list[str]:
    return [str(folder), f"file://{folder}", f"memory:/{folder}"]


def test_paths_lie_below_the_prefix() -> None:
    store = Store.create("memory://bucket/a")
    assert type(store) is FilesystemStore
    assert store.get_train_data_path() == "memory://bucket/a/intermediate_train_data"
    assert store.get_val_data_path(3) == "memory://bucket/a/intermediate_val_data.3"
    assert store.get_test_data_path() == "memory://bucket/a/intermediate_test_data"
    assert store.get_runs_path() == "memory://bucket/a/runs"
    assert store.get_run_path("r") == "memory://bucket/a/runs/r"
    assert store.get_checkpoint_path("r") == "memory://bucket/a/runs/r/checkpoint"
    assert store.get_logs_path("r") == "memory://bucket/a/runs/r/logs"
    assert store.saving_runs()


def test_paths_can_be_given_and_runs_left_out() -> None:
    store = LocalStore("/a", train_path="/b", runs_path="/c", save_runs=False)
    assert (store.get_train_data_path(), store.get_run_path("r")) == ("/b", "/c/r")
    assert not store.saving_runs()
    assert store.get_checkpoint_path("r") is None
    assert store.get_logs_path("r") is None


def test_relative_paths_are_those_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store.create("a", val_path="b", runs_path="file:///c")
    monkeypatch.chdir("/")  # an executor's working directory
    assert store.get_train_data_path() == f"{tmp_path}/a/intermediate_train_data"
    assert store.get_val_data_path(1) == f"{tmp_path}/b.1"
    assert store.get_runs_path() == "file:///c"


@pytest.mark.parametrize("prefix", ["/a", "memory://a"])
@pytest.mark.parametrize("path", ["s3://bucket/b", "dbfs:/b"])
def test_paths_in_another_file_system_are_refused(prefix: str, path: str) -> None:
    with pytest.raises(ValueError, match=f"Store: '{path}' is not in the file system of the prefix"):
        Store.create(prefix, train_path=path)


@pytest.mark.parametrize("given", ["dbfs:/x/y", "dbfs:///x/y", "/dbfs/x/y", "file:///dbfs/x/y"])
def test_databricks_paths_are_those_of_its_local_folder(given: str) -> None:
    store = Store.create(given, val_path="dbfs:/z")
    assert type(store) is DBFSLocalStore
    assert (store.get_run_path("r"), store.get_val_data_path()) == ("/dbfs/x/y/runs/r", "/dbfs/z")


def test_what_is_written_can_be_read_and_replaced_and_nothing_else_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []  # content of files that a crash of the host does not change
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: fsync(file) or synced.append(os.pread(file, 9, 0)))
    for prefix in prefixes(tmp_path):
        store = FilesystemStore(prefix)
        path = store.get_checkpoint_path("run-1")
        assert path is not None
        store.write(path, b"one")
        store.write_text(path, "zwei \u00fc")
        assert store.exists(path)
        assert store.read(path).decode() == "zwei \u00fc"
        left = store.fs.ls(store.get_run_path("run-1"), detail=False)
        assert [Path(name).name for name in left] == ["checkpoint"]
        assert not store.exists(store.get_logs_path("run-1") or "")
    assert synced == 2 * [b"one", "zwei \u00fc".encode()]


def test_a_write_that_fails_leaves_the_former_content_and_no_other_file(tmp_path: Path) -> None:
    class FullFile:
        """What a full disk does: it takes the file, and then no byte."""

        def __len__(self) -> int:
            raise OSError(28, "No space left on device")

    store = LocalStore(str(tmp_path))
    path = str(tmp_path / "folder" / "file")
    store.write(path, b"before")
    with pytest.raises(polyhvd.DataError, match=r"'.*file' cannot be written: "):
        store.write(path, FullFile())  # type: ignore[arg-type]
    assert store.read(path) == b"before"
    assert os.listdir(tmp_path / "folder") == ["file"]


class Renaming(MemoryFileSystem):
    """Moves at once, and not to a path that exists, as Hadoop's; counts what changes it."""

    changes_left = float("inf")
    is_killed = False

    def _change(self) -> None:
        self.changes_left -= 1
        if self.changes_left == -1 or (self.is_killed and self.changes_left < 0):
            raise KeyboardInterrupt

    def mv(self, path1: str, path2: str, **_: object) -> None:
        self._change()
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        assert target not in self.store
        self.store[target] = self.store.pop(source)

    def pipe_file(self, path: str, value: bytes, **_: object) -> None:
        self._change()
        super().pipe_file(path, value)

    def rm_file(self, path: str) -> None:
        self._change()
        super().rm_file(path)


@pytest.mark.parametrize("is_killed", [False, True], ids=["interrupted", "killed"])
@pytest.mark.parametrize("changes", range(5))
def test_a_write_that_ends_at_any_moment_leaves_a_whole_content(
    changes: int, is_killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Renaming(skip_instance_cache=True)
    store = FilesystemStore(f"memory:/{tmp_path}")
    monkeypatch.setattr(store, "_filesystem", files)
    path = store.get_run_path("file")
    for first, second in ((b"one", b"two"), (b"three", b"four")):  # also after what the first one has left
        store.write(path, first)
        assert store.read(path) == first
        files.changes_left, files.is_killed = changes, is_killed
        with contextlib.suppress(KeyboardInterrupt):
            store.write(path, second)
        files.changes_left = float("inf")
        assert store.exists(path)
        assert store.read(path) in (first, second)
    store.remove(path)
    assert not store.exists(path)


def test_a_folder_that_is_a_file_is_an_error_that_names_the_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = LocalStore(str(tmp_path))
    with pytest.raises(polyhvd.DataError, match=r"'.*file/x' cannot be written: \w+: "):
        store.write(str(tmp_path / "file" / "x"), b"")


def test_a_file_that_is_missing_and_a_file_system_that_is_not_known_are_errors(tmp_path: Path) -> None:
    with pytest.raises(polyhvd.DataError, match=r"'.*none' cannot be read: FileNotFoundError"):
        LocalStore(str(tmp_path)).read(str(tmp_path / "none"))
    with pytest.raises(polyhvd.DataError, match="the file system of 'nosuch://x' cannot be opened"):
        Store.create("nosuch://x")


def test_an_error_of_the_file_system_is_not_a_file_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def info(self: Any, path: str, **_: Any) -> Any:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    for prefix in prefixes(tmp_path):
        store = FilesystemStore(prefix)
        path = store.get_checkpoint_path("r")
        assert path is not None
        store.write(path, b"one")
        with monkeypatch.context() as patched:
            patched.setattr(type(store.fs), "info", info)
            with pytest.raises(polyhvd.DataError, match=r"whether '.*' exists: OSError: .*[Ss]tale"):
                store.exists(path)
            with pytest.raises(polyhvd.DataError, match="cannot be removed: OSError"):
                store.remove(path)
        assert store.read(path) == b"one"


def test_a_file_that_is_missing_may_be_reported_by_another_class_of_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OwnError(OSError):
        """The error of smb:// is such a one."""

    def info(self: Any, path: str, **_: Any) -> Any:
        raise OwnError(errno.ENOENT, os.strerror(errno.ENOENT))

    store = FilesystemStore(str(tmp_path))
    monkeypatch.setattr(type(store.fs), "info", info)
    assert not store.exists(str(tmp_path / "none"))


def test_data_sets_of_parquet_are_recognized(tmp_path: Path) -> None:
    for prefix in prefixes(tmp_path / "x"):
        store = FilesystemStore(prefix)
        folder = store.get_train_data_path()
        assert not store.is_parquet_dataset(folder)
        store.fs.makedirs(folder, exist_ok=True)
        assert not store.is_parquet_dataset(folder)
        with store.fs.open(f"{folder}/part-0.parquet", "wb") as file:
            pq.write_table(pa.table({"x": [1, 2]}), file)
        assert store.is_parquet_dataset(folder)
        assert store.get_parquet_dataset(folder).read().num_rows == 2
        store.fs.rm(folder, recursive=True)
        store.write(f"{folder}/part-0.parquet", b"no parquet")
        assert not store.is_parquet_dataset(folder)
        with pytest.raises(polyhvd.DataError, match="is not a data set of Parquet"):
            store.get_parquet_dataset(folder)
        store.fs.rm(folder, recursive=True)


def test_an_epoch_whose_history_cannot_be_written_is_in_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(str(tmp_path))
    path = store.get_checkpoint_path("r")
    assert path is not None
    (tmp_path / "runs" / "r").mkdir(parents=True)
    (tmp_path / "runs" / "r" / "logs").touch()  # no folder
    run = object.__new__(Run)  # without loaders, which need ranks
    run.job = SimpleNamespace(store=store, run_id="r")  # type: ignore[assignment]
    run.checkpoint = Checkpoint({})
    monkeypatch.setattr(polyhvd, "rank", lambda: 0)
    with pytest.raises(polyhvd.DataError, match=r"history\.json' cannot be written"):
        run.finish_epoch(0, [{"loss": 0.5}], [[1]], lambda: b"weights")
    found = Checkpoint.load(store.read(path), path)
    assert (found.epochs, found.history, found.state) == (1, [{"loss": 0.5}], b"weights")


def split(folder: Path, *parts: pa.Table) -> tuple[list[str], list[str], int]:
    """Write tables as tasks of Spark do; return rows for training, those for validation, and the checksum."""
    has_mark = preparing._MARK in parts[0].column_names
    folders = (str(folder / "train"), str(folder / "validation"))
    plan = preparing._Plan(("x", "y", "text"), 0.25, has_mark, 3, folders, None)
    tasks = [preparing._Writing(plan, number, 0) for number, _ in enumerate(parts)]
    for task, part in zip(tasks, parts, strict=True):
        task.write(iter(part.to_batches(max_chunksize=150)))
    written = preparing._joined([task.report for task in tasks], None, 0.25)
    assert written.validation is not None
    train, validation = (
        sorted(str(row) for path in files.source for row in pq.read_table(path).to_pylist())
        for files in (written.train, written.validation)
    )
    return train, validation, written.checksum


def test_rows_for_validation_are_the_same_whatever_the_order_and_the_tasks(tmp_path: Path) -> None:
    draws = np.random.default_rng(1)
    columns = {"x": draws.integers(0, 9, 600) / 8, "y": [[float(n), 0.0] for n in range(600)]}
    table = pa.table({**columns, "text": [str(n % 7) for n in range(600)]})
    shuffled = table.take(draws.permutation(600))
    train, validation, checksum = split(tmp_path / "1", table)
    assert split(tmp_path / "2", shuffled[:200], shuffled[200:]) == (train, validation, checksum)
    assert 100 < len(validation) < 200
    assert len({*train, *validation}) == len(train) + len(validation) == 600
    # Other rows of the same values, and another choice, are other data.
    for name in table.column_names:
        swapped = table.set_column(table.column_names.index(name), name, shuffled[name])
        assert split(tmp_path / name, swapped)[2] != checksum
    marks = [np.arange(600) % 5 == place for place in (0, 1)]
    marked = [table.append_column(preparing._MARK, [mark]) for mark in marks]
    first, second = (split(tmp_path / str(number), part) for number, part in enumerate(marked, 3))
    assert (len(first[1]), first[2] != second[2]) == (120, True)
    same = table.take([0] * 600)  # each is chosen by itself
    assert 100 < len(split(tmp_path / "same", same)[1]) < 200


@pytest.mark.parametrize(
    ("value", "kind"), [(127.6, "tinyint"), (-32769, "smallint"), (2.0**63, "bigint"), (np.nan, "boolean")]
)
def test_predictions_that_the_type_of_the_label_cannot_hold_are_an_error(value: float, kind: str) -> None:
    text = f"is {value:g}, which column 'y' of type {kind}, that of its label, cannot hold"
    with pytest.raises(ValueError, match=re.escape(text)):
        _series("y", np.array([[1.0], [value]]), kind)
    wanted = [True, False] if kind == "boolean" else [1, -3]
    assert _series("y", np.array([[1.0], [-2.6]]), kind).tolist() == wanted


@pytest.mark.parametrize("missing", ["x", "y", "w"])
def test_a_column_that_a_transformation_leaves_out_is_named(missing: str) -> None:
    trainer: Any = SimpleNamespace(features=["x"], labels=["y"])
    trainer.run = SimpleNamespace(params={"sample_weight_col": "w"})
    batch = SimpleNamespace(arrays={name: np.ones(2) for name in "xyw" if name != missing})
    with pytest.raises(ValueError, match=f"transformation_fn returned .* column '{missing}' is missing"):
        LoopTrainer._go_through(trainer, [batch], is_training=True)


class Immortal(subprocess.Popen[bytes]):
    """A process whose end does not come, as in the wait for a dead file system."""

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is not None, "waits for ever"
        raise subprocess.TimeoutExpired(self.args, timeout)

    def poll(self) -> None:
        pass


def test_a_task_goes_on_without_a_rank_that_sigkill_does_not_end(capfd: pytest.CaptureFixture[str]) -> None:
    process = Immortal(["sleep", "600"], start_new_session=True)
    for kind, release in ((_Rank, _Rank.kill), (_Watch, _Watch._kill)):
        task: Any = object.__new__(kind)
        task._process = process
        release(task)
        assert f"(process {process.pid}) has not ended within 5 s of SIGKILL" in capfd.readouterr().err
    assert subprocess.Popen.wait(process) == -signal.SIGKILL


def test_a_job_ends_although_a_process_of_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_GRACE_S", 0.1)
    process = Immortal(["sleep", "600"], start_new_session=True)
    secret = new_secret()
    with ThreadPoolExecutor(1) as thread, Server(parse_secret(secret), "127.0.0.1") as server:
        client = worker._client(server.endpoint, secret)
        task: Any = object.__new__(_Watch)
        vars(task).update(_client=client, _rank=0, _process=process, _parent=os.getppid(), _size=2)
        vars(task).update(_files=[None, None], _captured=(False, False), _failures={}, _finished=[])
        worker._client(server.endpoint, secret).put(f"{worker._ENDED}/1", 0, b"has ended with exit status 1")
        assert thread.submit(task.wait, 2).result(60)
        (row,) = task.rows(["a:1", "b:2"], {})
    assert row == (Kind.FAILURE, 1, b"rank 1 (executor at b:2) has ended with exit status 1")
    subprocess.Popen.wait(process)


def test_a_local_backend_runs_on_ranks_of_this_host() -> None:
    def place(add: int) -> tuple[int, int, str]:
        import polyhvd.numpy as hvd

        hvd.init()
        return hvd.rank() + add, hvd.size(), os.environ["MINE"]

    backend = LocalBackend(2)
    assert backend.num_processes() == 2
    assert backend.run(place, (5,), env={"MINE": "x"}) == [(5, 2, "x"), (6, 2, "x")]


def test_the_module_offers_what_was_recorded() -> None:
    check_names("polyhvd.spark")
