"""Data sets of Petastorm as sources of loaders.

tests/data/petastorm was written by Petastorm 0.13.1 (``materialize_dataset`` on Spark 4.3, pyarrow 12).
It has the rows 0 to 11 of :func:`row`, and this schema::

    Unischema("Rows", [
        UnischemaField("id", np.int32, (), ScalarCodec(IntegerType()), False),
        UnischemaField("small", np.uint8, (), ScalarCodec(ShortType()), False),
        UnischemaField("name", np.str_, (), ScalarCodec(StringType()), False),
        UnischemaField("price", Decimal, (), ScalarCodec(DecimalType(10, 2)), False),
        UnischemaField("image", np.uint8, (6, 8, 3), CompressedImageCodec("png"), False),
        UnischemaField("gray", np.uint16, (4, 5), CompressedImageCodec("png"), False),
        UnischemaField("photo", np.uint8, (16, 16, 3), CompressedImageCodec("jpeg", 95), False),
        UnischemaField("matrix", np.float32, (2, 3), NdarrayCodec(), False),
        UnischemaField("packed", np.float64, (None, 2), CompressedNdarrayCodec(), False),
        UnischemaField("maybe", np.float32, (3,), NdarrayCodec(), True),
        UnischemaField("flag", np.bool_, (), ScalarCodec(BooleanType()), False),
        UnischemaField("plain", np.int64, (), None, False),
    ])
"""

from __future__ import annotations

import os
import pickle
import shutil
from decimal import Decimal
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from polyhvd.data import DataError, ParquetLoader

FOLDER = Path(__file__).parent / "petastorm"
FIXED = ["id", "small", "name", "price", "image", "gray", "photo", "matrix", "flag", "plain"]
KEY = b"dataset-toolkit.unischema.v1"


def row(i: int) -> dict[str, Any]:
    random = np.random.default_rng(i)
    return {
        "id": i,
        "small": i % 250,
        "name": f"row {i}",
        "price": Decimal(i) / 4,
        "image": random.integers(0, 256, (6, 8, 3), np.uint8),
        "gray": random.integers(0, 65536, (4, 5), np.uint16),
        "photo": np.full((16, 16, 3), (i * 5 % 256, 100, 200), np.uint8),
        "matrix": random.normal(size=(2, 3)).astype(np.float32),
        "packed": random.normal(size=(i % 3 + 1, 2)),
        "maybe": None if i % 2 else np.full(3, i, np.float32),
        "flag": bool(i % 2),
        "plain": i,
    }


def loader_of(source: Any = FOLDER, **options: Any) -> ParquetLoader:
    return ParquetLoader(source, **{"batch_size": 5, "placement": lambda: (0, 1), **options})


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The data set as Spark partitions one."""
    (tmp_path / "day=1" / "hour=2").mkdir(parents=True)
    shutil.copy(FOLDER / "_common_metadata", tmp_path)
    shutil.copy(FOLDER / "part-0.parquet", tmp_path / "day=1" / "hour=2")
    return tmp_path


def set_schema(folder: Path, pickled: bytes) -> None:
    schema = pq.read_schema(folder / "_common_metadata")
    pq.write_metadata(schema.with_metadata({KEY: pickled}), folder / "_common_metadata")


@pytest.mark.parametrize("workers", [0, 1])
def test_columns_are_decoded_by_the_schema_of_petastorm(workers: int) -> None:
    seen = []
    for batch in loader_of(columns=FIXED, workers=workers):
        dtypes = [batch[name].dtype.name for name in ("image", "gray", "photo", "matrix")]
        assert dtypes == ["uint8", "uint16", "uint8", "float32"]
        for i, index in enumerate(batch["id"].tolist()):
            expected = row(index)
            for name in ("image", "gray", "matrix"):
                np.testing.assert_array_equal(batch[name][i], expected[name])
            assert np.abs(batch["photo"][i].astype(int) - expected["photo"]).max() <= 2  # JPEG
            for name in ("small", "name", "price", "flag", "plain"):
                assert batch[name][i] == expected[name]
            seen.append(index)
    assert sorted(seen) == list(range(12))


def test_compressed_arrays_of_different_shapes_and_nulls() -> None:
    for batch in loader_of(columns=["id", "packed"], batch_size=1):
        np.testing.assert_array_equal(batch["packed"][0], row(int(batch["id"][0]))["packed"])
    selected = loader_of(columns=["id", "maybe"], filter=pc.field("id").isin([0, 2, 4]), batch_size=3)
    for batch in selected:
        np.testing.assert_array_equal(batch["maybe"], np.repeat(batch["id"], 3).reshape(-1, 3))
    with pytest.raises(DataError, match="column 'maybe' has 6 nulls, the first in row 1"):
        list(loader_of(columns=["maybe"]))


def test_a_partitioned_or_remote_data_set_is_decoded(copied: Path) -> None:
    (batch,) = loader_of(copied, columns=["id", "matrix", "hour"], batch_size=12, shuffle=False)
    np.testing.assert_array_equal(batch["matrix"], [row(i)["matrix"] for i in range(12)])
    assert set(batch["hour"].tolist()) == {2}
    memory = fsspec.filesystem("memory")
    memory.put(str(FOLDER), "/rows of petastorm", recursive=True)
    (batch,) = loader_of("memory:///rows of petastorm", columns=["matrix"], batch_size=12, shuffle=False)
    np.testing.assert_array_equal(batch["matrix"], [row(i)["matrix"] for i in range(12)])


def test_decode_takes_precedence(copied: Path) -> None:
    set_schema(copied, b"damaged")  # and is not even read
    decode = {"matrix": lambda data: np.frombuffer(data, np.uint8)[:6]}
    (batch,) = loader_of(copied, columns=["matrix"], decode=decode, batch_size=12)
    assert {bytes(rows) for rows in batch["matrix"]} == {b"\x93NUMPY"}


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("what", ["damaged", "a call", "no schema"])
def test_metadata_that_is_no_schema_is_an_error_and_calls_nothing(copied: Path, what: str) -> None:
    made = copied / "made"
    pickles = {
        "damaged": b"\x80\x04\x95",
        "a call": pickle.dumps(Hostile(made)),
        "no schema": pickle.dumps(1),
    }
    set_schema(copied, pickles[what])
    with pytest.raises(
        DataError, match=r"_common_metadata: the schema of Petastorm cannot .* columns matrix"
    ):
        loader_of(copied, columns=["matrix"])
    assert not made.exists()


def test_metadata_of_another_program_is_not_used(copied: Path) -> None:
    pq.write_metadata(pa.schema([("matrix", pa.binary())]), copied / "_common_metadata")
    (batch,) = loader_of(copied, columns=["matrix"], batch_size=12)
    assert batch["matrix"][0].startswith(b"\x93NUMPY")
    (copied / "_common_metadata").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="_common_metadata cannot be read as Parquet"):
        loader_of(copied, columns=["matrix"])


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (b"NdarrayCodec", b"OthrrayCodec", "column 'matrix' .* codec petastorm.codecs.OthrrayCodec"),
        (b"uint16", b"uint32", r"column 'gray' of uint32\[4, 5\] was written with .*CompressedImageCodec"),
    ],
)
def test_codecs_that_cannot_be_decoded_are_named(copied: Path, old: bytes, new: bytes, expected: str) -> None:
    pickled = pq.read_schema(copied / "_common_metadata").metadata[KEY]
    set_schema(copied, pickled.replace(old, new))
    with pytest.raises(DataError, match=f"{expected}.* pass decode="):
        loader_of(copied, columns=["matrix", "gray"])
    loader_of(copied, columns=["id"])
