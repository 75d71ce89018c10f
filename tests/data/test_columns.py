"""Columns of images, and of lists of different lengths."""

from __future__ import annotations

import io
import subprocess
import sys
import time
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from PIL import Image
from pyarrow import parquet

from polyhvd.data import DataError, ParquetLoader
from polyhvd.data.columns import Column, columns_of

PIXELS = np.random.default_rng(1).integers(0, 256, (9, 6, 5, 3), np.uint8)


def encoded(pixels: Any, form: str = "PNG", mode: str | None = None) -> bytes:
    file = io.BytesIO()
    image = Image.fromarray(pixels)
    (image if mode is None else image.convert(mode)).save(file, form)
    return file.getvalue()


def loader_of(values: Any, folder: Path, **options: Any) -> ParquetLoader:
    """A loader of one column x, in row groups of four rows."""
    parquet.write_table(pa.table({"x": values}), folder / "x.parquet", row_group_size=4)
    options = {"batch_size": 3, "shuffle": False, "placement": lambda: (0, 1), **options}
    return ParquetLoader(folder / "x.parquet", **options)


def all_rows(values: Any, folder: Path, **options: Any) -> Any:
    (batch,) = loader_of(values, folder, batch_size=len(values), **options)
    return batch["x"]


# Images


@pytest.mark.parametrize("shuffle", [True, False])
def test_images_are_decoded_to_arrays_of_their_pixels(tmp_path: Path, shuffle: bool) -> None:
    images = [encoded(pixels) for pixels in PIXELS]
    loader = loader_of(images, tmp_path, decode=["x"], shuffle=shuffle)
    for batch in loader:
        assert batch["x"].dtype == np.uint8
        assert np.array_equal(batch["x"], PIXELS[batch.indices])
        batch["x"][:] = 0
    assert loader._template()["x"].shape[1:] == PIXELS.shape[1:]


def test_jpeg_images_are_decoded(tmp_path: Path) -> None:
    grey = np.full((16, 8), 77, np.uint8)
    found = all_rows([encoded(grey, "JPEG")], tmp_path, decode=["x"])
    assert found.shape == (1, 16, 8)
    assert abs(found.astype(int) - 77).max() <= 2


@pytest.mark.parametrize(
    ("stored", "channels"),
    [("1", []), ("L", []), ("LA", [4]), ("P", [3]), ("RGB", [3]), ("RGBA", [4]), ("I;16", [])],
)
def test_images_of_each_mode_become_arrays(tmp_path: Path, stored: str, channels: list[int]) -> None:
    data = encoded(PIXELS[0], mode="L" if stored == "I;16" else stored)
    if stored == "I;16":
        data = encoded(np.full((6, 5), 1000, np.uint16))
    found = all_rows([data], tmp_path, decode=["x"])
    assert found.shape == (1, 6, 5, *channels)
    assert found.dtype == (np.uint16 if stored == "I;16" else np.uint8)
    if stored == "RGB":
        assert np.array_equal(found[0], PIXELS[0])


def test_images_are_converted_to_a_mode(tmp_path: Path) -> None:
    images = [encoded(PIXELS[0]), encoded(PIXELS[1], mode="L"), encoded(PIXELS[2], mode="RGBA")]
    assert all_rows(images, tmp_path, decode={"x": "RGB"}).shape == (3, 6, 5, 3)
    assert all_rows(images, tmp_path, decode={"x": "L"}).shape == (3, 6, 5)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
def test_images_of_16_bits_are_converted_by_their_high_bytes(tmp_path: Path, mode: str) -> None:
    data = encoded(np.array([[100, 1000, 32768, 65535]], np.uint16))
    found = all_rows([data], tmp_path, decode={"x": mode}).reshape(4, -1)
    assert found.dtype == np.uint8
    assert found[:, 0].tolist() == [0, 3, 128, 255]
    assert (found[:, :3] == found[:, :1]).all()
    assert (found[:, 3:] == 255).all()


def test_function_can_decode_bytes(tmp_path: Path) -> None:
    found = all_rows([b"ab", b"cd"], tmp_path, decode={"x": lambda data: np.frombuffer(data, np.uint8)})
    assert found.tolist() == [[97, 98], [99, 100]]


def test_transform_gets_decoded_images(tmp_path: Path) -> None:
    images = [encoded(pixels) for pixels in PIXELS]
    found = all_rows(images, tmp_path, decode=["x"], transform=lambda batch: {"x": batch["x"][..., 0]})
    assert np.array_equal(found, PIXELS[..., 0])


@pytest.mark.parametrize(
    ("damaged", "reason"),
    [
        (b"no image", "8 bytes are neither JPEG nor PNG"),
        (encoded(PIXELS[0], "JPEG")[:-200], "[Tt]runcated"),
        (encoded(PIXELS[0])[:-40], "truncated"),
        (encoded(PIXELS[0], "GIF"), "bytes are neither JPEG nor PNG"),
    ],
    ids=["text", "jpeg", "png", "gif"],
)
def test_image_that_cannot_be_decoded_is_named(tmp_path: Path, damaged: bytes, reason: str) -> None:
    images = [*map(encoded, PIXELS[:6]), damaged]
    loader = loader_of(images, tmp_path, decode=["x"])
    with pytest.raises(DataError, match=rf"x\.parquet: row group 1, row 2, column 'x' .*decoded: .*{reason}"):
        list(loader)


def test_images_of_several_sizes_or_modes_in_a_batch_are_an_error_with_the_cure(tmp_path: Path) -> None:
    for other, form in ((PIXELS[0, 1:], r"uint8\[5, 5, 3\]"), (PIXELS[0, ..., 0], r"uint8\[6, 5\]")):
        loader = loader_of([encoded(PIXELS[0]), encoded(other)], tmp_path, decode=["x"])
        message = (
            rf"row group 0, row 1, column 'x' is decoded to {form}, but another row of the batch to uint8\["
        )
        with pytest.raises(DataError, match=rf'{message}.*pass a mode such as decode=.*"RGB"'):
            list(loader)


def test_exception_of_a_function_that_decodes_is_raised_with_its_own_traceback(tmp_path: Path) -> None:
    def failing(data: bytes) -> Any:
        raise KeyError(data)

    with pytest.raises(KeyError) as raised:
        list(loader_of([b"a"], tmp_path, decode={"x": failing}))
    assert raised.traceback[-1].name == "failing"
    if sys.version_info >= (3, 11):
        assert raised.value.__notes__[0].endswith("x.parquet: row group 0, row 0, column 'x'")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode": "x"}, "decode is 'x'; expected a list of names"),
        ({"decode": ["y"]}, "decode names the column 'y', but the selected columns are x"),
        ({"decode": {"x": "HSV"}}, "'HSV'}: expected one of L, RGB, RGBA, a function"),
        ({"pad": {"x": 0}}, "pad names the column 'x' of type binary; expected one of lists"),
        ({"pad": 0}, "pad is 0; expected a mapping"),
    ],
)
def test_arguments_of_no_use_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loader_of([b"a"], tmp_path, **options)


def test_numbers_cannot_be_decoded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="decode names the column 'x' of type int64; expected one of bytes"):
        loader_of([1], tmp_path, decode=["x"])


def test_pillow_is_imported_for_images_only_and_its_lack_is_an_error_with_the_cure(tmp_path: Path) -> None:
    loader_of([b"a"], tmp_path)
    program = f"""
import sys
sys.modules["PIL"] = None
from polyhvd.data import ParquetLoader
for options in ({{}}, {{"decode": {{"x": len}}}}, {{"decode": ["x"]}}):
    loader = ParquetLoader({str(tmp_path)!r}, batch_size=1, placement=lambda: (0, 1), **options)
    print([batch["x"].tolist() for batch in loader])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["[[b'a']]", "[[1]]"]
    assert "ModuleNotFoundError: decode= needs Pillow, which cannot be imported" in done.stderr
    assert "pip install 'polyhvd[data]'" in done.stderr


# Lists of different lengths

LISTS = [[1, 2], [], [3], [4, 5, 6], [7], [8, 9], []]


@pytest.mark.parametrize("kind", [pa.list_, pa.large_list])
def test_lists_are_padded_to_the_longest_of_the_batch(tmp_path: Path, kind: Any) -> None:
    for batch in loader_of(pa.array(LISTS, kind(pa.int16())), tmp_path, pad={"x": -1}, shuffle=True):
        longest = max(len(LISTS[row]) for row in batch.indices)
        expected = [LISTS[row] + [-1] * (longest - len(LISTS[row])) for row in batch.indices]
        assert batch["x"].dtype == np.int16
        assert batch["x"].tolist() == expected


def test_lists_that_are_not_padded_are_objects_that_a_transform_can_make_arrays_of(tmp_path: Path) -> None:
    found = all_rows(LISTS, tmp_path, pad={"x": None})
    assert [row.tolist() for row in found] == LISTS

    def collate(batch: dict[str, Any]) -> dict[str, Any]:
        return {"flat": np.concatenate(batch["x"]), "lengths": np.asarray([len(row) for row in batch["x"]])}

    for batch in loader_of(LISTS, tmp_path, pad={"x": None}, transform=collate, shuffle=True):
        assert batch["flat"].tolist() == [value for row in batch.indices for value in LISTS[row]]
        assert batch["lengths"].tolist() == [len(LISTS[row]) for row in batch.indices]


def test_lists_of_tensors_are_padded(tmp_path: Path) -> None:
    boxes = pa.array([[[1, 2]], [], [[3, 4], [5, 6]]], pa.list_(pa.list_(pa.float32(), 2)))
    found = all_rows(boxes, tmp_path, pad={"x": 0.5})
    assert found.dtype == np.float32
    assert found.tolist() == [[[1, 2], [0.5, 0.5]], [[0.5, 0.5], [0.5, 0.5]], [[3, 4], [5, 6]]]


def test_lists_need_a_decision(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"rows of different lengths \(list<.*int64>\); pass pad={'x': 0} to"
    ):
        loader_of(LISTS, tmp_path)


@pytest.mark.parametrize(
    ("values", "pad", "message"),
    [
        (LISTS, 1.5, "pad=1.5 does not fit column 'x' of type int64"),
        (LISTS, "a", "pad='a' does not fit"),
        ([[[1]]], 0, "column 'x' has the type list<.*list<.*int64>>, which cannot be made an array"),
        ([1], 0, "pad names the column 'x' of type int64; expected one of lists"),
    ],
)
def test_padding_that_does_not_fit_is_refused(tmp_path: Path, values: Any, pad: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loader_of(values, tmp_path, pad={"x": pad})


def test_lists_count_for_the_memory_in_which_rows_are_shuffled(tmp_path: Path) -> None:
    lists = np.random.default_rng(1).integers(0, 100, (64, 1000))  # stored in 7 bits each, read as int64
    loader = loader_of(list(lists), tmp_path, pad={"x": 0}, shuffle=True, shuffle_bytes=40 * 8000, streams=1)
    assert 30 <= loader.state_dict()["window"] <= 40


def test_nulls_in_lists_are_named_or_filled(tmp_path: Path) -> None:
    lists = [[1], [2, 3], None, [4], [], [5, None, None], [6]]
    with pytest.raises(DataError, match="row group 0, column 'x' has 1 null in row 2; pass fill_null="):
        list(loader_of(lists, tmp_path, pad={"x": 0}))
    message = "row group 1, column 'x' has 2 nulls, the first in row 1"
    with pytest.raises(DataError, match=message):
        list(loader_of([[] if row is None else row for row in lists], tmp_path, pad={"x": 0}))
    found = all_rows(lists, tmp_path, pad={"x": 0}, fill_null=9)
    assert found.tolist() == [[1, 0, 0], [2, 3, 0], [0] * 3, [4, 0, 0], [0] * 3, [5, 9, 9], [6, 0, 0]]


# Other types


def test_first_row_that_is_null_is_named(tmp_path: Path) -> None:
    lists = pa.array([[1, 2], [3, 4], [5, 6], [7, 8], [9, None]], pa.list_(pa.int32(), 2))
    with pytest.raises(DataError, match=r"x\.parquet: row group 1, column 'x' has 1 null in row 0; pass"):
        list(loader_of(lists, tmp_path))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            pa.array([datetime(2024, 5, 6, 7, tzinfo=timezone.utc)], pa.timestamp("us", "Europe/Berlin")),
            np.array(["2024-05-06T07"], "datetime64[us]"),
        ),
        (pa.array([date(2024, 5, 6)]), np.array(["2024-05-06"], "datetime64[D]")),
        (pa.array([Decimal("1.25")], pa.decimal128(9, 2)), np.array([Decimal("1.25")])),
        (pa.array([7, 8, 7]).dictionary_encode(), np.array([7, 8, 7])),
    ],
    ids=["timestamps", "dates", "decimals", "dictionaries"],
)
def test_times_decimals_and_dictionaries_are_arrays(tmp_path: Path, values: Any, expected: Any) -> None:
    found = all_rows(values, tmp_path)
    assert found.dtype == expected.dtype
    assert found.tolist() == expected.tolist()


def test_timestamps_of_int96_that_do_not_fit_into_nanoseconds_are_an_error(tmp_path: Path) -> None:
    times = pa.array([datetime(2024, 5, 6), datetime(9999, 12, 31)], pa.timestamp("us"))
    table = pa.table({"x": times, "y": times, "n": [0, 1]})
    parquet.write_table(table, tmp_path / "x.parquet", use_deprecated_int96_timestamps=True)
    options: dict[str, Any] = {"batch_size": 2, "placement": lambda: (0, 1), "shuffle": False}
    refused = r"x.parquet: row group 0, column 'x' has timestamps before 1677 or after 2262, stored as INT96"
    for chosen in (None, pc.field("x") < datetime(2030, 1, 1)):  # pyarrow reads the second one as of 1816
        with pytest.raises(DataError, match=refused):
            list(ParquetLoader(tmp_path, columns=["x"], filter=chosen, **options))
    (batch,) = ParquetLoader(tmp_path, filter=pc.field("n") == 0, **options)
    assert batch["x"].tolist() == batch["y"].tolist() == [1_714_953_600_000_000_000]
    (batch,) = ParquetLoader(tmp_path, columns=["n"], **options)
    assert batch["n"].tolist() == [0, 1]


_LISTS_OF_TIMES = [pa.list_, pa.large_list, lambda type_: pa.list_(type_, 1)]


@pytest.mark.parametrize("list_type", _LISTS_OF_TIMES, ids=["list", "large", "fixed"])
@pytest.mark.parametrize("name", ["x", "x.y"])
def test_timestamps_of_int96_in_lists_are_checked_like_others(
    tmp_path: Path, list_type: Any, name: str
) -> None:
    times = pa.array([[datetime(2024, 5, 6)], [datetime(9999, 12, 31)]], list_type(pa.timestamp("us")))
    table = pa.table({name: times, "n": [0, 1]})
    path = tmp_path / "x.parquet"
    parquet.write_table(table, path, use_deprecated_int96_timestamps=True, row_group_size=1)
    options: dict[str, Any] = {"batch_size": 1, "placement": lambda: (0, 1), "shuffle": False, "pad": {}}
    if not pa.types.is_fixed_size_list(times.type):
        options["pad"] = {name: None}
    refused = rf"row group 1, column '{name}' has timestamps before 1677 or after 2262, stored as INT96"
    for chosen in (None, pc.field("n") >= 0):
        with pytest.raises(DataError, match=refused):
            list(ParquetLoader(path, columns=[name], filter=chosen, **options))
    for columns in (None, [name]):
        (batch,) = ParquetLoader(path, columns=columns, filter=pc.field("n") == 0, **options)
        assert batch[name][0].tolist() == [1_714_953_600_000_000_000]


def test_null_in_a_dictionary_is_named_or_filled(tmp_path: Path) -> None:
    values = pa.array(["a", "b", None]).dictionary_encode()
    with pytest.raises(DataError, match="has 1 null in row 2"):
        list(loader_of(values, tmp_path))
    assert all_rows(values, tmp_path, fill_null="c").tolist() == ["a", "b", "c"]


def test_rows_of_errors_are_counted_among_those_that_a_filter_selects(tmp_path: Path) -> None:
    table = pa.table({"x": [b"", b"", b"no image"], "n": [0, 1, 2]})
    parquet.write_table(table, tmp_path / "x.parquet")
    options: dict[str, Any] = {"batch_size": 2, "placement": lambda: (0, 1), "filter": pc.field("n") > 1}
    with pytest.raises(DataError, match="row group 0, row 0 of those that filter= selects, column 'x'"):
        list(ParquetLoader(tmp_path, columns=["x"], decode=["x"], **options))


# Others


def test_columns_of_wide_files_are_made_in_a_time_that_grows_with_their_number() -> None:
    def cpu_s(count: int) -> float:
        schema = pa.schema([(f"column {number}", pa.int64()) for number in range(count)])
        began = time.process_time()
        assert len(columns_of(schema)) == count
        return time.process_time() - began

    assert cpu_s(8000) < 20 * cpu_s(1000)


def test_dictionary_of_bytes_of_a_fixed_size_has_their_size() -> None:
    column = pa.chunked_array([pa.array([b"abcdef", b"ghijkl", b"abcdef"], pa.binary(6)).dictionary_encode()])
    found = Column(pa.field("x", column.type)).decode(column)
    assert [row.tobytes() for row in found] == [b"abcdef", b"ghijkl", b"abcdef"]


@pytest.mark.parametrize(("type_", "fill"), [(pa.string_view(), "c"), (pa.binary_view(), b"c")])
def test_null_in_views_is_filled(type_: pa.DataType, fill: Any) -> None:
    column = pa.chunked_array([pa.array([None, fill, None], type_)])
    assert Column(pa.field("x", type_), fill).decode(column).tolist() == [fill] * 3


@pytest.mark.parametrize(("type_", "text"), [(pa.string_view(), "abc"), (pa.binary_view(), b"abc")])
@pytest.mark.parametrize("fill", [False, True])
def test_dictionaries_of_views_become_arrays(type_: pa.DataType, text: Any, fill: bool) -> None:
    words = [text, text[:1], text[1:]]
    indices = pa.array([0, 2, None if fill else 1, 0])
    values = pa.DictionaryArray.from_arrays(indices, pa.array(words, type_))
    column = Column(pa.field("x", values.type), text[:1] if fill else None)
    assert column.decode(pa.chunked_array([values.slice(1)])).tolist() == [words[2], words[1], words[0]]


@pytest.mark.parametrize("in_lists", [False, True])
def test_strings_of_other_encodings_are_errors_of_their_file_which_can_be_left_out(
    tmp_path: Path, in_lists: bool
) -> None:
    offsets = pa.array([0, 1, 2, 3], pa.int32()).buffers()[1]
    strings = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"a\xffc")])
    values = pa.ListArray.from_arrays([0, 1, 2, 3], strings) if in_lists else strings
    pad = {"pad": {"x": None}} if in_lists else {}
    with pytest.raises(DataError, match=r"x.parquet: row group 0, column 'x' cannot be made an array: "):
        all_rows(values, tmp_path, **pad)
    (batch,) = loader_of(values, tmp_path, on_error="skip", **pad)
    assert batch.indices.tolist() == [0, 2]
    assert [list(row) for row in batch["x"]] == [["a"], ["c"]]
