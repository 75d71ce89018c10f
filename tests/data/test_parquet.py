"""Batches of Parquet files, in worlds that the test decides about."""

from __future__ import annotations

import copy
import gc
import glob
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from depth import repeats  # tests/harness, on the path by tests/conftest.py
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import DEADLINE_S
from pyarrow import parquet

from polyhvd.data import (
    ArrayLoader,
    Batch,
    DataError,
    Order,
    ParquetLoader,
    agreement,
    files,
    prefetch,
    storage,
    write_parquet,
)
from polyhvd.data.columns import Column
from polyhvd.data.files import ParquetFiles


def alone() -> tuple[int, int]:
    return 0, 1


def written(folder: Path, groups: list[list[int]]) -> Path:
    """Files of row groups of so many rows; the columns say which rows they are, counted over all files."""
    first = 0
    for number, sizes in enumerate(groups):
        numbers = np.arange(first, first + sum(sizes))
        names = pa.array([f"row {n}" for n in numbers], pa.string())
        table = pa.table({"x": numbers, "name": names})
        with parquet.ParquetWriter(folder / f"{number:04}.parquet", table.schema) as writer:
            for size in sizes:
                writer.write_table(table.slice(0, size))
                table = table.slice(size)
        first += sum(sizes)
    return folder


def loader_of(source: Any, **options: Any) -> ParquetLoader:
    return ParquetLoader(source, **{"batch_size": 4, "placement": alone, **options})


def rows_of(batches: Any) -> list[int]:
    return [row for batch in batches if batch.weight for row in batch.indices.tolist()]


def threads() -> list[threading.Thread]:
    """Of loaders; other tests in this process may have left threads of other parts."""
    names = ("polyhvd-data", "polyhvd-footers")
    return [thread for thread in threading.enumerate() if thread.name.startswith(names)]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Any:
    before = threads()  # of other tests in this process
    yield
    gc.collect()
    assert set(threads()) <= set(before)


# Every row once


@given(
    groups=st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=4),
    sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=4),
    batch=st.integers(1, 9),
    last=st.sampled_from(["even", "short"]),
    shuffle=st.booleans(),
    streams=st.none() | st.integers(1, 9),
    window_rows=st.integers(1, 30),
    seed=st.integers(0, 2**40),
    failures=st.integers(0, 2**30),
)
@settings(max_examples=repeats(25, 200), deadline=None)
def test_every_row_is_loaded_once_over_changes_restarts_and_failed_steps(
    tmp_path_factory: pytest.TempPathFactory,
    groups: list[list[int]],
    sizes: list[tuple[int, int]],
    batch: int,
    last: str,
    shuffle: bool,
    streams: int | None,
    window_rows: int,
    seed: int,
    failures: int,
) -> None:
    """Ranks go on while the world changes; a step that fails is undone by loading the last state."""
    folder = written(tmp_path_factory.mktemp("files"), groups)
    total = sum(map(sum, groups))
    options = {"batch_size": batch, "last": last, "shuffle": shuffle, "streams": streams, "seed": seed}
    options |= {"shuffle_bytes": 100 * window_rows, "prefetch_bytes": 500}
    world = [sizes[0][0]]

    def made(rank: int) -> ParquetLoader:
        return ParquetLoader(folder, placement=lambda: (rank, world[0]), **options)  # type: ignore[arg-type]

    loaders = [made(rank) for rank in range(5)]
    plan = [size for size, steps in sizes for _ in range(steps)]
    iterators = {rank: iter(loaders[rank]) for rank in range(world[0])}
    state = loaders[0].state_dict()
    used: Counter[int] = Counter()
    for number in range(10**6):
        size = world[0] = plan[min(number, len(plan) - 1)]
        for rank in set(range(size)) - set(iterators):
            loaders[rank].load_state_dict(state)
            iterators[rank] = iter(loaders[rank])
        for rank in set(iterators) - set(range(size)):
            iterators.pop(rank).close()  # type: ignore[attr-defined]
        batches = [next(iterator, None) for _, iterator in sorted(iterators.items())]
        if None in batches:
            assert batches == [None] * size, "all ranks have equally many steps"
            break
        dealt = [item for item in batches if item is not None]
        for item in dealt:
            assert item["x"].tolist() == item.indices.tolist()
            assert item["name"].tolist() == [f"row {row}" for row in item.indices]
        shares = [len(item.indices) if item.weight else 0 for item in dealt]
        assert max(shares) - min(shares) <= 1
        failed = failures >> (number % 30) & 1 and number < 30
        for rank in range(size):
            if failed:
                loaders[rank].load_state_dict(state)
            else:
                loaders[rank].advance()
        if not failed:
            used.update(rows_of(dealt))
            state = loaders[0].state_dict()
            assert all(loaders[rank].state_dict() == state for rank in range(size))
    assert used == Counter(range(total))


def test_worlds_of_4_then_3_then_5_ranks_have_the_steps_of_one_process(tmp_path: Path) -> None:
    folder = written(tmp_path, [[7] * 20, [5] * 10, [30]])
    options = {"batch_size": None, "global_batch_size": 20, "seed": 9}
    world = [4]
    loaders = [loader_of(folder, placement=lambda r=r: (r, world[0]), **options) for r in range(5)]
    steps: list[list[int]] = []
    for size, count in ((4, 3), (3, 4), (5, 4)):
        world[0] = size
        state = loaders[0].state_dict()
        for loader in loaders:
            loader.load_state_dict(state)
        iterators = [iter(loader) for loader in loaders[:size]]
        for _ in range(count):
            steps.append(sorted(rows_of(map(next, iterators))))
            for loader in loaders[:size]:
                loader.advance()
    assert [next(iterator, None) for iterator in iterators] == [None] * 5
    single = loader_of(folder, **options)
    assert steps == [sorted(batch.indices.tolist()) for batch in single]


def read_by(size: int, folder: Path, **options: Any) -> float:
    """Row groups that all ranks read in an epoch, over those that there are."""
    read, rows = 0, []
    for rank in range(size):
        loader = loader_of(folder, placement=lambda: (rank, size), **options)  # noqa: B023
        rows += rows_of(loader)
        read += loader.groups_read
    assert sorted(rows) == list(range(len(rows)))
    return read / len(loader._files.groups)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_rank_reads_its_own_row_groups_where_its_size_divides_the_streams(
    tmp_path: Path, size: int
) -> None:
    folder = written(tmp_path, [[5] * 33, [7] * 34])
    assert read_by(size, folder, batch_size=8) <= 1.1


@pytest.mark.parametrize("size", [3, 5])
def test_row_groups_are_read_twice_at_most_in_other_worlds(tmp_path: Path, size: int) -> None:
    folder = written(tmp_path, [[5] * 41, [7] * 43])
    assert read_by(size, folder, batch_size=8) <= 2


@given(
    groups=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    size=st.integers(1, 9),
    batch=st.integers(1, 12),
    streams=st.sampled_from([None, 1, 2, 4, 8]),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**40),
)
@settings(max_examples=repeats(15, 200), deadline=None)
def test_row_groups_are_read_as_often_as_the_loader_describes(
    groups: list[int], size: int, batch: int, streams: int | None, shuffle: bool, seed: int
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = written(Path(scratch), [groups])
        options = {"batch_size": batch, "streams": streams, "shuffle": shuffle, "seed": seed, "last": "drop"}
        loaders = [loader_of(folder, placement=lambda r=r: (r, size), **options) for r in range(size)]
        rows = [row for loader in loaders for row in rows_of(loader)]
    assert len(rows) == len(set(rows)) == sum(groups) // (size * batch) * (size * batch)
    read = sum(loader.groups_read for loader in loaders)
    order = loaders[0]._order
    readers = order.readers(size * batch, size)
    parts = sum(
        len(order.window_at(0, v, 0).sections) * readers[v] for v in range(order.streams) if order.length(v)
    )
    if order.window >= order.length(0):
        assert read <= parts
    if order.streams % size == 0:
        assert read <= len(groups) + order.streams - 1
    elif size < order.streams:
        assert read <= 2 * (len(groups) + order.streams - 1)


def test_order_is_that_of_the_arithmetic_however_rows_are_read(tmp_path: Path) -> None:
    sizes = [5, 0, 9, 1, 1, 7, 12, 3]
    loader = loader_of(written(tmp_path, [sizes[:4], sizes[4:]]), seed=3, streams=3, shuffle_bytes=1500)
    window = loader.state_dict()["window"]
    assert 1 < window < 12
    order = Order([size for size in sizes if size], seed=3, streams=3, window=window)
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        step = order.step(0, 4, 1)
        for batch in loader:
            assert step is not None
            assert batch.indices.tolist() == order.rows(epoch, order.runs(step, 0)).tolist()
            step = order.step(step.after, 4, 1)
        assert step is None


def test_without_shuffling_rows_come_as_they_are_stored(tmp_path: Path) -> None:
    folder = written(tmp_path, [[3, 0, 4], [], [2, 6]])
    loader = loader_of(folder, shuffle=False)
    assert [batch["x"].tolist() for batch in loader] == [[*range(n, min(n + 4, 15))] for n in range(0, 15, 4)]
    assert loader.groups_read == 4


def test_each_rank_reads_its_part_of_a_validation_set(tmp_path: Path) -> None:
    """Row groups read, of those that there are: at most 1.1 times, and twice if they are as many as ranks."""
    for size, groups, most in ((1, 40, 40), (2, 40, 44), (3, 60, 66), (4, 40, 44), (7, 7, 14)):
        folder = tmp_path / str(size)
        folder.mkdir()
        written(folder, [[6, 5] * (groups // 2) + [3] * (groups % 2)])
        read, rows = 0, []
        for rank in range(size):
            loader = loader_of(folder, shuffle=False, placement=lambda: (rank, size))  # noqa: B023
            own = rows_of(loader)
            if groups > size:
                assert own[: len(own) // 2] == list(range(own[0], own[0] + len(own) // 2))
            rows += own
            read += loader.groups_read
        assert sorted(rows) == list(range(len(rows)))
        assert groups <= read <= most


def test_loader_behaves_as_that_of_arrays(tmp_path: Path) -> None:
    """Lengths, positions, epochs and weights; only the order of a shuffled epoch is another."""
    write_parquet({"x": np.arange(11)}, tmp_path / "x.parquet")
    in_order = {"shuffle": False, "streams": 1}
    for options in ({"last": "even"}, {"last": "short"}, {"last": "drop"}, in_order):
        for rank in range(3):
            both: list[Any] = [
                loader_of(tmp_path / "x.parquet", placement=lambda: (rank, 3), **options),  # noqa: B023
                ArrayLoader({"x": np.arange(11)}, 4, placement=lambda: (rank, 3), **options),  # type: ignore[arg-type]  # noqa: B023
            ]
            seen = []
            for loader in both:
                steps = []
                for _ in range(2):
                    steps.append((len(loader), loader.epoch))
                    for batch in loader:
                        assert isinstance(batch, Batch)
                        steps.append((len(batch.indices), batch.weight, loader.cursor))
                seen.append(steps)
            assert seen[0] == seen[1]


def test_batches_can_be_changed_in_place(tmp_path: Path) -> None:
    folder = written(tmp_path, [[4]])
    for shuffle in (True, False):
        for batch in loader_of(folder, shuffle=shuffle):
            before = batch["x"].tolist()
            batch["x"][:] += 1
            assert batch["x"].tolist() == [value + 1 for value in before]


def test_state_of_files_with_other_row_groups_is_refused(tmp_path: Path) -> None:
    for name, groups in (("a", [[4, 5]]), ("b", [[5, 4]])):
        (tmp_path / name).mkdir()
        written(tmp_path / name, groups)
    first, second = loader_of(tmp_path / "a"), loader_of(tmp_path / "b")
    with pytest.raises(ValueError, match="load the state of the same files"):
        second.load_state_dict(first.state_dict())
    first.load_state_dict({**first.state_dict(), "window": 2, "seed": 8, "streams": 2})
    assert sorted(rows_of(first)) == list(range(9))
    assert first.state_dict()["window"] == 2


def test_state_of_other_files_or_another_order_of_files_is_refused(tmp_path: Path) -> None:
    state = loader_of(sorted(written(tmp_path, [[4], [4]]).iterdir())).state_dict()
    with pytest.raises(ValueError, match="files are in another order: load the state of"):
        loader_of(sorted(tmp_path.iterdir(), reverse=True)).load_state_dict(state)
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    loader_of(moved).load_state_dict(state)
    (moved / "0001.parquet").rename(moved / "0002.parquet")
    with pytest.raises(ValueError, match="in other row groups or files"):
        loader_of(moved).load_state_dict(state)


@pytest.mark.parametrize("copied", [copy.copy, lambda loader: pickle.loads(pickle.dumps(loader))])
@pytest.mark.parametrize("made", ["arrays", "files"])
def test_copy_of_a_loader_goes_on_from_its_position_and_leaves_the_first_one_as_it_was(
    tmp_path: Path, copied: Callable[[Any], Any], made: str
) -> None:
    loader: Any = loader_of(written(tmp_path, [[4, 4, 4, 4]]), shuffle=False)
    if made == "arrays":
        loader = ArrayLoader({"x": np.arange(16)}, batch_size=4, shuffle=False, placement=alone)
    batches = iter(loader)
    seen = [next(batches)["x"][0], next(batches)["x"][0]]
    other = copied(loader)
    seen.append(next(batches)["x"][0])
    assert [batch["x"][0] for batch in other] == [4, 8, 12]
    assert [*seen, *(batch["x"][0] for batch in batches)] == [0, 4, 8, 12]
    assert (loader.cursor, other.cursor) == (16, 16)


# Sources


def test_folders_patterns_and_lists_are_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "of files"
    (folder / "b").mkdir(parents=True)
    for number, name in enumerate(("a.parquet", "b/c.pq", "z.parq")):
        write_parquet({"x": [number]}, folder / name)
    for name in ("_hidden.parquet", ".a.parquet", "note.txt"):
        (folder / name).write_text("no data")

    def values(source: Any) -> list[int]:
        return [value for batch in loader_of(source, shuffle=False) for value in batch["x"].tolist()]

    monkeypatch.chdir(tmp_path)
    assert values("of files") == values(folder) == values([folder]) == [0, 1, 2]
    assert values(str(folder / "[az].parq*")) == [0, 2]
    assert values(f"{folder}/**/*.p*q") == [1, 2]
    assert values([folder / "z.parq", str(folder / "b")]) == [2, 1]
    assert values(folder / "b" / "c.pq") == [1]


def partitioned(folder: Path) -> Path:
    """Files of ten rows in folders of a year and a place."""
    for number, (year, place) in enumerate([("2024", "a%20b"), ("2025", "c"), ("2025", "a%20b")]):
        path = folder / f"year={year}" / f"place={place}" / "x.parquet"
        write_parquet({"x": np.arange(10 * number, 10 * number + 10)}, path, rows_per_group=3)
    return folder


@pytest.mark.parametrize("pattern", ["", "*/*/*.parquet", "year=*/*/x.parquet"])
def test_folders_of_partitions_are_columns(tmp_path: Path, pattern: str) -> None:
    loader = loader_of(partitioned(tmp_path) / pattern)
    assert loader.schema.names == ["x", "year", "place"]
    seen = {}
    for batch in loader:
        assert batch["year"].dtype == np.int64
        for x, year, place in zip(batch["x"], batch["year"], batch["place"], strict=True):
            seen[int(x)] = (int(year), place)
    assert sorted(seen) == list(range(30))
    assert {seen[x] for x in range(10)} == {(2024, "a b")}
    assert {seen[x] for x in range(10, 20)} == {(2025, "c")}
    assert {seen[x] for x in range(20, 30)} == {(2025, "a b")}


def test_partitions_can_be_the_only_columns(tmp_path: Path) -> None:
    loader = loader_of(partitioned(tmp_path), columns=iter(["year"]))
    assert Counter(year for batch in loader for year in batch["year"].tolist()) == {2024: 10, 2025: 20}


@pytest.mark.parametrize("columns", [["x"], ["x", "place"], ["place"]])
def test_filter_selects_partitions(tmp_path: Path, columns: list[str]) -> None:
    chosen = (pc.field("year") == 2025) & (pc.field("place") == "c") & (pc.field("x") > 11)
    loader = loader_of(partitioned(tmp_path), columns=columns, filter=chosen)
    batches = list(loader)
    assert len(rows_of(batches)) == 8
    if "x" in columns:
        assert sorted(x for batch in batches for x in batch["x"].tolist()) == list(range(12, 20))
    if "place" in columns:
        assert {place for batch in batches for place in batch["place"]} == {"c"}


def test_column_of_the_files_has_precedence_over_a_partition(tmp_path: Path) -> None:
    write_parquet({"year": np.full(4, 7)}, tmp_path / "year=2024" / "x.parquet")
    for chosen in (None, pc.field("year") == 7):
        (batch,) = loader_of(tmp_path, filter=chosen)
        assert batch["year"].tolist() == [7] * 4


def test_null_partition_is_an_error_or_filled(tmp_path: Path) -> None:
    write_parquet({"x": np.arange(3)}, tmp_path / "k=__HIVE_DEFAULT_PARTITION__" / "x.parquet")
    write_parquet({"x": np.arange(3)}, tmp_path / "k=5" / "x.parquet")
    with pytest.raises(DataError, match="column 'k' has"):
        list(loader_of(tmp_path))
    batches = list(loader_of(tmp_path, fill_null={"k": -1}))
    assert Counter(k for batch in batches for k in batch["k"].tolist()) == {-1: 3, 5: 3}
    assert len(rows_of(loader_of(tmp_path, filter=pc.field("k").is_null(), columns=["x"]))) == 3


def test_files_of_other_partitions_are_refused(tmp_path: Path) -> None:
    write_parquet({"x": np.arange(3)}, tmp_path / "k=5" / "x.parquet")
    write_parquet({"x": np.arange(3)}, tmp_path / "y.parquet")
    with pytest.raises(DataError, match=r"y.parquet has the partitions \[\], but .*x.parquet has \['k'\]"):
        loader_of(tmp_path)


@pytest.mark.parametrize("options", [{"filter": pc.field("x") < 0}, {"last": "drop", "batch_size": 99}])
def test_epoch_without_a_step_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    loader = loader_of(written(tmp_path, [[9]]), **options)
    assert [list(loader), list(loader)] == [[], []]
    (record,) = caplog.records
    cause = (
        "0 rows; check the source"
        if "filter" in options
        else "9 rows, of which a step with last='drop' needs 99"
    )
    assert f"ParquetLoader: the epoch has no step: there are {cause}" in record.getMessage()


def test_filter_leaves_out_nan_which_statistics_do_not_have(tmp_path: Path) -> None:
    write_parquet({"x": np.array([1, 2, np.nan, 3]), "y": np.arange(4)}, tmp_path / "x.parquet")
    for chosen in (pc.field("x") <= 5, (pc.field("y") >= 0) & (pc.field("x") > 0)):
        (batch,) = loader_of(tmp_path, filter=chosen, shuffle=False)
        assert batch["y"].tolist() == [0, 1, 3]
    assert not loader_of(tmp_path, filter=pc.field("y") >= 0)._files._has_filter_of_floats


def test_filter_leaves_rows_out(tmp_path: Path) -> None:
    folder = written(tmp_path, [[9] * 5, [4] * 5])
    loader = loader_of(folder, columns=["name"], filter=(pc.field("x") >= 7) & (pc.field("x") < 47))
    assert sorted(name for batch in loader for name in batch["name"]) == sorted(
        f"row {n}" for n in range(7, 47)
    )
    assert loader.state_dict()["rows"] == 40


# Columns


def one_batch(array: Any, folder: Path, field: Any = None, **options: Any) -> Any:
    schema = pa.schema([field or pa.field("x", array.type)])
    parquet.write_table(pa.table([array], schema=schema), folder / "x.parquet")
    (batch,) = loader_of(folder / "x.parquet", batch_size=len(array), shuffle=False, **options)
    return batch["x"]


@pytest.mark.parametrize(
    "dtype",
    [
        *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16"),
        *("float32", "float64", "datetime64[us]", "timedelta64[ms]"),
    ],
)
@pytest.mark.parametrize("arrays_as", ["tensor", "bytes"])
def test_arrays_are_loaded_as_they_were_written(tmp_path: Path, dtype: str, arrays_as: str) -> None:
    random = np.random.default_rng(1)
    arrays = {
        name: random.integers(0, 100, (6, *shape)).astype(dtype)
        for name, shape in {"x": (), "y": (3,), "z": (2, 1, 3)}.items()
    }
    write_parquet(arrays, tmp_path / "x.parquet", arrays_as=arrays_as, rows_per_group=4)
    for batch in loader_of(tmp_path / "x.parquet", batch_size=6):
        for name, array in arrays.items():
            assert batch[name].dtype == array.dtype
            assert (batch[name] == array[batch.indices]).all()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (pa.array(["a", "b"]), ["a", "b"]),
        (pa.array([b"a", b"b"]), [b"a", b"b"]),
        (pa.array(["a", "b"]).dictionary_encode(), ["a", "b"]),
        (pa.array([[[1], [2]], [[3], [4]]], pa.list_(pa.list_(pa.int32(), 1), 2)), [[[1], [2]], [[3], [4]]]),
        (pa.array([b"ab", b"cd"], pa.binary(2)), [[97, 98], [99, 100]]),
        (pa.array([1, 2], pa.decimal128(5, 1)).cast(pa.decimal128(5, 1)), [1, 2]),
    ],
    ids=["strings", "bytes", "dictionary", "nested_lists", "fixed_bytes", "decimals"],
)
def test_columns_of_other_types_become_arrays(tmp_path: Path, values: Any, expected: list[Any]) -> None:
    assert one_batch(values, tmp_path).tolist() == expected


def test_bytes_have_the_byte_order_of_the_dtype_in_their_metadata(tmp_path: Path) -> None:
    for name in (">i4", "<i4"):
        values = np.arange(6, dtype=name).reshape(2, 3)
        rows = pa.array([row.tobytes() for row in values], pa.binary(12))
        field = pa.field("x", rows.type, metadata={"shape": "[3]", "dtype": name})
        found = one_batch(rows, tmp_path, field)
        assert found.dtype == np.int32
        assert found.tolist() == values.tolist()
        (tmp_path / "x.parquet").rename(tmp_path / f"{name[0]}.parquet")
    with pytest.raises(DataError, match=r"column 'x' has the type .* '>i4'}, but .* '<i4'}"):
        loader_of(tmp_path)


def test_tensor_with_permuted_axes_has_its_logical_shape(tmp_path: Path) -> None:
    type_ = pa.fixed_shape_tensor(pa.int32(), [2, 3], permutation=[1, 0])
    storage = pa.FixedSizeListArray.from_arrays(pa.array(range(12), pa.int32()), 6)
    expected = np.arange(12).reshape(2, 2, 3).transpose(0, 2, 1)
    assert (one_batch(pa.ExtensionArray.from_storage(type_, storage), tmp_path) == expected).all()


@pytest.mark.parametrize(
    ("values", "fill", "expected"),
    [
        (pa.array([1, None]), 7, [1, 7]),
        (pa.array(["a", None]), "", ["a", ""]),
        (pa.array([True, None]), False, [True, False]),
        (pa.array([[1, None], [2, 3]], pa.list_(pa.int32(), 2)), 7, [[1, 7], [2, 3]]),
        (pa.array([b"ab", None], pa.binary(2)), 0, [[97, 98], [0, 0]]),
    ],
    ids=["numbers", "strings", "booleans", "lists", "bytes"],
)
def test_nulls_are_an_error_or_are_filled(
    tmp_path: Path, values: Any, fill: Any, expected: list[Any]
) -> None:
    place = r"x\.parquet: row group 0, column 'x' has 1 null in row [01]; pass fill_null="
    with pytest.raises(DataError, match=place):
        one_batch(values, tmp_path)
    assert one_batch(values, tmp_path, fill_null=fill).tolist() == expected
    assert one_batch(values, tmp_path, fill_null={"x": fill}).tolist() == expected


@pytest.mark.parametrize(
    ("dtype", "value"), [("uint8", -1), ("uint8", 300), ("int32", 1.5), ("int32", 2**31), ("bool", 2)]
)
def test_value_that_bytes_of_a_dtype_cannot_hold_is_refused(dtype: str, value: Any) -> None:
    shape = [4 // np.dtype(dtype).itemsize]
    field = pa.field("x", pa.binary(4), metadata={"shape": str(shape), "dtype": dtype})
    with pytest.raises(ValueError, match=rf"fill_null={value} does not fit .*: {dtype} cannot hold it"):
        Column(field, value)
    assert Column(field, 1).shape == tuple(shape)


def test_null_lists_are_filled_where_arrow_has_them() -> None:
    """It cannot read them from files."""
    lists = pa.list_(pa.list_(pa.int32(), 2), 1)
    array = pa.array([[[1, 2]], None, [[3, None]], [None]], lists)
    column = Column(pa.field("x", lists), fill_null=7)
    assert column.decode(pa.chunked_array([array])).tolist() == [[[1, 2]], [[7, 7]], [[3, 7]], [[7, 7]]]
    assert column.decode(pa.chunked_array([array[1:], array[:1]])).shape == (4, 1, 2)


def test_transform_runs_ahead_of_the_step_on_every_batch(tmp_path: Path) -> None:
    ran_in = set()

    def doubled(batch: dict[str, Any]) -> dict[str, Any]:
        ran_in.add(threading.current_thread())
        return {"twice": 2 * batch["x"]}

    loader = loader_of(written(tmp_path, [[9]]), columns=["x"], transform=doubled)
    for batch in loader:
        assert list(batch) == ["twice"]
        assert batch["twice"].tolist() == (2 * batch.indices).tolist()
    assert threading.current_thread() not in ran_in
    pairs = loader_of(tmp_path, columns=["x"], transform=lambda batch: (batch["x"], -batch["x"]))
    for batch in pairs:
        positive, negative = batch
        assert positive.tolist() == (-negative).tolist() == batch.indices.tolist()


def test_loop_that_is_left_does_not_wait_for_a_transform_that_never_ends_but_the_next_loop_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "_LAST_ITEM_S", 0.01)
    running, ended = threading.Semaphore(1), threading.Event()
    calls = 0

    def transform(batch: dict[str, Any]) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        assert running.acquire(blocking=False), "another thread is in it"
        if calls == 2:
            ended.wait()
        running.release()
        return batch

    loader = loader_of(written(tmp_path, [[9]]), transform=transform)
    broken_off = iter(loader)
    next(broken_off)
    del broken_off
    assert len(threads()) == 1, "it goes on until the call ends"
    threading.Timer(0.1, ended.set).start()
    assert sorted(rows_of(loader)) == list(range(9))


def test_loop_that_is_left_waits_once_for_the_batch_that_is_being_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "_LAST_ITEM_S", 0.01)
    ends_within, waits = prefetch.Prefetch.ends_within, []

    def observed(ahead: prefetch.Prefetch[Any], limit_s: float | None) -> bool:
        waits.append(limit_s)
        return ends_within(ahead, limit_s)

    monkeypatch.setattr(prefetch.Prefetch, "ends_within", observed)
    ended = threading.Event()
    loader = loader_of(written(tmp_path, [[9]]), transform=lambda batch: ended.wait(DEADLINE_S) and batch)
    main = threading.get_ident()
    threading.Timer(0.1, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        next(iter(loader))
    assert waits == [0.01]
    batches = iter(loader)
    assert waits == [0.01, 0.0]
    ended.set()
    assert sorted(rows_of(batches)) == list(range(9))


def test_exception_in_transform_is_raised_with_its_own_traceback(tmp_path: Path) -> None:
    def failing(batch: dict[str, Any]) -> Any:
        raise KeyError("no such label")

    loader = loader_of(written(tmp_path, [[9]]), transform=failing)
    with pytest.raises(KeyError, match="no such label") as raised:
        next(iter(loader))
    assert raised.traceback[-1].name == "failing"


# Errors


@pytest.mark.parametrize("workers", [0, 1])
def test_iteration_that_has_failed_does_not_seem_to_be_at_its_end(tmp_path: Path, workers: int) -> None:
    may_pass = tmp_path / "may_pass"

    def failing(batch: dict[str, Any]) -> dict[str, Any]:
        if 9 in batch["x"] and not may_pass.exists():
            raise LookupError("once")
        return batch

    (tmp_path / "files").mkdir()
    loader = loader_of(
        written(tmp_path / "files", [[16]]),
        columns=["x"],
        transform=failing,
        workers=workers,
        shuffle=False,
    )
    batches = iter(loader)
    seen = rows_of([next(batches), next(batches)])
    with pytest.raises(LookupError, match="once"):
        next(batches)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"ended with an error \(LookupError: once\), before the end"):
            next(batches)
    may_pass.touch()
    assert seen + rows_of(loader) == list(range(16))
    loader._end()
    if loader._workers is not None:
        loader._workers.close()


@pytest.mark.parametrize("result", [None, 3, iter([np.arange(9)])])
def test_transform_that_returns_no_arrays_is_an_error(tmp_path: Path, result: Any) -> None:
    with pytest.raises(ValueError, match=r"transform returned .*; expected a mapping or a sequence of"):
        list(loader_of(written(tmp_path, [[9]]), transform=lambda batch: result))


def test_folder_that_cannot_be_listed_is_an_error_unless_it_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, [[9]])
    (tmp_path / ".hidden").mkdir()
    scandir = os.scandir

    def failing(folder: Any) -> Any:
        if os.path.basename(folder) in ("part", ".hidden"):
            raise OSError(f"{folder}: stale file handle")
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", failing)
    assert sorted(rows_of(loader_of(tmp_path))) == list(range(9))
    (tmp_path / "part").mkdir()
    with pytest.raises(DataError, match=r"cannot be listed: .*part: stale file handle"):
        loader_of(tmp_path)


#: Prints the rows of each source, or the error, as a user without permission to read all folders.
AS_NOBODY = """
import os, sys
import fsspec
from polyhvd.data import DataError, ParquetLoader
import pyarrow.dataset
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
for source in sys.argv[2:]:
    try:
        filesystem = fsspec.filesystem(sys.argv[1]) if sys.argv[1] else None
        place = lambda: (0, 1)
        loader = ParquetLoader(source, batch_size=100, filesystem=filesystem, placement=place)
        print(sorted(x for batch in loader for x in batch["x"].tolist()))
    except DataError as error:
        print(error)
"""


@pytest.mark.parametrize("system", ["", "file"])
def test_folder_without_permission_is_an_error_if_the_source_has_it(system: str) -> None:
    sources = ["", "*/x.parquet", "**/x.parquet", "**", "open/**/x.parquet", "part*/x.parquet", "open/[x].*"]
    # pytest's own folders may be closed to others by another pytest that begins meanwhile.
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        folders = [Path(path, name) for name in ("closed", "open", "open/within/deep", "part=1", "_left_out")]
        for number, folder in enumerate(folders):
            write_parquet({"x": [number]}, folder / "x.parquet")
        closed = folders[::2]
        for folder in closed:
            folder.chmod(0)
        command = [sys.executable, "-c", AS_NOBODY, system, *(f"{path}/{source}" for source in sources)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
        for folder in closed:
            folder.chmod(0o700)
    assert ended.returncode == 0, ended.stderr
    *refused, part, single = ended.stdout.splitlines()
    for error in refused:
        assert "cannot be listed: " in error
        assert "[Errno 13] Permission denied: " in error
        assert error.split("'")[-2].removesuffix("/x.parquet") in map(str, closed[:2])
    assert len(refused) == 5
    assert (part, single) == ("[3]", "[1]")


def test_pattern_finds_what_glob_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["a.pq", ".b.pq", "d/a.pq", "d/e/a.pq", "d/e/.c.pq", ".h/a.pq", "d/[x].pq", "f=1/a.pq", "A.pq"]
    for name in names:
        write_parquet({"x": [0]}, tmp_path / name)
    (tmp_path / "linked").symlink_to(tmp_path / "d", target_is_directory=True)
    monkeypatch.chdir(tmp_path)
    for pattern in (
        *("*.pq", "**/*.pq", "**", "d/**", "*/*.pq", "*/e/*.pq", ".*/*.pq", ".*.pq", "d/[[]x].pq", "?.pq"),
        *("./*.pq", "d/../*.pq", "d//e/*.pq", "**/e/*.pq", "**/**/a.pq", "*/**/a.pq"),
    ):
        for prefix in ("", f"{tmp_path}/"):
            paths = [path for path in glob.glob(prefix + pattern, recursive=True) if os.path.isfile(path)]
            found, links = storage.listed(prefix + pattern, [])
            read = {os.path.normpath(file.path) for file, _ in found}
            assert read | set(map(os.path.normpath, links)) == set(map(os.path.normpath, paths))
            assert sorted(map(os.path.realpath, read)) == sorted(set(map(os.path.realpath, paths)))


def test_file_that_links_lead_to_is_read_once(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    written(folder, [[9], [5]])
    link, other, outside = (folder / f"{name}.parquet" for name in ("-link", "link", "outside"))
    link.symlink_to("0000.parquet")
    other.symlink_to(folder / "0000.parquet")
    write_parquet({"x": [14], "name": ["row 14"]}, tmp_path / "x.parquet")
    outside.symlink_to(tmp_path / "x.parquet")
    (tmp_path / "linked").symlink_to(folder, target_is_directory=True)
    for source, left_out, first in (
        (folder, "2 linked paths", link),
        (folder / "*.parquet", "2 linked paths", link),
        (tmp_path / "*" / "*.parquet", "7 linked paths", link),
        (tmp_path / "linked", "2 linked paths", tmp_path / "linked" / link.name),
    ):
        loader = loader_of(source, shuffle=False)
        assert [x for batch in loader for x in batch["x"].tolist()] == list(range(15))
        text = f"left out: {left_out} of files that the source contains anyway, such as {first}"
        assert text in loader.describe().splitlines()
    assert "left out" not in loader_of([folder / "0000.parquet", outside]).describe()
    for source in ([folder / "0000.parquet", link], [outside, tmp_path / "x.parquet"], [folder, link]):
        with pytest.raises(ValueError, match=r"source contains the file .*\.parquet 2 times, by its path or"):
            loader_of(source)


def test_link_back_to_a_folder_above_is_entered_once(tmp_path: Path) -> None:
    write_parquet({"x": [5]}, tmp_path / "d" / "x.parquet")
    (tmp_path / "d" / "back").symlink_to(tmp_path, target_is_directory=True)
    assert rows_of(loader_of(f"{tmp_path}/**/x.parquet")) == [0]


def test_path_of_databricks_is_that_of_its_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_DBFS_MOUNT", str(tmp_path / "dbfs"))
    with pytest.raises(ValueError, match=r"'dbfs:/shared', but this host has no .*pass filesystem=fsspec"):
        loader_of("dbfs:/shared")
    (tmp_path / "dbfs").mkdir()
    for source in ("dbfs:/shared/a b%20", "dbfs:///shared/a b%20"):
        assert write_parquet({"x": [3, 4]}, f"{source}/x.parquet") == 2
        assert rows_of(loader_of(source, shuffle=False)) == [0, 1]
        assert rows_of(loader_of(f"{source}/*.parquet", shuffle=False)) == [0, 1]
        (tmp_path / "dbfs" / "shared" / "a b%20" / "x.parquet").unlink()
        with pytest.raises(DataError, match="has no files that end in"):
            loader_of(source)


@pytest.mark.parametrize("filter", [None, pc.field("x") >= 0])
def test_file_that_was_replaced_by_one_of_the_same_layout_is_an_error(tmp_path: Path, filter: Any) -> None:
    write_parquet({"x": np.arange(9.0)}, tmp_path / "x.parquet", rows_per_group=3, compression=None)
    loader = loader_of(tmp_path, filter=filter)
    write_parquet({"x": np.arange(9.0) + 9}, tmp_path / "x.parquet", rows_per_group=3, compression=None)
    with pytest.raises(DataError, match="has changed since the loader was made; files must not"):
        list(loader)


def test_file_that_was_written_again_with_the_same_rows_is_read_on(tmp_path: Path) -> None:
    write_parquet({"x": np.arange(9.0)}, tmp_path / "x.parquet", rows_per_group=3)
    loader = loader_of(tmp_path)
    write_parquet({"x": np.arange(9.0)}, tmp_path / "x.parquet", rows_per_group=3)
    assert sorted(rows_of(loader)) == list(range(9))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": []}, "columns is"),
        ({"columns": "x"}, "columns is 'x'; expected a list"),
        ({"columns": ["x", "x"]}, "columns has 'x' more than once"),
        ({"filter": "x > 3"}, "filter is 'x > 3'; expected an expression"),
        ({"fill_null": "a"}, "fill_null='a' does not fit column 'x' of type int64"),
        (
            {"fill_null": {"x": 1.5}},
            "fill_null=1.5 does not fit column 'x' of type int64: it is not an integer",
        ),
        ({"fill_null": {"y": 1}}, "fill_null names the column 'y', but the selected columns are x, name"),
        ({"batch_size": None}, "either batch_size"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"streams": 0}, "streams is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"last": "pad"}, "last is 'pad'"),
        ({"transform": 1}, "transform is 1; expected a function"),
        ({"shuffle_bytes": 0}, "shuffle_bytes is 0"),
        ({"prefetch_bytes": -1}, "prefetch_bytes is -1"),
        (
            {"source": "s4://bucket/x"},
            "source is .s4://bucket/x., for which fsspec cannot make a file system",
        ),
        ({"source": ["0000.parquet", "0000.parquet"]}, "0000.parquet 2 times"),
    ],
)
def test_bad_arguments_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(written(tmp_path, [[3]]))
    with pytest.raises(ValueError, match=message):
        loader_of(**{"source": ".", **options})


@pytest.mark.parametrize(
    "type_", [pa.list_(pa.time32("s")), pa.struct([("a", pa.int32())]), pa.time32("s")], ids=str
)
def test_column_that_cannot_be_an_array_is_refused(tmp_path: Path, type_: Any) -> None:
    parquet.write_table(pa.table({"x": pa.nulls(1, type_), "y": [1]}), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=r"column 'x' has the type .*; select other columns with columns="):
        loader_of(tmp_path)
    assert [batch["y"].tolist() for batch in loader_of(tmp_path, columns=["y"])] == [[1]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.parquet", "missing.parquet does not exist"),
        ("text.parquet", "text.parquet cannot be read as a Parquet file"),
        ("truncated.parquet", "truncated.parquet cannot be read as a Parquet file"),
        ("empty", "the folder 'empty' has no files that end in .parquet"),
        ("none-*.parquet", "no file matches 'none-"),
        ([], "source is an empty list"),
        (
            ["0000.parquet", "other.parquet"],
            "other.parquet: column 'x' has the type double, but int64 in 0000",
        ),
        (["0000.parquet", "struct.parquet"], r"struct.parquet: column 'x' has the type struct<.*, but int64"),
        (
            ["float.parquet", "int.parquet"],
            "int.parquet: column 'x' has the type .* 'dtype': 'int32'}, but .* 'dtype': 'float32'} in float",
        ),
        (["0000.parquet", "lacks.parquet"], "lacks.parquet has no single column 'name'; its columns are x"),
        (
            ["lacks.parquet", "0000.parquet"],
            "0000.parquet has the column 'name', which lacks.parquet does not have; name the columns to load",
        ),
    ],
)
def test_bad_files_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: Any, message: str
) -> None:
    monkeypatch.chdir(written(tmp_path, [[3]]))
    Path("empty").mkdir()
    Path("text.parquet").write_text("no data, but long enough to be a file")
    Path("truncated.parquet").write_bytes(Path("0000.parquet").read_bytes()[:-20])
    write_parquet({"x": [1.5], "name": ["a"]}, "other.parquet")
    write_parquet({"x": [1]}, "lacks.parquet")
    write_parquet({"x": [{"y": 1}], "name": ["a"]}, "struct.parquet")
    for dtype in ("float32", "int32"):
        write_parquet({"x": np.zeros((1, 2), dtype)}, f"{dtype.rstrip('32')}.parquet")
    with pytest.raises(DataError, match=message):
        loader_of(name)


def damage(path: Path) -> None:
    """Overwrite the data of the second column of the second row group, as a disk does, at no time."""
    before = path.stat()
    chunk = parquet.read_metadata(path).row_group(1).column(1)
    with path.open("r+b") as file:
        file.seek(chunk.dictionary_page_offset or chunk.data_page_offset)
        file.write(b"\xff" * chunk.total_compressed_size)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (damage, "0000.parquet: row group 1, column 'name' cannot be read: "),
        (
            Path.unlink,
            "0000.parquet: row group 0, column 'x' cannot be read: .* removed after the loader was made",
        ),
        (lambda path: path.write_bytes(b""), "0000.parquet has changed since the loader was made"),
    ],
    ids=["damaged", "removed", "emptied"],
)
def test_file_that_fails_while_it_is_read_is_named(
    tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    folder = written(tmp_path, [[3, 3, 3]])
    loader = loader_of(folder, shuffle=False, batch_size=3)
    change(folder / "0000.parquet")
    for _ in range(2):
        with pytest.raises(DataError, match=message):
            list(loader)


def test_missing_pyarrow_is_an_error_with_the_command_that_installs_it() -> None:
    program = """
import sys
sys.modules["pyarrow"] = None
from polyhvd.data import ArrayLoader, ParquetLoader, write_parquet
for call in (lambda: ParquetLoader("x", batch_size=1), lambda: write_parquet({"x": [1]}, "x")):
    try:
        call()
    except ModuleNotFoundError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all(line.endswith("pip install 'polyhvd[data]'") for line in lines)


# Describing


def test_loader_describes_its_files_without_reading_them(tmp_path: Path) -> None:
    loader = loader_of(written(tmp_path, [[10] * 50, [10] * 50]))
    described = loader.describe()
    assert "1,000 rows in 100 row groups of 2 files" in described
    assert "x int64" in described
    assert "shuffling: 8 streams" in described
    assert "warning" not in described
    assert loader.groups_read == 0
    assert loader.schema.names == ["x", "name"]
    assert "1,000 rows" in ParquetLoader(tmp_path, batch_size=1).describe()  # before init()


def test_description_warns_of_row_groups_that_are_too_few_or_too_large(tmp_path: Path) -> None:
    folder = written(tmp_path, [[100] * 8])
    few = loader_of(folder, placement=lambda: (0, 16)).describe()
    assert "16 ranks share 4 streams: a row group is read about 5.5 times in an epoch" in few
    assert "at most 5 rows per group (write_parquet(rows_per_group=...))" in few
    large = loader_of(folder, shuffle_bytes=1000).describe()
    assert "row groups are large" in large
    unshuffled = loader_of(folder, shuffle=False, streams=1, placement=lambda: (0, 3)).describe()
    assert "pass streams=4, which interleaves" in unshuffled
    (tmp_path / "many").mkdir()
    many = written(tmp_path / "many", [[1] * 640])
    small = loader_of(many, placement=lambda: (0, 53), batch_size=1).describe()
    assert "over 53 ranks: a row group is read about 2.9 times in an epoch" in small
    assert "use batches of at least 10 rows for each rank" in small
    assert "warning" not in loader_of(many, placement=lambda: (0, 53), batch_size=10).describe()
    assert "pass streams=64" in loader_of(many, placement=lambda: (0, 64), streams=8, batch_size=1).describe()


def test_first_batch_needs_a_part_of_many_small_row_groups(tmp_path: Path) -> None:
    loader = loader_of(written(tmp_path, [[2] * 3000]), prefetch_bytes=0)
    batches = iter(loader)
    next(batches)
    assert loader.groups_read < 1200
    batches.close()
    assert sorted(rows_of(loader)) == list(range(6000))


def test_windows_that_a_step_replaces_are_freed_one_by_one(tmp_path: Path) -> None:
    rows = np.zeros((2400, 10_000), np.uint8)
    write_parquet({"x": rows}, tmp_path / "0.parquet", rows_per_group=10)
    loader = loader_of(tmp_path, batch_size=120, prefetch_bytes=0, shuffle_bytes=6_000_000)
    # No step ends with a window.
    assert "shuffling: 16 streams, each mixed within 37 rows" in loader.describe()
    tracemalloc.start()
    try:
        assert sum(len(batch.indices) for batch in loader) == len(rows)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 6_000_000 + 5 * 1_200_000  # batches, and the rest of a row group of each stream


def test_rows_are_decoded_into_the_array_of_the_batch(tmp_path: Path) -> None:
    write_parquet({"x": [b"%d" % number for number in range(12)]}, tmp_path / "0.parquet")
    decoded: list[weakref.ref[Any]] = []
    most = 0

    def decode(data: bytes) -> Any:
        nonlocal most
        most = max(most, sum(array() is not None for array in decoded))
        array = np.full(3, int(data))
        decoded.append(weakref.ref(array))
        return array

    for batch in loader_of(tmp_path, batch_size=6, decode={"x": decode}):
        assert batch["x"].tolist() == [[row] * 3 for row in batch.indices]
    assert most <= 1


# The thread


def test_nothing_is_left_of_an_iteration_that_was_broken_off(tmp_path: Path) -> None:
    loader = loader_of(written(tmp_path, [[50] * 4]), prefetch_bytes=0)
    for _ in loader:
        assert len(threads()) == 1
        break
    assert threads() == []
    iterators = [iter(loader), iter(loader)]
    next(iterators[1])
    with pytest.raises(RuntimeError, match="make one loader for each"):
        next(iterators[0])
    assert len(threads()) == 1


def test_program_that_ends_within_an_iteration_ends_cleanly(tmp_path: Path) -> None:
    folder = str(written(tmp_path, [[50] * 40]))
    program = f"""
from polyhvd.data import ParquetLoader
options = {{"batch_size": 2, "prefetch_bytes": 100, "placement": lambda: (0, 1)}}
loader = ParquetLoader({folder!r}, **options)
batches = iter(loader)
next(batches)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("module", "lock"), [(files, "_counting"), (agreement, "_lock")])
def test_process_that_is_forked_while_a_lock_is_held_makes_a_loader_and_reads(
    tmp_path: Path, module: Any, lock: str
) -> None:
    written(tmp_path, [[5]])
    with getattr(module, lock):  # as another thread may
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)
            with suppress(BaseException):
                loader = ParquetLoader(tmp_path, batch_size=4)
                (array,) = ParquetFiles(str(tmp_path), columns=["x"]).read(loader._files.groups[0])
                os._exit(0 if array.tolist() == [0, 1, 2, 3, 4] else 1)
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
