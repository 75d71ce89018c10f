"""Stores in local folders and in fsspec's memory, and backends. No session of Spark is needed."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from spark_common import check_names

import polyhvd.spark
from polyhvd.spark import DBFSLocalStore, FilesystemStore, LocalBackend, LocalStore, Store


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


@pytest.mark.parametrize("given", ["dbfs:/x/y", "dbfs:///x/y", "/dbfs/x/y", "file:///dbfs/x/y"])
def test_databricks_paths_are_those_of_its_local_folder(given: str) -> None:
    store = Store.create(given)
    assert type(store) is DBFSLocalStore
    assert store.get_run_path("r") == "/dbfs/x/y/runs/r"


def test_what_is_written_can_be_read_and_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
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
