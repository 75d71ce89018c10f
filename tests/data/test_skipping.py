"""``on_error="skip"``: rows that cannot be read are left out, and all ranks have the same steps."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyarrow import parquet

from polyhvd.data import DataError, ParquetLoader

ROWS = 40


def decoded(data: bytes) -> Any:
    if data == b"bad":
        raise LookupError("it is bad")
    return np.full(2, int(data))


def written(
    path: Path, *, bad: tuple[int, ...] = (), null: tuple[int, ...] = (), damaged: bool = False
) -> Path:
    """A file of row groups of four rows, some of which cannot be read; ``damaged`` is the second group."""
    numbers = range(ROWS)
    columns = {
        "n": pa.array([None if n in null else n for n in numbers]),
        "data": [b"bad" if n in bad else str(n).encode() for n in numbers],
    }
    parquet.write_table(pa.table(columns), path, row_group_size=4, use_dictionary=False)
    if damaged:
        before = path.stat()
        chunk = parquet.read_metadata(path).row_group(1).column(1)
        with path.open("r+b") as file:
            file.seek(chunk.data_page_offset)
            file.write(b"\xff" * chunk.total_compressed_size)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return path


def loader_of(source: Any, **options: Any) -> ParquetLoader:
    options = {"batch_size": 3, "placement": lambda: (0, 1), "decode": {"data": decoded}, **options}
    return ParquetLoader(source, on_error="skip", **options)


@pytest.mark.parametrize("last", ["even", "short"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_rows_that_one_rank_cannot_read_are_left_out_and_others_come_once(
    tmp_path: Path, shuffle: bool, last: str
) -> None:
    """Each rank reads another file; rank 1's is damaged. The mean is that over the rows of the step."""
    faults: dict[str, Any] = {"bad": (0, 1, 2, 9), "null": (3, 20, 39), "damaged": True}
    lost = {0, 1, 2, 3, 4, 5, 6, 7, 9, 20, 39}
    paths = [written(tmp_path / f"{rank}.parquet", **(faults if rank == 1 else {})) for rank in range(3)]
    loaders = [
        loader_of(path, placement=lambda rank=rank: (rank, 3), shuffle=shuffle, last=last, seed=3)
        for rank, path in enumerate(paths)
    ]
    order = loaders[0]._order
    for epoch in range(2):
        seen: list[int] = []
        missing: set[int] = set()
        for batches in zip(*loaders, strict=True):
            step = order.step(loaders[0].cursor, 9, 3, last)
            assert step is not None
            left: list[int] = []
            total = 0.0
            for rank, batch in enumerate(batches):
                assert batch["n"].tolist() == batch.indices.tolist() == batch["data"][:, 0].tolist()
                assert len(batch.indices) > 0
                own = batch.indices.tolist() if batch.weight else []
                dealt = order.rows(epoch, order.runs(step, rank)).tolist()
                missing |= set(dealt) - set(own)
                left += own
                total += batch.weight * batch["n"].mean()
            assert total / 3 == pytest.approx(sum(left) / step.rows)
            seen += left
        assert missing <= lost
        assert sorted([*seen, *missing]) == list(range(ROWS))


def test_batch_of_which_no_row_is_left_has_another_row_and_weight_0(tmp_path: Path) -> None:
    for name, bad in {"first": range(6), "last": range(34, 40)}.items():
        loader = loader_of(written(tmp_path / f"{name}.parquet", bad=tuple(bad)), shuffle=False, batch_size=4)
        batches = list(loader)
        assert len(batches) == 10
        weights = [batch.weight for batch in batches]
        assert weights == ([0, 0.5, *8 * [1]] if name == "first" else [*8 * [1], 0.5, 0])
        (empty,) = (batch for batch in batches if not batch.weight)
        assert len(empty.indices) == len(empty["n"]) == len(empty["data"]) == 1
        assert empty.indices[0] not in bad


def test_row_of_weight_0_is_as_in_the_file_whatever_transform_has_made_of_it_before(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"n": [1.0, *3 * [None]]}), tmp_path / "a.parquet", row_group_size=1)

    def scaled(batch: dict[str, Any]) -> dict[str, Any]:
        batch["n"] *= 1e200
        return batch

    batches = list(loader_of(tmp_path, transform=scaled, decode=None, batch_size=1, shuffle=False))
    assert [batch.weight for batch in batches] == [1, 0, 0, 0]
    assert [batch["n"].tolist() for batch in batches] == [[1e200]] * 4


def test_each_file_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(tmp_path / "a.parquet", bad=(1, 2))
    written(tmp_path / "b.parquet", damaged=True)
    written(tmp_path / "c.parquet")
    loader = loader_of(tmp_path, shuffle=False)
    with caplog.at_level(logging.WARNING, "polyhvd"):
        for _ in range(2):
            list(loader)
    first, second = sorted(caplog.messages)  # row groups are read in parallel
    assert first.startswith("data: left out, since on_error='skip': ")
    assert "a.parquet: row group 0, row 1, column 'data': LookupError('it is bad')" in first
    assert "b.parquet: row group 1, column 'data' cannot be read: " in second


def test_files_that_cannot_be_opened_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(path.read_bytes()[:-20])
    loader = loader_of([path, tmp_path / "b.parquet", tmp_path / "missing.parquet"], batch_size=ROWS)
    assert [sorted(batch.indices.tolist()) for batch in loader] == [list(range(ROWS))]
    assert sorted(message.count("b.parquet cannot be read as") for message in caplog.messages) == [0, 1]
    with pytest.raises(DataError, match="none of the 1 files can be read; the warnings have the reasons"):
        loader_of(tmp_path / "b.parquet")


def test_files_that_vanish_are_left_out_and_without_any_row_there_is_an_error(tmp_path: Path) -> None:
    paths = [written(tmp_path / name) for name in ("a.parquet", "b.parquet")]
    loader = loader_of(tmp_path, shuffle=False, batch_size=ROWS)
    paths[0].unlink()
    empty, full = loader
    assert (empty.weight, full.weight, len(full.indices)) == (0, 1, ROWS)
    assert empty["n"].tolist() == [0], "the first row of the other file"
    paths[1].unlink()
    with pytest.raises(DataError, match=r"none of the 80 rows of .*a\.parquet and 1 other files can be read"):
        list(loader)


def test_row_groups_that_a_filter_cannot_read_are_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "a.parquet", damaged=True)
    loader = loader_of(path, filter=pc.field("data") != b"7", batch_size=ROWS)
    assert sorted(row for batch in loader for row in batch["n"].tolist()) == [*range(4), *range(8, ROWS)]


def test_exceptions_of_transform_are_never_left_out(tmp_path: Path) -> None:
    def failing(batch: dict[str, Any]) -> Any:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        list(loader_of(written(tmp_path / "a.parquet"), transform=failing))


def test_only_two_ways_of_errors_are_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="on_error is 'ignore'; expected 'raise' or 'skip'"):
        ParquetLoader(tmp_path, batch_size=1, on_error="ignore")
