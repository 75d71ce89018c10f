"""Batches of arrays in memory, in worlds that the test decides about."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from depth import repeats  # tests/harness, on the path by tests/conftest.py
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhvd import NotInitializedError
from polyhvd.data import ArrayLoader, Batch, DistributedBatchSampler


class World:
    """As many loaders as there may be ranks, of which the first ``size`` step together."""

    def __init__(self, rows: int, size: int, **options: object) -> None:
        self.size = size
        self.x = np.arange(rows) * 10
        self.loaders = [self._loader(rank, options) for rank in range(6)]

    def _loader(self, rank: int, options: dict[str, object]) -> ArrayLoader:
        return ArrayLoader([self.x, np.arange(len(self.x))], placement=lambda: (rank, self.size), **options)  # type: ignore[arg-type]


@given(
    rows=st.integers(0, 200),
    sizes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=5),
    batch=st.integers(1, 9),
    fixed=st.booleans(),
    last=st.sampled_from(["even", "short"]),
    shuffle=st.booleans(),
    failures=st.integers(0, 2**30),
)
@settings(max_examples=repeats(40, 100), deadline=None)
def test_every_row_is_used_once_over_changes_and_failed_steps(
    rows: int,
    sizes: list[tuple[int, int]],
    batch: int,
    fixed: bool,
    last: str,
    shuffle: bool,
    failures: int,
) -> None:
    """Ranks iterate on while the world changes; a step that fails is undone by loading the last state."""
    given_batch = {"global_batch_size": 6 * batch} if fixed else {"batch_size": batch}
    world = World(rows, sizes[0][0], last=last, shuffle=shuffle, **given_batch)
    used: Counter[int] = Counter()
    plan = [size for size, steps in sizes for _ in range(steps)]
    iterators = {rank: iter(world.loaders[rank]) for rank in range(world.size)}
    state = world.loaders[0].state_dict()
    for number in range(10**6):
        size = plan[min(number, len(plan) - 1)]
        world.size = size
        for rank in set(range(size)) - set(iterators):
            world.loaders[rank].load_state_dict(state)
            iterators[rank] = iter(world.loaders[rank])
        iterators = {rank: iterator for rank, iterator in iterators.items() if rank < size}
        batches = [next(iterator, None) for iterator in iterators.values()]
        if None in batches:
            assert batches == [None] * size, "all ranks have equally many steps"
            break
        dealt = [batch for batch in batches if batch is not None]
        failed = failures >> (number % 30) & 1 and number < 30
        shares = [len(batch.indices) if batch.weight else 0 for batch in dealt]
        assert max(shares) - min(shares) <= 1
        assert all(len(batch.indices) == 1 for batch in dealt if not batch.weight), "a mean needs a row"
        mean = sum(batch.weight * batch[0].mean() for batch in dealt) / size
        rows_of_all = [row for batch in dealt if batch.weight for row in batch.indices]
        assert mean == pytest.approx(np.mean(world.x[rows_of_all]))
        for rank in range(size):
            if failed:
                world.loaders[rank].load_state_dict(state)
            else:
                world.loaders[rank].advance()
        if not failed:
            used.update(rows_of_all)
            state = world.loaders[0].state_dict()
            assert all(world.loaders[rank].state_dict() == state for rank in range(size))
    assert used == Counter(range(rows))


def alone(rows: int = 10, **options: object) -> ArrayLoader:
    options = {"batch_size": 4, **options}
    return ArrayLoader([np.arange(rows)], placement=lambda: (0, 1), **options)  # type: ignore[arg-type]


def test_batches_have_the_rows_of_all_arrays_and_their_numbers() -> None:
    x, y = np.random.default_rng(1).normal(size=(20, 3)), np.arange(20)
    for batch in ArrayLoader([x, y.tolist()], 6, placement=lambda: (0, 1)):
        taken_x, taken_y = batch
        assert (taken_x == x[batch.indices]).all()
        assert taken_y.tolist() == batch.indices.tolist()
        assert len(batch) == 2


def test_arrays_may_have_names() -> None:
    loader = ArrayLoader({"x": np.arange(5), "y": -np.arange(5)}, 5, placement=lambda: (0, 1))
    (batch,) = loader
    assert isinstance(batch, Batch)
    assert batch["x"].tolist() == (-batch["y"]).tolist()
    assert list(batch) == ["x", "y"]


def test_a_step_counts_when_the_next_is_asked_for_or_when_it_is_said_to() -> None:
    loader = alone()
    batches = iter(loader)
    next(batches)
    assert loader.cursor == 0
    next(batches)
    assert loader.cursor == 4
    loader.advance()
    assert loader.cursor == 8
    with pytest.raises(RuntimeError, match="no step is under way"):
        loader.advance()
    next(batches)
    assert loader.cursor == 8
    assert next(batches, None) is None
    assert loader.cursor == 10


def test_a_step_that_raises_is_read_again() -> None:
    loader = alone()
    failed: list[int] = []

    def train() -> None:
        for batch in loader:
            failed[:] = batch.indices.tolist()
            if loader.cursor == 4:
                raise KeyError

    with pytest.raises(KeyError):
        train()
    assert loader.cursor == 4
    assert next(iter(loader)).indices.tolist() == failed


def test_epochs_follow_each_other_in_orders_of_their_own() -> None:
    loader = alone(100, batch_size=100)
    epochs = [next(iter([*loader])).indices.tolist() for _ in range(3)]
    assert loader.epoch == 2
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = alone(100, batch_size=100)
    again.set_epoch(1)
    assert [batch.indices.tolist() for batch in again] == [epochs[1]]


def test_epochs_can_be_integers_of_numpy() -> None:
    for seed in range(20):
        loader, other = alone(9, seed=seed), alone(9, seed=seed)
        loader.set_epoch(np.int64(3))  # type: ignore[arg-type]
        other.set_epoch(3)
        rows = [[batch.indices.tolist() for batch in each] for each in (loader, other)]
        assert rows[0] == rows[1]
        assert {type(value) for value in loader.state_dict().values()} == {int}


def test_set_epoch_leaves_a_restored_position_alone() -> None:
    loader = alone(12)
    seen = [batch.indices.tolist() for batch in loader]
    other = alone(12, seed=77, streams=3)
    other.load_state_dict({**loader.state_dict(), "cursor": 4})
    other.set_epoch(0)
    assert len(other) == 2
    assert [batch.indices.tolist() for batch in other] == seen[1:]
    other.set_epoch(1)
    assert (other.epoch, other.cursor, len(other)) == (1, 0, 3)


def test_an_epoch_that_was_restored_at_its_end_has_no_step() -> None:
    """Nor is it begun anew: a job that is restarted between two epochs repeats none."""
    loader = alone()
    loader.load_state_dict({**loader.state_dict(), "cursor": 10})
    assert list(loader) == []
    assert len(list(loader)) == 3
    assert loader.epoch == 1


def test_epoch_that_set_epoch_does_not_begin_again_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    loader, restored = alone(), alone()
    restored.load_state_dict({**loader.state_dict(), "cursor": 10})
    restored.set_epoch(0)
    assert list(restored) == []
    next(iter(loader))
    loader.set_epoch(0)
    assert len(list(loader)) == 3
    assert caplog.records == []
    for _ in range(2):
        loader.set_epoch(0)
        assert list(loader) == []
    (record,) = caplog.records
    assert "ArrayLoader: epoch 0 has no step left: set_epoch(0) does not begin it" in record.getMessage()
    loader.set_epoch(1)
    assert len(list(loader)) == 3


def test_without_shuffling_rows_come_as_they_lie() -> None:
    assert [batch[0].tolist() for batch in alone(5, shuffle=False, batch_size=2)] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(("last", "shares"), [("even", [2, 3]), ("short", [2, 2, 1]), ("drop", [2, 2])])
def test_the_last_rows(last: str, shares: list[int]) -> None:
    loader = ArrayLoader([np.arange(9)], 2, last=last, placement=lambda: (0, 2))
    assert [len(batch.indices) for batch in loader] == shares
    other = ArrayLoader([np.arange(9)], 2, last=last, placement=lambda: (1, 2))
    weights = [batch.weight for batch in other]
    assert weights == {"even": [1, 2 * 2 / 5], "short": [1, 1, 0], "drop": [1, 1]}[last]


def test_a_second_iteration_ends_the_first() -> None:
    loader = alone()
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    with pytest.raises(RuntimeError, match="make one loader for each"):
        next(first)


def test_no_rank_takes_itself_for_a_world_of_one() -> None:
    with pytest.raises(NotInitializedError):
        next(iter(ArrayLoader([np.arange(3)], 1)))


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ([np.arange(3)], {}, "either batch_size"),
        ([np.arange(3)], {"batch_size": 1, "global_batch_size": 2}, "either batch_size"),
        ([np.arange(3)], {"batch_size": 0}, "batch_size is 0"),
        ([np.arange(3)], {"batch_size": 1.5}, "batch_size is 1.5"),
        ([np.arange(3)], {"batch_size": 1, "last": "pad"}, "last is 'pad'"),
        ([np.arange(3)], {"batch_size": 1, "streams": 0}, "streams is 0"),
        ([np.arange(3), np.arange(4)], {"batch_size": 1}, "3, 4 rows"),
        ([np.float32(3)], {"batch_size": 1}, "each array at least one row"),
        ([], {"batch_size": 1}, "at least one array"),
        ([np.arange(3)], {"batch_size": 1, "placement": (0, 1)}, "has to be a function"),
        (np.arange(3), {"batch_size": 1}, r"put it into a list"),
        ([[5, 2**63 + 1]], {"batch_size": 1}, "column 0 of arrays has the integer 9223372036854775809"),
        ([[[5, 2**63 + 1]]], {"batch_size": 1}, "column 0 of arrays has the integer 9223372036854775809"),
        ([[np.ma.masked_equal([1, 2], 2)]], {"batch_size": 1}, "column 0 of arrays has masked entries"),
        ([np.arange(3)], {"batch_size": 1, "seed": 2**64}, "seed is 18446744073709551616; .* and at most"),
    ],
)
def test_bad_arguments_are_refused(arrays: object, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ArrayLoader(arrays, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 11}, "data with 11 rows, but these have 10"),
        ({"cursor": 11}, "cursor is 11"),
        ({"epoch": -1}, "epoch is -1"),
        ({"streams": 0}, "streams is 0"),
        ({"seed": None}, "seed is None"),
    ],
)
def test_states_that_do_not_fit_are_refused_and_change_nothing(
    change: dict[str, object], message: str
) -> None:
    loader = alone()
    before = loader.state_dict()
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict({**before, **change})
    with pytest.raises(ValueError, match="what state_dict"):
        loader.load_state_dict(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lacks cursor"):
        loader.load_state_dict({name: value for name, value in before.items() if name != "cursor"})
    assert loader.state_dict() == before


def test_more_ranks_than_a_global_batch_has_rows_is_an_error() -> None:
    loader = ArrayLoader([np.arange(9)], global_batch_size=2, placement=lambda: (0, 3))
    with pytest.raises(ValueError, match="a step of 2 rows leaves some of 3 ranks without any"):
        next(iter(loader))


# Tables


def test_columns_of_an_arrow_table_are_arrays_that_share_its_memory() -> None:
    pa = pytest.importorskip("pyarrow")
    x = np.arange(9)
    type_ = pa.fixed_shape_tensor(pa.float32(), [2])
    storage = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(18, dtype=np.float32)), 2)
    table = pa.table({"x": x, "t": pa.ExtensionArray.from_storage(type_, storage), "s": list("abcdefghi")})
    for data in (table, table.to_batches()[0], Frame(table)):
        loader = ArrayLoader(data, 4, placement=lambda: (0, 1))
        assert np.shares_memory(loader._arrays[0], x)
        seen = []
        for batch in loader:
            assert batch["x"].tolist() == batch.indices.tolist()
            assert batch["t"].tolist() == [[2 * n, 2 * n + 1] for n in batch["x"]]
            assert batch["s"].tolist() == ["abcdefghi"[n] for n in batch["x"]]
            seen += batch["x"].tolist()
        assert sorted(seen) == list(range(9))


class Frame:
    """A DataFrame as those of Polars offer themselves."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self.shape = (9, 3)

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._table.__arrow_c_stream__(requested_schema)


def test_tables_with_nulls_equal_names_or_other_types_are_refused() -> None:
    pa = pytest.importorskip("pyarrow")
    one = pa.array([1])
    for table, message in (
        (pa.table({"x": pa.array([1, None])}), "column 'x' of arrays has 1 null in row 1; replace them"),
        (pa.table([one, one], ["x", "x"]), "a table with two columns 'x'; rename"),
        (pa.table({"x": pa.array([{"a": 1}])}), "column 'x' has the type struct<.*; leave it out"),
    ):
        with pytest.raises(ValueError, match=message):
            ArrayLoader(table, 1)


def test_columns_of_pandas_are_arrays_that_share_its_memory() -> None:
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"x": np.arange(9), "y": np.arange(9) / 2, "s": list("abcdefghi")})
    loader = ArrayLoader(frame, 4, placement=lambda: (0, 1))
    assert np.shares_memory(loader._arrays[0], frame["x"].to_numpy())
    for batch in loader:
        assert batch["y"].tolist() == (batch["x"] / 2).tolist()
        assert batch["s"].tolist() == ["abcdefghi"[n] for n in batch["x"]]
    with pytest.raises(ValueError, match="column 's' of arrays has 1 null;"):
        ArrayLoader(pd.DataFrame({"s": ["a", None]}), 1)
    with pytest.raises(ValueError, match="a DataFrame with two columns 'x'"):
        ArrayLoader(pd.DataFrame([[1, 2]], columns=["x", "x"]), 1)
    nullable = ArrayLoader(pd.DataFrame({"x": pd.array([1, 2], "Int64")}), 1, placement=lambda: (0, 1))
    assert sorted(int(batch["x"][0]) for batch in nullable) == [1, 2]


def test_rows_of_pandas_are_those_at_a_position_and_not_those_of_a_label() -> None:
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"x": np.arange(9), "y": np.arange(9) / 2})[::-1]
    (batch,) = ArrayLoader([np.arange(9), frame["x"], frame], 9, placement=lambda: (0, 1))
    numbers, x, both = batch
    assert x.tolist() == (8 - numbers).tolist()
    assert both.tolist() == [[n, n / 2] for n in x.tolist()]
    with pytest.raises(ValueError, match="arrays is an array; put it into a list"):
        ArrayLoader(frame["x"], 1)
    with pytest.raises(ValueError, match="column 1 of arrays has 1 null;"):
        ArrayLoader([np.arange(2), pd.Series([1, None], dtype="Int64")], 1)


class Series:
    """A column as those of Polars offer themselves: NumPy gets floats in place of integers and nulls."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.shape = (len(array),)

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, indices: Any) -> Series:
        return Series(self._array.take(indices))

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self._array.to_numpy()

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._array.__arrow_c_stream__(requested_schema)


def test_arrays_of_arrow_become_arrays() -> None:
    pa = pytest.importorskip("pyarrow")
    large = [2**60 + 1, 5]
    for array in (pa.array(large), pa.chunked_array([large]), Series(pa.chunked_array([large]))):
        (batch,) = ArrayLoader({"x": array}, 2, shuffle=False, placement=lambda: (0, 1))
        assert isinstance(batch["x"], np.ndarray)
        assert batch["x"].tolist() == large
    nulls = pa.chunked_array([[2**60 + 1, None]])
    for array in (nulls.chunk(0), nulls, Series(nulls)):
        with pytest.raises(ValueError, match="column '0' of arrays has 1 null in row 1;"):
            ArrayLoader([array], 1)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("is_sampler", [False, True])
def test_state_within_an_epoch_is_refused_where_rows_are_in_another_order(
    is_sampler: bool, shuffle: bool
) -> None:
    def made(shuffle: bool) -> ArrayLoader | DistributedBatchSampler:
        if is_sampler:
            return DistributedBatchSampler(20, 4, shuffle=shuffle, placement=lambda: (0, 1))
        return ArrayLoader([np.arange(20)], 4, shuffle=shuffle, placement=lambda: (0, 1))

    loader, other = made(shuffle), made(not shuffle)
    for cursor in (0, 20):
        other.load_state_dict({**loader.state_dict(), "epoch": 2, "cursor": cursor})
        assert (other.epoch, other.cursor) == (2, cursor)
    within = {**loader.state_dict(), "cursor": 8}
    with pytest.raises(ValueError, match=f"within an epoch of a loader with shuffle={shuffle}, .* repeated"):
        other.load_state_dict(within)
    assert (other.epoch, other.cursor) == (2, 20)
    loader.load_state_dict(within)
    del within["shuffle"]
    other.load_state_dict(within)
