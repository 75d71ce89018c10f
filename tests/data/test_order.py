"""The order of rows: every one once per epoch over any changes of the world, and read where it lies."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from depth import repeats  # tests/harness, on the path by tests/conftest.py
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhvd.data import Order, Run, Step
from polyhvd.data.order import LAST, permutation

GROUPS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 40)), max_size=30)
WORLDS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20), st.integers(1, 6)), min_size=1, max_size=6)


def steps_over(order: Order, worlds: list[tuple[int, int, int]], last: str) -> list[Step]:
    """An epoch in which worlds of (size, batch size, steps) follow each other; the last one stays."""
    steps: list[Step] = []
    cursor = 0
    worlds = [*worlds, (*worlds[-1][:2], 10**9)]
    for size, batch, count in worlds:
        for _ in range(count):
            step = order.step(cursor, batch * size, size, last)
            if step is None:
                break
            steps.append(step)
            cursor = step.after
    return steps


class Naive:
    """The same order, written down row by row."""

    def __init__(self, groups: list[int], seed: int, streams: int, window: int | None, epoch: int) -> None:
        full = [group for group, rows in enumerate(groups) if rows]
        sequence = []
        for index in permutation(len(full), seed, epoch):
            group = full[index]
            sequence += [sum(groups[:group]) + row for row in range(groups[group])]
        self.streams: list[list[int]] = []
        lengths = [len(range(stream, len(sequence), streams)) for stream in range(streams)]
        for stream, length in enumerate(lengths):
            rows, sequence = sequence[:length], sequence[length:]
            if max(groups, default=0) > 1:
                width = window or max(length, 1)
                parts = [rows[begin : begin + width] for begin in range(0, length, width)]
                rows = []
                for number, part in enumerate(parts):
                    rows += [part[i] for i in permutation(len(part), seed, epoch, 1 + stream, number)]
            self.streams.append(rows)
        assert not sequence
        bits = max(1, (streams - 1).bit_length())
        line = sorted(range(1 << bits), key=lambda n: f"{n:0{bits}b}"[::-1])
        self.line = {stream: place for place, stream in enumerate(line)}

    def dealt(self, step: Step) -> list[list[int]]:
        """The rows of each rank in a step."""
        count = len(self.streams)
        positions = sorted(range(step.cursor, step.after), key=lambda p: (self.line[p % count], p // count))
        rows = [self.streams[p % count][p // count] for p in positions]
        dealt = []
        for rank in range(step.size):
            share = len(range(rank, step.rows, step.size))
            dealt.append(rows[:share])
            rows = rows[share:]
        return dealt


@given(
    groups=GROUPS,
    worlds=WORLDS,
    last=st.sampled_from(LAST),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 1000),
    streams=st.integers(1, 70),
    window=st.none() | st.integers(1, 50),
)
@settings(max_examples=repeats(60, 200), deadline=None)
def test_every_row_comes_once_over_any_worlds_where_a_naive_order_has_it(
    groups: list[int],
    worlds: list[tuple[int, int, int]],
    last: str,
    seed: int,
    epoch: int,
    streams: int,
    window: int | None,
) -> None:
    order = Order(groups, seed=seed, streams=streams, window=window)
    naive = Naive(groups, seed, streams, window, epoch)
    seen: Counter[int] = Counter()
    steps = steps_over(order, worlds, last)
    for step in steps:
        dealt = [order.rows(epoch, order.runs(step, rank)).tolist() for rank in range(step.size)]
        assert dealt == naive.dealt(step)
        shares = [len(rows) for rows in dealt]
        assert shares == [step.share(rank) for rank in range(step.size)]
        assert max(shares) - min(shares) <= 1
        assert np.isclose(sum(step.weight(rank) for rank in range(step.size)), step.size)
        for rows in dealt:
            seen.update(rows)
    total = sum(groups)
    assert max(seen.values(), default=1) == 1
    if last != "drop":
        assert set(seen) == set(range(total))
    else:
        size, batch, _ = worlds[-1]
        assert total - len(seen) < max(size * batch for size, batch, _ in worlds)
        assert total - (steps[-1].after if steps else 0) < size * batch


@given(
    total=st.integers(0, 300), size=st.integers(1, 9), batch=st.integers(1, 20), cursor=st.integers(0, 300)
)
@settings(max_examples=repeats(60, 200), deadline=None)
def test_the_number_of_steps_is_that_of_the_steps(total: int, size: int, batch: int, cursor: int) -> None:
    order = Order.of_rows(total)
    for last in LAST:
        at, count = min(cursor, total), 0
        while step := order.step(at, batch * size, size, last):
            at, count = step.after, count + 1
        assert order.steps(min(cursor, total), batch * size, size, last) == count


@given(total=st.integers(1, 300), size=st.integers(1, 9), batch=st.integers(1, 20))
@settings(max_examples=repeats(60, 200), deadline=None)
def test_the_last_steps_are_as_they_are_described(total: int, size: int, batch: int) -> None:
    order, full = Order.of_rows(total), batch * size
    even, drop, short = (steps_over(order, [(size, batch, 1)], last) for last in LAST)
    assert [step.rows for step in short] == [full] * (total // full) + [total % full] * (total % full > 0)
    assert [step.rows for step in drop] == [full] * (total // full)
    alone = total % full
    together = 0 < alone < size and total > full
    assert [step.rows for step in even] == (
        [full] * (total // full - 1) + [full + alone] if together else [step.rows for step in short]
    )


def test_splitmix64_is_the_published_one() -> None:
    """The first numbers of its reference implementation for the seed 1234567, sorted."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    published.append(16408922859458223821)
    gamma, bits = 0x9E3779B97F4A7C15, 2**64 - 1
    from polyhvd.data.order import _mix

    assert [_mix(1234567 + i * gamma & bits) for i in range(1, 6)] == published
    as_array = np.array([1234567 + i * gamma & bits for i in range(1, 6)], np.uint64)
    assert _mix(as_array).tolist() == published


def test_orders_stay_what_they_are() -> None:
    """A change of these numbers would change the meaning of every saved position."""
    assert permutation(8, 1, 2).tolist() == PERMUTATION
    order = Order([3, 0, 5, 1, 4], seed=7, streams=4, window=2)
    step = order.step(0, 13, 2)
    assert step is not None
    assert [order.rows(3, order.runs(step, rank)).tolist() for rank in (0, 1)] == ROWS


PERMUTATION = [2, 7, 3, 1, 5, 6, 0, 4]
ROWS = [[9, 8, 11, 10, 6, 5, 7], [12, 3, 4, 0, 1, 2]]


def test_permutations_are_uniform() -> None:
    """All 24 of four numbers, each within five standard deviations of its expectation over 24,000 keys."""
    counts = Counter(tuple(permutation(4, 5, epoch).tolist()) for epoch in range(24000))
    assert len(counts) == 24
    assert max(abs(count - 1000) for count in counts.values()) < 5 * 1000**0.5


@pytest.mark.parametrize("groups", [[1] * 500, [50] * 10])
def test_every_epoch_seed_and_number_of_streams_is_an_order_of_its_own(groups: list[int]) -> None:
    def rows(seed: int, epoch: int, streams: int) -> tuple[int, ...]:
        order = Order(groups, seed=seed, streams=streams)
        step = order.step(0, 500, 1)
        assert step is not None
        return tuple(order.rows(epoch, order.runs(step, 0)).tolist())

    assert len({rows(seed, epoch, v) for seed in (0, 1, 2) for epoch in (0, 1, 2) for v in (4, 64)}) >= 17


def test_an_order_that_is_not_shuffled_has_the_rows_as_they_lie() -> None:
    order = Order([3, 0, 4], streams=1, shuffle=False)
    step = order.step(0, 7, 2)
    assert step is not None
    assert [order.rows(9, order.runs(step, rank)).tolist() for rank in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6]]
    assert order.locate(9, [Run(0, 2, 3)])[0].tolist() == [0, 2, 2]


#: Sizes of worlds and batches, each one once: the others are variations of them.
USUAL = {(2, 32), (4, 10), (16, 7), (64, 1), (3, 7), (6, 10), (24, 32), (48, 7)}


def groups_read(order: Order, worlds: list[tuple[int, int, int]], groups: int) -> float:
    """How often a row group is read per epoch, by all ranks, on average: once by each rank in each stream."""
    read: set[tuple[int, int, int, int]] = set()
    size_before, world = 0, 0
    for step in steps_over(order, worlds, "even"):
        world += step.size != size_before
        size_before = step.size
        for rank in range(step.size):
            runs = order.runs(step, rank)
            streams = np.repeat([run.stream for run in runs], [run.length for run in runs])
            found = np.unique(streams * groups + order.locate(0, runs)[0])
            read |= {(world, rank, int(key) // groups, int(key) % groups) for key in found}
    return len(read) / groups


@pytest.mark.parametrize(
    ("size", "batch"),
    [
        (size, batch) if (size, batch) in USUAL else pytest.param(size, batch, marks=pytest.mark.nightly)
        for size in (2, 4, 16, 64)
        for batch in (1, 7, 10, 32)
    ],
)
def test_a_rank_reads_its_own_row_groups_where_its_size_divides_the_streams(size: int, batch: int) -> None:
    order = Order([16] * 1024, streams=64, window=32)
    assert groups_read(order, [(size, batch, 1)], 1024) <= 1.1


@pytest.mark.parametrize(
    ("size", "batch"),
    [
        (size, batch) if (size, batch) in USUAL else pytest.param(size, batch, marks=pytest.mark.nightly)
        for size in (3, 6, 24, 48)
        for batch in (7, 10, 32)
    ],
)
def test_row_groups_are_read_twice_at_most_in_other_worlds(size: int, batch: int) -> None:
    order = Order([16] * 1024, streams=64, window=32)
    assert groups_read(order, [(size, batch, 1)], 1024) <= 2


def test_row_groups_are_read_little_more_often_when_the_world_changes() -> None:
    order = Order([64] * 1024, streams=64, window=128)
    assert groups_read(order, [(4, 32, 150), (3, 32, 150), (5, 32, 1)], 1024) <= 1.4


@pytest.mark.parametrize("streams", [1, 2, 5, 61, 64, 100])
def test_positions_of_one_step_come_from_different_streams(streams: int) -> None:
    order = Order.of_rows(10 * streams, streams=streams)
    step = order.step(3, streams, 1)
    assert step is not None
    runs = order.runs(step, 0)
    assert sorted(run.stream for run in runs) == list(range(streams))
    assert {run.length for run in runs} == {1}


def test_a_window_bounds_how_far_rows_move() -> None:
    order = Order([10] * 100, seed=3, streams=4, window=20)
    for stream in range(4):
        groups, _ = order.locate(0, [Run(stream, 0, 250)])
        for begin in range(0, 250, 20):
            assert len(set(groups[begin : begin + 20].tolist())) <= 3
    flat = [int(row) for row in order.rows(0, [Run(0, 0, 20)])]
    assert any(b < a for a, b in pairwise(flat)), "rows of different groups are mixed"


@given(
    groups=GROUPS,
    seed=st.integers(0, 2**63 - 1),
    streams=st.integers(1, 9),
    window=st.none() | st.integers(1, 50),
    shuffle=st.booleans(),
)
@settings(max_examples=repeats(40, 200), deadline=None)
def test_windows_of_a_stream_have_its_rows_in_their_places(
    groups: list[int], seed: int, streams: int, window: int | None, shuffle: bool
) -> None:
    order = Order(groups, seed=seed, streams=streams, window=window, shuffle=shuffle)
    offsets = np.cumsum([0, *groups])
    for stream in range(streams):
        rows: list[int] = []
        while len(rows) < order.length(stream):
            found = order.window_at(3, stream, len(rows))
            assert found.begin == len(rows)
            stored = [
                row + offsets[group]
                for group, first, count in found.sections
                for row in range(first, first + count)
            ]
            placed = np.empty(found.end - found.begin, np.int64)
            placed[slice(None) if found.places is None else found.places] = stored
            rows += placed.tolist()
        if rows:
            assert rows == order.rows(3, [Run(stream, 0, len(rows))]).tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": [-1]}, "groups"),
        ({"groups": [1.5]}, "groups"),
        ({"groups": [[1]]}, "groups"),
        ({"groups": [2**62, 2**62, 2**62]}, "more than"),
        ({"streams": 0}, "streams is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": "1"}, "seed is '1'"),
        ({"window": 0}, "window is 0"),
    ],
)
def test_bad_orders_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Order(**{"groups": [1, 2], **arguments})  # type: ignore[arg-type]


def test_bad_steps_are_refused() -> None:
    order = Order.of_rows(10)
    with pytest.raises(
        ValueError, match="a step of 2 rows leaves some of 3 ranks without any; use at least 3"
    ):
        order.step(0, 2, 3)
    with pytest.raises(ValueError, match="cursor is 11, but an epoch has positions 0 to 10"):
        order.step(11, 2, 1)
    with pytest.raises(ValueError, match="'even', 'drop', 'short'"):
        order.step(0, 2, 1, "pad")
    with pytest.raises(ValueError, match="rank 2 is not below the 2 ranks"):
        order.runs(Step(0, 4, 2), 2)
    with pytest.raises(ValueError, match="the step ends at position 12"):
        order.runs(Step(8, 4, 2), 0)
    with pytest.raises(ValueError, match="leaves the rows"):
        order.rows(0, [Run(0, 0, 5)])


def test_epochs_may_be_read_in_any_order() -> None:
    order = Order([10] * 20, seed=3, streams=4, window=20)
    runs = [Run(2, 5, 10)]
    first, second = order.rows(0, runs).tolist(), order.rows(1, runs).tolist()
    assert first != second
    assert order.rows(0, runs).tolist() == first
    assert Order([10] * 20, seed=3, streams=4, window=20).rows(1, runs).tolist() == second
