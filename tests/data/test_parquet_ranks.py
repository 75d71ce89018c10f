"""Parquet files on real ranks."""

from __future__ import annotations

import copy
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import polyhvd.numpy as hvd
import pyarrow.compute as pc
import pytest

from polyhvd.data import FileLoader, ParquetLoader, agreement, write_parquet
from polyhvd.errors import DataError
from polyhvd.runtime import current

pytestmark = pytest.mark.ranks(2, 3)


def test_ranks_write_files_of_one_folder_and_load_each_row_once(tmp_path: Path) -> None:
    folder = Path(hvd.broadcast_object(str(tmp_path)))
    x = np.random.default_rng(1).normal(size=(25 * hvd.size(), 3))
    own = slice(25 * hvd.rank(), 25 * (hvd.rank() + 1))
    write_parquet({"x": x[own]}, folder / f"{hvd.rank()}.parquet", rows_per_group=4)
    hvd.barrier()
    loader = ParquetLoader(folder, batch_size=4, seed=5)
    seen: list[int] = []
    for step, batch in enumerate(loader):
        mean = hvd.allreduce(batch.weight * batch["x"].mean(axis=0), name=f"mean.{step}")
        indices = [*chain(*hvd.allgather_object(batch.indices.tolist() if batch.weight else []))]
        assert np.allclose(mean, x[indices].mean(axis=0))
        seen += indices
    assert sorted(seen) == list(range(len(x)))
    states = hvd.allgather_object(loader.state_dict())
    assert states == [states[0]] * hvd.size()


def test_rank_that_sees_the_files_in_another_order_refuses_the_state_of_the_others(tmp_path: Path) -> None:
    for number in range(2):
        write_parquet({"x": np.arange(4) + 4 * number}, tmp_path / str(hvd.rank()) / f"{number}.parquet")
    files = (tmp_path / str(hvd.rank())).iterdir()
    loader = ParquetLoader(sorted(files, reverse=hvd.rank() == 1), batch_size=1)
    state = hvd.broadcast_object(loader.state_dict())
    if hvd.rank() == 1:
        with pytest.raises(ValueError, match="whose files are in another order"):
            loader.load_state_dict(state)
    else:
        loader.load_state_dict(state)


@pytest.mark.parametrize("workers", [0, 1])
def test_counters_have_what_was_read_and_loaded_and_how_long_steps_waited(
    tmp_path: Path, workers: int
) -> None:
    def slow(batch: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.002)
        return batch

    write_parquet({"x": np.arange(41.0)}, tmp_path / "x.parquet", rows_per_group=4)
    loader = ParquetLoader(tmp_path, batch_size=4, transform=slow, workers=workers, prefetch_bytes=0)
    before = hvd.counters()
    batches = list(loader)
    found = {name: value - before[name] for name, value in hvd.counters().items()}
    assert found["data_batches"] == len(batches)
    assert found["data_rows"] == sum(len(batch.indices) for batch in batches)
    assert found["data_groups"] == loader.groups_read
    assert found["data_bytes"] >= 8 * found["data_rows"]
    assert found["data_wait_us"] >= 2000


def test_steps_that_take_longer_than_loading_hardly_wait(tmp_path: Path) -> None:
    write_parquet({"x": np.zeros((40 * hvd.size(), 784), np.uint8)}, tmp_path / "x.parquet", rows_per_group=4)
    loader = iter(ParquetLoader(tmp_path, batch_size=1))
    next(loader)
    began, before = time.monotonic(), hvd.counters()["data_wait_us"]
    for _ in loader:
        time.sleep(0.01)
    waited_s = 1e-6 * (hvd.counters()["data_wait_us"] - before)
    assert waited_s < 0.5 * (time.monotonic() - began)


def test_ranks_count_the_rows_that_they_leave_out_and_have_equally_many_steps(tmp_path: Path) -> None:
    def number(data: bytes) -> int:
        if hvd.rank() == 1 and int(data) % 3 == 0:
            raise LookupError(data)
        return int(data)

    write_parquet({"x": [str(n).encode() for n in range(50)]}, tmp_path / "x.parquet", rows_per_group=4)
    loader = ParquetLoader(tmp_path, batch_size=4, decode={"x": number}, on_error="skip")
    before = hvd.counters()["data_rows_skipped"]
    seen: list[int] = []
    for step, batch in enumerate(loader):
        hvd.allreduce(batch.weight * batch["x"].mean(), name=f"mean.{step}")
        seen += batch["x"].tolist() if batch.weight else []
    counted = hvd.counters()["data_rows_skipped"] - before
    assert (counted > 0) == (hvd.rank() == 1)
    rows = [*chain(*hvd.allgather_object(seen))]
    assert len(rows) + sum(hvd.allgather_object(counted)) == 50
    assert set(range(50)) - set(rows) <= set(range(0, 50, 3))
    assert len(set(rows)) == len(rows)


def iterate(loader: ParquetLoader) -> None:
    for batch in loader:
        hvd.allreduce(batch.weight * np.ones(1), name="step")


def folder_of_rank(path: Path, files: int, rows: int = 12) -> Path:
    for number in range(files):
        write_parquet({"x": np.arange(rows) + 100 * number}, path / f"{number}.parquet", rows_per_group=3)
    return path


def test_file_that_one_rank_does_not_see_is_an_error_of_a_plain_loop_on_every_rank(tmp_path: Path) -> None:
    last = hvd.size() - 1
    folder = folder_of_rank(tmp_path / str(hvd.rank()), 2 if hvd.rank() == last else 3)
    loader = ParquetLoader(folder, batch_size=1)
    with pytest.raises(DataError) as raised:
        iterate(loader)
    others = "rank 0" if last == 1 else "ranks 0, 1"
    assert "file '2.parquet': 12 rows in 4 row groups of" in str(raised.value)
    assert f" on {others}; missing on rank {last};" in str(raised.value)
    assert "ParquetLoader(test_parquet_ranks.py:" in str(raised.value)


def test_column_that_one_rank_does_not_decode_is_an_error_on_every_rank(tmp_path: Path) -> None:
    rows = [np.arange(3).tobytes()] * 12
    write_parquet({"x": rows}, tmp_path / "x.parquet")
    loader = ParquetLoader(
        tmp_path, batch_size=1, decode=None if hvd.rank() == 1 else {"x": lambda data: np.frombuffer(data)}
    )
    with pytest.raises(DataError, match=r"column 'x': binary, decoded on rank.* 0.*binary on rank 1"):
        iterate(loader)


def test_file_with_other_rows_on_one_rank_is_an_error_on_every_rank(tmp_path: Path) -> None:
    folder = folder_of_rank(tmp_path / str(hvd.rank()), 3)
    if hvd.rank() == 1:
        write_parquet({"x": np.arange(12)}, folder / "1.parquet", rows_per_group=4)
    loader = ParquetLoader(folder, batch_size=4, shuffle=False)
    with pytest.raises(
        DataError, match=r"file '1.parquet': 12 rows in 4 row groups .* on rank.* 0.*in 3 row"
    ):
        iterate(loader)


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_file_whose_rows_are_in_another_order_on_one_rank_is_an_error_on_every_rank(
    tmp_path: Path, suffix: str
) -> None:
    x = np.arange(12)[:: -1 if hvd.rank() == 1 else 1]
    folder = tmp_path / str(hvd.rank())
    if suffix == "csv":
        x = x + 10  # equally many characters in each row
        folder.mkdir()
        (folder / "x.csv").write_text("x\n" + "".join(f"{value}\n" for value in x))
    else:
        write_parquet({"x": x.copy()}, folder / "x.parquet", rows_per_group=3)
    with pytest.raises(DataError, match=f"file 'x.{suffix}': 12 rows in .* on rank.* 0.*; 12 rows in"):
        iterate(FileLoader(folder, batch_size=2))


def test_other_filter_on_one_rank_is_an_error_on_every_rank(tmp_path: Path) -> None:
    write_parquet({"x": np.arange(12)}, tmp_path / "x.parquet")
    half = pc.field("x") < 6 if hvd.rank() == 1 else pc.field("x") >= 6
    with pytest.raises(DataError, match=r"expression 'filter': \(x >= 6\) on rank.*; \(x < 6\) on rank 1"):
        iterate(ParquetLoader(tmp_path, batch_size=2, filter=half))


def test_difference_is_found_at_the_end_of_an_epoch_of_one_step(tmp_path: Path) -> None:
    folder = folder_of_rank(tmp_path / str(hvd.rank()), 1, rows=hvd.size())
    loader = ParquetLoader(folder, batch_size=1, seed=min(hvd.rank(), 1))
    with pytest.raises(DataError, match=r"argument 'seed': 0 on rank 0; 1 on rank"):
        iterate(loader)


def test_difference_is_found_at_the_end_of_an_epoch_that_other_ranks_begin_later(tmp_path: Path) -> None:
    folder = folder_of_rank(tmp_path / str(hvd.rank()), 1, rows=hvd.size())
    loader = ParquetLoader(folder, batch_size=1, seed=min(hvd.rank(), 1))
    time.sleep(0.1 * min(hvd.rank(), 1))  # rank 0 has read its batch then
    with pytest.raises(DataError, match=r"argument 'seed': 0 on rank 0; 1 on rank"):
        for _ in loader:
            pass


def test_files_in_another_order_are_an_error_on_every_rank(tmp_path: Path) -> None:
    folder = folder_of_rank(tmp_path / str(hvd.rank()), 3)
    loader = ParquetLoader(sorted(folder.iterdir(), reverse=hvd.rank() == 1), batch_size=2)
    with pytest.raises(
        DataError, match=r"file number 0 in the order: '0.parquet' on .*'2.parquet' on rank 1;"
    ):
        iterate(loader)


def test_other_types_of_a_column_are_an_error_on_every_rank(tmp_path: Path) -> None:
    dtype = np.float32 if hvd.rank() == 1 else np.int32
    write_parquet({"x": np.arange(12).astype(dtype)}, tmp_path / str(hvd.rank()) / "x.parquet")
    loader = ParquetLoader(tmp_path / str(hvd.rank()), batch_size=2)
    with pytest.raises(DataError, match=r"column 'x': int32 on rank.* 0.*; float on rank 1;"):
        iterate(loader)


def test_hosts_may_have_other_libraries_of_zlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compress = zlib.compress
    level = 9 * (hvd.rank() == 1)
    monkeypatch.setattr("polyhvd.data.agreement.zlib.compress", lambda data, _: compress(data, level))
    loader = ParquetLoader(folder_of_rank(tmp_path / str(hvd.rank()), 3), batch_size=2)
    iterate(loader)


def test_state_that_only_one_rank_loads_is_an_error_on_every_rank(tmp_path: Path) -> None:
    loader = ParquetLoader(folder_of_rank(tmp_path / str(hvd.rank()), 3), batch_size=1)
    if hvd.rank() == 1:
        loader.load_state_dict({**loader.state_dict(), "cursor": 6})
    with pytest.raises(DataError, match=r"position 'cursor': 0 on rank.* 0.*; 6 on rank 1; have all ranks"):
        iterate(loader)


def test_loader_that_only_one_rank_iterates_over_does_not_wait(tmp_path: Path) -> None:
    folder = folder_of_rank(tmp_path / "own" / str(hvd.rank()), 2 + hvd.rank())
    train = ParquetLoader(folder_of_rank(tmp_path / str(hvd.rank()), 3), batch_size=2)
    before = hvd.counters()
    for epoch in range(3):
        train.set_epoch(epoch)
        for batch in train:
            hvd.allreduce(batch.weight * np.ones(1), name="step")
        if hvd.rank() == 0:
            assert len(list(ParquetLoader(folder, batch_size=2))) > 1
    hvd.barrier()
    assert hvd.counters()["pending"] - before["pending"] == (3 if hvd.rank() == 0 else 0)


def test_loaders_of_one_rank_are_reported_once_each_by_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_of_rank(tmp_path / str(hvd.rank()), 1)
    if hvd.rank() == 0:
        for _ in range(3):
            list(ParquetLoader(folder, batch_size=12))
        now = time.monotonic
        monkeypatch.setattr("polyhvd.data.agreement.time.monotonic", lambda: now() + 1000)
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(agreement._report_absent, [current.world()] * 64))
    assert len(caplog.records) == (3 if hvd.rank() == 0 else 0)
    hvd.barrier()


def test_loader_of_one_rank_is_reported_after_its_loop_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_of_rank(tmp_path / str(hvd.rank()), 3)
    if hvd.rank() == 0:
        for _ in ParquetLoader(folder, batch_size=2):
            pass
    iterate(ParquetLoader(folder, batch_size=2))
    assert caplog.records == []
    now = time.monotonic
    monkeypatch.setattr("polyhvd.data.agreement.time.monotonic", lambda: now() + 1000)
    iterate(ParquetLoader(folder, batch_size=2))
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == (1 if hvd.rank() == 0 else 0)
    assert all("other ranks have not begun: it gets only its part of the rows" in text for text in found)


def test_loaders_of_one_line_are_compared_in_the_order_of_their_loops(tmp_path: Path) -> None:
    loaders = [
        ParquetLoader(folder_of_rank(tmp_path / f"{hvd.rank()}.{n}", n), batch_size=1) for n in (1, 2, 3)
    ]
    for loader in reversed(loaders):
        rows = sum(len(batch.indices) for batch in loader if batch.weight)
        assert hvd.allreduce(np.array(float(rows)), op=hvd.Sum) == loader.state_dict()["rows"]


def test_loaders_of_one_line_are_compared_though_rank_0_validates_before_it_trains(tmp_path: Path) -> None:
    train, val = (
        ParquetLoader(folder_of_rank(tmp_path / f"{hvd.rank()}.{n}", n), batch_size=1) for n in (1, 2)
    )
    for loader in (val, train) if hvd.rank() == 0 else (train,):
        for number, _ in enumerate(loader):
            if loader is train:
                hvd.allreduce(np.ones(1), name=f"step.{number}")
    hvd.barrier()
    assert len(list(train)) == len(list(copy.copy(train)))
    hvd.barrier()


def test_loader_with_a_placement_is_not_compared(tmp_path: Path) -> None:
    folder = folder_of_rank(tmp_path / str(hvd.rank()), 1 + hvd.rank())
    loader = ParquetLoader(folder, batch_size=1, placement=lambda: (0, 1))
    assert len(list(loader)) == 12 * (1 + hvd.rank())
    hvd.barrier()
