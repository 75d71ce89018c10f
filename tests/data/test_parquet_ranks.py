"""Parquet files on real ranks."""

from __future__ import annotations

import time
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import polyhvd.numpy as hvd
import pytest

from polyhvd.data import ParquetLoader, write_parquet

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


def test_counters_have_what_was_read_and_loaded_and_how_long_steps_waited(tmp_path: Path) -> None:
    def slow(batch: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.002)
        return batch

    write_parquet({"x": np.arange(41.0)}, tmp_path / "x.parquet", rows_per_group=4)
    loader = ParquetLoader(tmp_path, batch_size=4, transform=slow, prefetch_bytes=0)
    before = hvd.counters()
    batches = list(loader)
    found = {name: value - before[name] for name, value in hvd.counters().items()}
    assert found["data_batches"] == len(batches)
    assert found["data_rows"] == sum(len(batch.indices) for batch in batches)
    assert found["data_groups"] == loader.groups_read
    assert found["data_bytes"] >= 8 * found["data_rows"]
    assert found["data_wait_us"] >= 2000


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
