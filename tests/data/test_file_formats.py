"""Files of Arrow IPC, CSV and JSON lines, in worlds that the test decides about."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from depth import repeats  # tests/harness, on the path by tests/conftest.py
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from pyarrow import csv, dataset, feather, ipc

from polyhvd.data import DataError, FileLoader, ParquetLoader, formats, write_parquet


def alone() -> tuple[int, int]:
    return 0, 1


def loader_of(source: Any, **options: Any) -> FileLoader:
    return FileLoader(source, **{"batch_size": 4, "placement": alone, **options})


def write_ipc(table: pa.Table, path: Path) -> None:
    with ipc.new_file(path, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=7):
            writer.write_batch(batch)


def write_json(table: pa.Table, path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))


WRITERS: dict[str, Callable[[pa.Table, Path], None]] = {
    "arrow": write_ipc,
    "feather": lambda table, path: feather.write_feather(table, path, "lz4", chunksize=5),
    "csv": csv.write_csv,
    "tsv": lambda table, path: csv.write_csv(table, path, csv.WriteOptions(delimiter="\t")),
    "jsonl": write_json,
    "parquet": lambda table, path: write_parquet(table, path, rows_per_group=6),
}


def written(folder: Path, suffix: str, sizes: tuple[int, ...] = (40, 0, 1, 30)) -> Path:
    """Files of so many rows, in folders of a part; names have quotes, delimiters and ends of lines."""
    first = 0
    for number, size in enumerate(sizes):
        x = np.arange(first, first + size)
        names = pa.array([f'row "{n}",\n\t{n}' for n in x], pa.string())
        path = folder / f"part={number}" / f"a b%20.{suffix}"
        path.parent.mkdir(parents=True)
        WRITERS[suffix](pa.table({"x": x, "y": x / 4 + 0.5, "name": names}), path)
        first += size
    return folder


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_BLOCK_BYTES", 200)


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_row_is_loaded_once_in_the_order_of_one_process(
    tmp_path: Path, suffix: str, shuffle: bool
) -> None:
    folder = written(tmp_path, suffix)
    options = {"global_batch_size": 9, "batch_size": None, "shuffle": shuffle, "seed": 3, "streams": 2}
    single = loader_of(folder, **options)
    assert len(single._files.groups) > 4
    steps = [sorted(batch["x"].tolist()) for batch in single]
    assert sorted(x for step in steps for x in step) == list(range(71))
    ranks = [loader_of(folder, placement=lambda r=r: (r, 3), **options) for r in range(3)]
    dealt = [[sorted(x for batch in batches for x in batch["x"])] for batches in zip(*ranks, strict=True)]
    assert [step for (step,) in dealt] == steps
    assert single.state_dict() == {**ranks[0].state_dict(), "epoch": 0, "cursor": 71}
    for batch in loader_of(folder, columns=["name", "part", "x", "y"]):
        assert batch["name"].tolist() == [f'row "{x}",\n\t{x}' for x in batch["x"]]
        assert batch["y"].tolist() == (batch["x"] / 4 + 0.5).tolist()
        assert batch["part"].tolist() == [0 if x < 40 else 2 if x == 40 else 3 for x in batch["x"]]


@pytest.mark.parametrize("suffix", WRITERS)
def test_filter_selects_by_columns_that_are_not_loaded_and_by_partitions(tmp_path: Path, suffix: str) -> None:
    chosen = (pc.field("x") > 30) & (pc.field("y") < 14) & (pc.field("part") != 2)
    loader = loader_of(written(tmp_path, suffix), columns=["name"], filter=chosen, shuffle=False)
    names = [name for batch in loader for name in batch["name"]]
    assert names == [f'row "{x}",\n\t{x}' for x in range(31, 54) if x != 40]


@pytest.mark.parametrize("suffix", WRITERS)
def test_partitions_can_be_the_only_columns(tmp_path: Path, suffix: str) -> None:
    loader = loader_of(written(tmp_path, suffix), columns=["part"])
    assert sorted(part for batch in loader for part in batch["part"]) == [0] * 40 + [2] + [3] * 30


@pytest.mark.parametrize("suffix", WRITERS)
def test_file_that_was_replaced_by_one_of_the_same_size_is_an_error(tmp_path: Path, suffix: str) -> None:
    folder = written(tmp_path, suffix, (20,))
    loader = loader_of(folder)
    assert len([x for batch in loader for x in batch["x"]]) == 20
    path = folder / "part=0" / f"a b%20.{suffix}"
    WRITERS[suffix](pa.table({"x": np.arange(20)[::-1], "y": np.zeros(20), "name": ["a"] * 20}), path)
    with pytest.raises(DataError, match=r"has changed since the loader was made"):
        list(loader)


@pytest.mark.parametrize("suffix", WRITERS)
def test_file_of_another_format_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x.{suffix}"
    path.write_bytes(b'{"x": "\xff\xfe", \n "y\n1,2,3,4,5\n')
    with pytest.raises(DataError, match=rf"x.{suffix} cannot be read as an? "):
        loader_of(path)


def test_types_of_text_are_those_of_all_blocks_and_files(tmp_path: Path) -> None:
    (tmp_path / "0.csv").write_text("a,b\n" + "1,\n" * 200 + "2.5,7\n")
    (tmp_path / "1.csv").write_text("b,a\n8,3\n")
    (batch,) = loader_of(tmp_path, batch_size=300, fill_null={"b": 0}, shuffle=False)
    assert batch["a"].tolist() == [1.0] * 200 + [2.5, 3.0]
    assert batch["b"].tolist() == [0] * 200 + [7, 8]
    (tmp_path / "2.csv").write_text("a,b\nword,2\n")
    with pytest.raises(DataError, match=r"2.csv: its columns have other types .*0.csv: .* a .*column_types"):
        loader_of(tmp_path)
    (tmp_path / "3.csv").write_text("a,b\n" + "1,\n" * 200 + "word,7\n")
    with pytest.raises(DataError, match=r"3.csv cannot be read as a CSV file: .* a .*column_types"):
        loader_of(tmp_path / "3.csv")


def test_empty_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "0.csv").write_text("")
    (tmp_path / "1.csv").write_text("a\n1\n")
    for names in (["0.csv", "1.csv"], ["1.csv", "0.csv"]):
        with pytest.raises(DataError, match=r"0\.csv has no (columns|single column 'a')"):
            loader_of([tmp_path / name for name in names])


def test_objects_of_json_may_lack_fields(tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_text('{"x": 1}\n\n{"y": "a"}')
    (tmp_path / "1.jsonl").write_text('{"z": 2.5}\n')
    loader = loader_of(tmp_path, fill_null={"x": -1, "y": "", "z": 0}, shuffle=False)
    (batch,) = loader
    assert [batch[name].tolist() for name in "xyz"] == [[1, -1, -1], ["", "a", ""], [0.0, 0.0, 2.5]]


def test_strings_of_json_of_which_only_some_blocks_look_like_dates_stay_strings(tmp_path: Path) -> None:
    texts = [*["2024-05-06"] * 40, "soon", *["2024-05-07"] * 40]
    lines = [json.dumps({"x": text, "t": "2024-05-06"}) + "\n" for text in texts]
    (tmp_path / "0.jsonl").write_text("".join(lines[:20]))
    (tmp_path / "1.jsonl").write_text("".join(lines[20:]))
    (batch,) = loader_of(tmp_path, batch_size=100, shuffle=False)
    assert batch["x"].tolist() == texts
    assert batch["t"].dtype == "datetime64[s]"


def test_csv_format_of_pyarrow_has_delimiters_nulls_and_types(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("code;n\n'01';?\n'0\n2';5\n")
    options = dataset.CsvFragmentScanOptions(
        convert_options=csv.ConvertOptions(column_types={"code": pa.string()}, null_values=["?"])
    )
    format = dataset.CsvFileFormat(csv.ParseOptions(delimiter=";", quote_char="'"), options)
    (batch,) = loader_of(tmp_path, format=format, fill_null={"n": 0}, shuffle=False)
    assert batch["code"].tolist() == ["01", "0\n2"]
    assert batch["n"].tolist() == [0, 5]


@pytest.mark.skipif(
    not hasattr(csv.ConvertOptions, "default_column_type"),
    reason="this pyarrow cannot set the type of all other columns",
)
def test_csv_format_of_pyarrow_has_the_type_of_columns_without_one(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("code\n007\n")
    convert = csv.ConvertOptions(default_column_type=pa.string())
    format = dataset.CsvFileFormat(convert_options=convert)
    (batch,) = loader_of(tmp_path, format=format)
    assert batch["code"].tolist() == ["007"]


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({"column_names": ["a", "b"]}, r"column_names=\['a', 'b'\]"),
        ({"autogenerate_column_names": True}, "autogenerate_column_names=True"),
        ({"skip_rows": 1}, "skip_rows=1"),
        ({"skip_rows_after_names": 1}, "skip_rows_after_names=1"),
        ({"encoding": "latin1"}, "encoding='latin1'"),
    ],
)
def test_options_of_reading_csv_are_refused(tmp_path: Path, options: dict[str, Any], shown: str) -> None:
    (tmp_path / "x.csv").write_text("1,2\n3,4\n")
    format = dataset.CsvFileFormat(read_options=csv.ReadOptions(**options))
    with pytest.raises(ValueError, match=rf"format has ReadOptions\({shown}\), which is not supported"):
        loader_of(tmp_path, format=format)


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_compressed_text_is_an_error_of_making_the_loader(tmp_path: Path, suffix: str) -> None:
    path = written(tmp_path, suffix, (40,)) / "part=0" / f"a b%20.{suffix}"
    (tmp_path / f"x.{suffix}.gz").write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(DataError, match=rf"x.{suffix}.gz cannot be read as a "):
        loader_of(tmp_path / f"x.{suffix}.gz", format=suffix.removesuffix("l"))


def test_tensors_and_nulls_of_ipc_are_loaded(tmp_path: Path) -> None:
    type_ = pa.fixed_shape_tensor(pa.int32(), [2, 3])
    storage = pa.FixedSizeListArray.from_arrays(pa.array(range(12), pa.int32()), 6)
    table = pa.table({"t": pa.ExtensionArray.from_storage(type_, storage), "n": pa.array([None, 5])})
    write_ipc(table, tmp_path / "x.arrow")
    (batch,) = loader_of(tmp_path, fill_null={"n": 1}, shuffle=False)
    assert (batch["t"] == np.arange(12).reshape(2, 2, 3)).all()
    with pytest.raises(DataError, match=r"x.arrow: row group 0, column 'n' has 1 null in row 0"):
        list(loader_of(tmp_path))


def test_format_is_that_of_the_suffix_or_the_given_one(tmp_path: Path) -> None:
    write_json(pa.table({"x": [1, 2]}), tmp_path / "x.txt")
    with pytest.raises(
        DataError, match=r"x.txt is not a folder, and has an unknown suffix; name the format with format="
    ):
        loader_of(tmp_path / "x.txt")
    assert len(list(loader_of(tmp_path / "x.txt", format="json"))) == 1
    csv.write_csv(pa.table({"x": [1, 2, 3]}), tmp_path / "x.csv")
    write_parquet({"x": [1]}, tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"the files have several formats: .*csv .*; select one with format="):
        loader_of(tmp_path)
    assert len(loader_of(tmp_path, format="csv", batch_size=1)) == 3
    assert len(ParquetLoader(tmp_path, batch_size=1, placement=alone)) == 1
    with pytest.raises(ValueError, match="format is 'orc'; expected one of 'parquet', 'ipc', "):
        loader_of(tmp_path, format="orc")


def test_loader_describes_groups_by_their_names(tmp_path: Path) -> None:
    described = {suffix: loader_of(written(tmp_path / suffix, suffix)).describe() for suffix in WRITERS}
    assert "71 rows in 12 record batches of 4 files" in described["arrow"]
    assert " blocks of 4 files" in described["csv"]
    assert " row groups of 4 files" in described["parquet"]


@given(
    rows=st.lists(st.tuples(st.text('a",\n\r;é', max_size=6), st.integers(-9, 9)), min_size=1, max_size=40),
    block_bytes=st.integers(1, 90),
    suffix=st.sampled_from(["csv", "tsv", "jsonl"]),
)
@settings(max_examples=repeats(40, 400), deadline=None)
def test_blocks_of_text_have_the_rows_of_the_whole_file(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, int]], block_bytes: int, suffix: str
) -> None:
    path = tmp_path_factory.mktemp("files") / f"x.{suffix}"
    names, numbers = zip(*((f"n{name}", number) for name, number in rows), strict=True)
    WRITERS[suffix](pa.table({"name": names, "number": numbers}), path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "_BLOCK_BYTES", block_bytes)
        (batch,) = loader_of(path, batch_size=len(rows), shuffle=False)
    assert batch["name"].tolist() == list(names)
    assert batch["number"].tolist() == list(numbers)


def test_text_in_which_no_block_ends_is_read_in_ever_larger_parts() -> None:
    class Counted(io.BytesIO):
        reads = 0

        def read(self, size: int | None = -1) -> bytes:
            self.reads += 1
            return super().read(size)

    format: Any = formats.format_of(dataset.CsvFileFormat(csv.ParseOptions(escape_char="\\")))
    text = b"a\n" + b"1\n" * 10_000
    source = Counted(text)
    assert list(format._blocks(source)) == [text]
    assert source.reads <= 10  # of 200 bytes, 200, 400, 800 and so on


@pytest.mark.parametrize(
    ("name", "text", "format", "cure"),
    [
        (
            "x.csv",
            'a,b\n"n\\"",1\n' * 60,
            dataset.CsvFileFormat(csv.ParseOptions(escape_char="\\")),
            r"with ParseOptions\(escape_char=\.\.\.\) a whole file is one block: split the file",
        ),
        ("x.csv", 'a,b\n"n,1\n' + "x,2\n" * 150, "csv", "look for a quote that is not closed"),
        ("x.jsonl", '{"x": 1}, ' * 60, "json", "write each object on a separate line"),
    ],
)
def test_block_of_text_that_is_too_large_for_pyarrow_is_an_error_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, format: Any, cure: str
) -> None:
    largest = formats._BLOCK_MAX
    csv.ReadOptions(block_size=largest + 1)
    with pytest.raises(OverflowError):
        csv.ReadOptions(block_size=largest + 2)
    monkeypatch.setattr(formats, "_BLOCK_MAX", 500)
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=rf"{name} cannot .* at byte \d+ has not ended after 500 .*{cure}"):
        loader_of(tmp_path, format=format)


#: Fields as CSV files have them: with quotes within, quoted, and with text after the quoted part.
_FIELD = st.one_of(
    st.text('x"', max_size=4).map(lambda text: f"n{text}"),
    st.text('x,\r\n"', max_size=4).map(lambda text: '"n{}"'.format(text.replace('"', '""'))),
    st.tuples(st.text("x,\n", max_size=3), st.text('x"', max_size=3)).map('"n{0[0]}"x{0[1]}'.format),
)


@given(
    rows=st.lists(st.tuples(_FIELD, _FIELD), min_size=1, max_size=20),
    block_bytes=st.integers(1, 90),
    doubled=st.booleans(),
)
@example(rows=[("a", '5" screen'), ("b", '"n\nx,y"')], block_bytes=90, doubled=True)
@settings(max_examples=repeats(60, 600), deadline=None)
def test_blocks_of_csv_have_the_rows_of_the_whole_file_wherever_quotes_are(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], block_bytes: int, doubled: bool
) -> None:
    path = tmp_path_factory.mktemp("files") / "x.csv"
    path.write_text("".join(",".join(row) + "\n" for row in [("a", "b"), *rows]))
    parse = {"double_quote": doubled, "newlines_in_values": True}
    try:
        whole = csv.read_csv(path, parse_options=csv.ParseOptions(**parse))
    except pa.ArrowInvalid:  # without doubled quotes some fields end early
        assume(False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "_BLOCK_BYTES", block_bytes)
        format = dataset.CsvFileFormat(csv.ParseOptions(**parse))
        (batch,) = loader_of(path, format=format, batch_size=100, shuffle=False)
    assert {name: batch[name].tolist() for name in "ab"} == whole.to_pydict()


# Large integers

LARGE = 2**53 + 1


def text_file(path: Path, values: list[str]) -> Path:
    is_csv = path.suffix == ".csv"
    lines = ["x", *values] if is_csv else [f'{{"x": {value}}}' for value in values]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
@pytest.mark.parametrize("null", [False, True])
def test_integers_of_text_keep_their_values(tmp_path: Path, suffix: str, null: bool) -> None:
    values = [LARGE, -LARGE, 2**63 - 1, -(2**63), 1]
    texts = [*map(str, values), *(["NULL" if suffix == "csv" else "null"] if null else [])]
    text_file(tmp_path / f"0.{suffix}", texts)
    text_file(tmp_path / f"1.{suffix}", ["3"])
    (batch,) = loader_of(tmp_path, batch_size=10, shuffle=False, fill_null={"x": 7} if null else None)
    assert batch["x"].dtype == np.int64
    assert batch["x"].tolist() == [*values, *([7] if null else []), 3]


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
@pytest.mark.parametrize(
    ("files", "named"),
    [
        ([[LARGE, "1.5"]], LARGE),
        ([[LARGE], ["1.5"]], LARGE),
        ([["1.5", -1], [3, -LARGE]], -LARGE),
        ([[3, 2**63 + 1]], 2**63 + 1),
        ([["2.5e300", 2**64 + 1]], 2**64 + 1),
    ],
)
def test_integer_that_would_be_rounded_is_an_error(
    tmp_path: Path, suffix: str, files: list[list[Any]], named: int
) -> None:
    paths = [
        text_file(tmp_path / f"{number}.{suffix}", [*map(str, values)]) for number, values in enumerate(files)
    ]
    (path,) = [path for path, values in zip(paths, files, strict=True) if named in values]
    with pytest.raises(
        DataError, match=rf"{path}: column 'x' has the integer {named}, which would be rounded"
    ):
        loader_of(tmp_path)


def test_integer_in_a_list_of_json_that_would_be_rounded_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(f'{{"x": [1, 2]}}\n{{"x": [0.5, {LARGE}]}}\n')
    with pytest.raises(DataError, match=f"column 'x' has the integer {LARGE}"):
        loader_of(tmp_path, pad={"x": 0})


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_large_numbers_that_are_exact_or_no_integers_are_read(tmp_path: Path, suffix: str) -> None:
    values = [2.0**53, -(2.0**60), 0.5, 1e20, 1e300]
    texts = [str(2**53), str(-(2**60)), "0.5", str(10**20), "1e300"]
    text_file(tmp_path / f"0.{suffix}", texts)
    (batch,) = loader_of(tmp_path, batch_size=10, shuffle=False)
    assert batch["x"].tolist() == values


def test_column_of_csv_whose_type_is_given_is_not_checked(tmp_path: Path) -> None:
    text_file(tmp_path / "0.csv", [str(LARGE), "0.5"])
    (tmp_path / "1.csv").write_text(f"x\n{2**64 - 1}\n")
    options = csv.ConvertOptions(column_types={"x": pa.float64()})
    given = dataset.CsvFileFormat(default_fragment_scan_options=dataset.CsvFragmentScanOptions(options))
    (batch,) = loader_of(tmp_path / "0.csv", format=given, batch_size=10, shuffle=False)
    assert batch["x"].tolist() == [2.0**53, 0.5]
    options = csv.ConvertOptions(column_types={"x": pa.uint64()})
    given = dataset.CsvFileFormat(default_fragment_scan_options=dataset.CsvFragmentScanOptions(options))
    (batch,) = loader_of(tmp_path / "1.csv", format=given, batch_size=10, shuffle=False)
    assert batch["x"].tolist() == [2**64 - 1]
