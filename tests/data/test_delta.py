"""Delta tables as sources of loaders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from launching import DEADLINE_S  # tests/harness, on the path by tests/conftest.py

from polyhvd.data import DataError, ParquetLoader

deltalake = pytest.importorskip("deltalake", reason="deltalake is not installed")


def loader_of(source: Any, **options: Any) -> ParquetLoader:
    return ParquetLoader(source, **{"batch_size": 2, "placement": lambda: (0, 1), **options})


def x_of(loader: ParquetLoader) -> list[int]:
    return sorted(x for batch in loader for x in batch["x"].tolist())


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Of several versions: rows were deleted, so that some files are those of earlier versions only."""
    path = tmp_path / "a table"
    rows = pa.table({"x": [1, 2, 3, 4], "p": ["a", "a", "b", "b"]})
    deltalake.write_deltalake(path, rows, partition_by=["p"])
    deltalake.write_deltalake(path, pa.table({"x": [5, 6], "p": ["c %/d", "c %/d"]}), mode="append")
    deltalake.DeltaTable(path).delete("x = 1 or x = 4")
    return path


def test_files_of_the_current_version_are_read(table: Path) -> None:
    assert len(list(table.glob("p=*/*.parquet"))) == 5
    loader = loader_of(table)
    assert x_of(loader) == [2, 3, 5, 6]
    assert loader.schema.names == ["x", "p"]
    assert x_of(loader_of(f"{table}/", filter=pc.field("p") == "c %/d")) == [5, 6]
    deltalake.write_deltalake(table, pa.table({"x": [9], "p": ["z"]}), mode="overwrite")
    assert x_of(loader) == [2, 3, 5, 6], "the loader keeps its version"
    assert x_of(loader_of(table)) == [9]


def test_partitions_of_strings_stay_strings_that_look_like_integers(tmp_path: Path) -> None:
    rows = pa.table({"x": [1, 2, 3], "code": ["02134", None, "501"], "k": [7, 8, 9]})
    deltalake.write_deltalake(tmp_path / "t", rows, partition_by=["code", "k"])
    (batch,) = loader_of(tmp_path / "t", batch_size=3, fill_null={"code": ""})
    found = sorted(zip(*(batch[name].tolist() for name in ("x", "code", "k")), strict=True))
    assert found == [(1, "02134", 7), (2, "", 8), (3, "501", 9)]


def test_ranks_read_each_row_of_a_table_once(table: Path) -> None:
    loaders = [loader_of(table, batch_size=1, placement=lambda r=rank: (r, 2)) for rank in range(2)]
    assert sorted(x for loader in loaders for x in x_of(loader)) == [2, 3, 5, 6]


def test_file_that_is_removed_from_the_table_s_folder_is_an_error(table: Path) -> None:
    loader = loader_of(table)
    next(table.glob("p=c*/*.parquet")).unlink()
    with pytest.raises(DataError, match="part-"):
        x_of(loader)
    with pytest.raises(DataError, match=r"part-.* does not exist"):
        loader_of(table)


@pytest.mark.parametrize("feature", ["deletionVectors", "columnMapping"])
def test_features_by_which_files_have_other_rows_are_refused_by_name(table: Path, feature: str) -> None:
    features = {"readerFeatures": [feature], "writerFeatures": [feature]}
    protocol = {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}}
    (table / "_delta_log" / f"{3:020}.json").write_text(json.dumps(protocol))
    with pytest.raises(DataError, match=f"the Delta table '{table}' .*{feature}"):
        loader_of(table)


@pytest.mark.parametrize("mode", ["name", "id", "none"])
def test_column_mapping_is_refused_in_tables_that_do_not_list_their_features(table: Path, mode: str) -> None:
    log = table / "_delta_log"
    entries = map(json.loads, (log / f"{0:020}.json").read_text().splitlines())
    metadata = next(entry["metaData"] for entry in entries if "metaData" in entry)
    schema = json.loads(metadata["schemaString"])
    for number, field in enumerate(schema["fields"], 1):
        field["metadata"] = {
            "delta.columnMapping.id": number,
            "delta.columnMapping.physicalName": field["name"],
        }
    schema["fields"][0]["name"] = "y"  # as by RENAME COLUMN
    if mode != "none":
        metadata["schemaString"] = json.dumps(schema)
    metadata["configuration"] = {"delta.columnMapping.mode": mode, "delta.columnMapping.maxColumnId": "2"}
    entries = [{"protocol": {"minReaderVersion": 2, "minWriterVersion": 5}}, {"metaData": metadata}]
    (log / f"{3:020}.json").write_text("\n".join(map(json.dumps, entries)))
    if mode == "none":
        assert x_of(loader_of(table)) == [2, 3, 5, 6]
    else:
        with pytest.raises(DataError, match=f"the Delta table '{table}' .*columnMapping"):
            loader_of(table)


def test_table_without_files_or_with_a_damaged_log_is_an_error(table: Path) -> None:
    deltalake.DeltaTable(table).delete()
    with pytest.raises(DataError, match=r"version 3 of the Delta table .* has no files"):
        loader_of(table)
    for entry in (table / "_delta_log").iterdir():
        entry.unlink()
    with pytest.raises(DataError, match=f"the Delta table '{table}' cannot be read: "):
        loader_of(table)


def test_table_of_a_remote_folder_is_refused_with_what_to_pass(table: Path) -> None:
    cure = r"is a Delta table, .*DeltaTable\(uri, storage_options=...\).file_uris"
    for path in (table, table.parent):
        with pytest.raises(DataError, match=cure):
            loader_of(str(path), filesystem=fsspec.filesystem("file"))


def test_folder_that_has_a_table_within_it_is_refused(table: Path) -> None:
    with pytest.raises(DataError, match=f"'{table}' within '{table.parent}' is a Delta table; pass its path"):
        loader_of(table.parent)


def test_error_without_deltalake_names_the_package(table: Path) -> None:
    program = (
        "import sys; sys.modules['deltalake'] = None\n"
        "from polyhvd.data import ParquetLoader\n"
        "ParquetLoader(sys.argv[1], batch_size=1)"
    )
    command = [sys.executable, "-c", program, str(table)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert "ModuleNotFoundError: " in ended.stderr
    assert "is a Delta table, since it has a folder _delta_log" in ended.stderr
    assert "pip install 'polyhvd[delta]'" in ended.stderr
