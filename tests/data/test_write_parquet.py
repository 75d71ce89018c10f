"""Files that are written for loaders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from polyhvd.data import ParquetLoader, write_parquet


def group_sizes(path: Path) -> list[int]:
    footer = parquet.read_metadata(path)
    return [footer.row_group(number).num_rows for number in range(footer.num_row_groups)]


def parts(*sizes: int) -> Iterator[dict[str, Any]]:
    first = 0
    for size in sizes:
        yield {"x": np.arange(first, first + size)}
        first += size


@pytest.mark.parametrize("sizes", [(10,), (3, 3, 3, 1), (1,) * 10, (0, 9, 0, 1)])
def test_row_groups_have_the_given_size_however_the_rows_come(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    path = tmp_path / "new" / "folder" / "x.parquet"
    assert write_parquet(parts(*sizes), path, rows_per_group=4) == 10
    assert group_sizes(path) == [4, 4, 2]
    assert parquet.read_table(path)["x"].to_pylist() == list(range(10))


def test_bytes_and_strings_are_written_with_their_zeros(tmp_path: Path) -> None:
    values = [b"a\0b", b"a\0", b"", b"\0\0"]
    write_parquet({"x": values, "y": np.array(["a\0b", "é", "", "\0c"])}, tmp_path / "x.parquet")
    table = parquet.read_table(tmp_path / "x.parquet")
    assert table["x"].to_pylist() == values
    assert table["y"].to_pylist() == ["a\0b", "é", "", "\0c"]


def test_a_part_may_have_the_memory_of_the_one_before(tmp_path: Path) -> None:
    numbers, images = np.empty(3), np.empty((3, 2), np.uint8)

    def refilled() -> Iterator[dict[str, Any]]:
        for part in range(4):
            numbers[:] = images[:] = part
            yield {"number": numbers, "image": images}

    write_parquet(refilled(), tmp_path / "x.parquet", rows_per_group=7)
    written = parquet.read_table(tmp_path / "x.parquet")
    assert written["number"].to_pylist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [row[0] for row in written["image"].to_pylist()] == written["number"].to_pylist()


def test_row_groups_have_about_a_mebibyte_otherwise(tmp_path: Path) -> None:
    write_parquet({"x": np.zeros((40, 1 << 14))}, tmp_path / "x.parquet")
    assert group_sizes(tmp_path / "x.parquet") == [8] * 5
    write_parquet({"x": []}, tmp_path / "x.parquet")
    assert group_sizes(tmp_path / "x.parquet") == []


class Frame:
    """A DataFrame as those of pandas and Polars offer themselves."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return pa.table({"x": [1, 2]}).__arrow_c_stream__(requested_schema)


@pytest.mark.parametrize(
    "data",
    [
        {"x": [1, 2]},
        {"x": pa.array([1, 2])},
        pa.table({"x": [1, 2]}),
        pa.record_batch({"x": pa.array([1, 2])}),
        Frame(),
        [pa.table({"x": [1]}), {"x": np.array([2])}],
    ],
    ids=["lists", "arrow_arrays", "table", "record_batch", "data_frame", "parts"],
)
def test_arrays_tables_frames_and_their_iterables_are_data(tmp_path: Path, data: Any) -> None:
    assert write_parquet(data, tmp_path / "x.parquet") == 2
    assert parquet.read_table(tmp_path / "x.parquet").to_pydict() == {"x": [1, 2]}


class Series:
    """A column as those of Polars offer themselves: NumPy gets floats in place of integers and nulls."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._array.__arrow_c_stream__(requested_schema)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self._array.to_numpy()


@pytest.mark.parametrize("values", [[2**60 + 1, None, 7], [1.5, None, 7.0]], ids=["integers", "floats"])
@pytest.mark.parametrize("column_type", [pa.chunked_array, Series], ids=["arrow", "other"])
def test_numbers_of_arrow_keep_their_values_and_nulls(
    tmp_path: Path, column_type: Any, values: list[Any]
) -> None:
    column = column_type(pa.chunked_array([values[:2], values[2:]]))
    write_parquet({"x": column, "y": [1, 2, 3]}, tmp_path / "x.parquet", rows_per_group=2)
    assert parquet.read_table(tmp_path / "x.parquet")["x"].to_pylist() == values
    assert group_sizes(tmp_path / "x.parquet") == [2, 1]


def test_arrays_are_bytes_or_arrows_tensors(tmp_path: Path) -> None:
    write_parquet({"x": np.zeros((2, 3, 4), np.float32)}, tmp_path / "x.parquet", arrays_as="tensor")
    assert parquet.read_schema(tmp_path / "x.parquet").field("x").type == pa.fixed_shape_tensor(
        pa.float32(), (3, 4)
    )
    write_parquet({"x": np.zeros((2, 3, 4), np.float32)}, tmp_path / "x.parquet")
    field = parquet.read_schema(tmp_path / "x.parquet").field("x")
    assert field.type == pa.binary(48)
    assert {b"shape": b"[3, 4]", b"dtype": b"float32"}.items() <= field.metadata.items()


@pytest.mark.parametrize("arrays_as", ["tensor", "bytes"])
def test_arrays_of_the_other_byte_order_are_stored_in_the_machines(tmp_path: Path, arrays_as: str) -> None:
    x, y = np.arange(3, dtype=">i4"), np.arange(6, dtype=">f8").reshape(3, 2)
    write_parquet({"x": x, "y": y}, tmp_path / "x.parquet", arrays_as=arrays_as)
    (batch,) = ParquetLoader(tmp_path, batch_size=3, shuffle=False, placement=lambda: (0, 1))
    assert (batch["x"].tolist(), batch["y"].tolist()) == (x.tolist(), y.tolist())


def test_failed_write_leaves_the_former_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_parquet({"x": [1]}, path)
    before = path.read_bytes()

    def failing() -> Iterator[dict[str, Any]]:
        yield {"x": np.arange(100)}
        assert [file.name for file in tmp_path.iterdir() if not file.name.startswith(".")] == ["x.parquet"]
        raise LookupError("no more rows")

    with pytest.raises(LookupError, match="no more rows"):
        write_parquet(failing(), path, rows_per_group=10)
    assert [file.name for file in tmp_path.iterdir()] == ["x.parquet"]
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (3, {}, "data is a int; expected a mapping"),
        (np.zeros(3), {}, "data is a ndarray; expected a mapping"),
        ([np.zeros(3)], {}, "a part of the data is a ndarray"),
        ([], {}, "data is empty"),
        ({}, {}, "no columns"),
        ({"x": [1], "y": [1, 2]}, {}, "the same number of rows, but there are 'x' 1, 'y' 2"),
        ({"x": 1}, {}, "column 'x' is a single value"),
        ({"x": np.ma.masked_equal([1, 2], 2)}, {}, "column 'x' has masked entries"),
        ({"x": np.ma.masked_equal([[1], [2]], 2)}, {}, "column 'x' has masked entries"),
        ({"x": [np.ma.masked_equal([1, 2], 2)]}, {}, "column 'x' has masked entries"),
        ({"x": [5, 2**63 + 1]}, {}, "column 'x' has the integer 9223372036854775809, which"),
        ({"x": [2**64, None]}, {}, "column 'x' of dtype object .* cannot be written: "),
        ({"x": [[1], [2, 3]]}, {}, r"column 'x' has rows of different shapes .* pyarrow.array\(lists\)"),
        ({"x": np.zeros(2, complex)}, {}, "column 'x' of dtype complex128"),
        ({"x": np.zeros((2, 2), object)}, {}, "rows that are arrays have to have numbers"),
        ([{"x": [1]}, {"x": [1.5]}], {}, "part 1 of the data has the columns x double, but part 0 x int64"),
        ([{"x": [1]}, {"y": [1]}], {}, "part 1 of the data has the columns y int64, but part 0 x int64"),
        (
            [{"x": np.zeros((1, 2), dtype)} for dtype in ("float32", "int32")],
            {},
            "part 1 of the data has the columns x fixed_size_binary.* 'int32'}, but part 0 x .* 'float32'}",
        ),
        ({"x": [1]}, {"rows_per_group": 0}, "rows_per_group is 0"),
        ({"x": [1]}, {"arrays_as": "list"}, "arrays_as is 'list'"),
    ],
)
def test_bad_data_is_refused_and_leaves_no_file(
    tmp_path: Path, data: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write_parquet(data, tmp_path / "x.parquet", **options)
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_an_error_that_names_the_file_and_leaves_the_former(full: Path) -> None:
    (full / "filling").unlink()
    path = full / "x.parquet"
    write_parquet({"x": np.zeros(8)}, path)
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_parquet({"x": np.random.default_rng(0).random(1 << 16)}, path)
    assert caught.value.filename == str(path)
    assert [each.name for each in full.iterdir()] == ["x.parquet"]
    assert len(parquet.read_table(path)) == 8
