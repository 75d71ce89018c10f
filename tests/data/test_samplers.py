"""Samplers for data loaders that read ahead, in worlds that the test decides about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from depth import repeats  # tests/harness, on the path by tests/conftest.py
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhvd.data import DistributedBatchSampler, ElasticSampler, elastic_sampler
from polyhvd.data.position import Place, current_place
from polyhvd.errors import NotInitializedError


class Placed:
    """A place that a test changes."""

    def __init__(self, rank: int, size: int) -> None:
        self.place = (rank, size)

    def __call__(self) -> tuple[int, int]:
        return self.place


class Ahead:
    """What a data loader does with a batch sampler: it asks for batches ahead of those that it hands out."""

    def __init__(self, sampler: DistributedBatchSampler, ahead: int) -> None:
        self.batches = iter(sampler)
        self.read = [next(self.batches, None) for _ in range(ahead)]

    def __next__(self) -> list[int] | None:
        self.read.append(next(self.batches, None))
        return self.read.pop(0)


@given(
    rows=st.integers(0, 150),
    worlds=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=5),
    batch=st.integers(1, 9),
    ahead=st.integers(0, 4),
    last=st.sampled_from(["even", "short"]),
)
@settings(max_examples=repeats(40, 100), deadline=None)
def test_every_row_is_used_once_whatever_was_read_ahead(
    rows: int, worlds: list[tuple[int, int]], batch: int, ahead: int, last: str
) -> None:
    used: Counter[int] = Counter()
    state = DistributedBatchSampler(rows, batch, last=last).state_dict()
    for size, steps in [*worlds, (worlds[-1][0], 10**6)]:
        samplers = [
            DistributedBatchSampler(
                rows, batch, last=last, placement=lambda rank=rank, size=size: (rank, size)
            )
            for rank in range(size)
        ]
        for sampler in samplers:
            sampler.load_state_dict(state)
        loaders = [Ahead(sampler, ahead) for sampler in samplers]
        for _ in range(steps):
            dealt = [next(loader) for loader in loaders]
            if None in dealt:
                assert dealt == [None] * size
                break
            for sampler, indices in zip(samplers, dealt, strict=True):
                if sampler.weight:
                    used.update(indices or [])
                sampler.advance()
        state = samplers[0].state_dict()
        assert all(sampler.state_dict() == state for sampler in samplers)
    assert used == Counter(range(rows))


@pytest.mark.parametrize(
    ("rows", "uses_weight", "advances", "is_reported"),
    [(9, True, False, True), (9, True, True, False), (9, False, False, False), (8, True, False, False)],
    ids=["stale", "advanced", "unused", "equal"],
)
@pytest.mark.parametrize("ahead", [0, 1])
def test_weights_that_are_not_those_of_their_steps_are_reported_once(
    ahead: int,
    rows: int,
    uses_weight: bool,
    advances: bool,
    is_reported: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sampler = DistributedBatchSampler(rows, 2, last="short", placement=lambda: (1, 2))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        loader = Ahead(sampler, ahead)
        while next(loader) is not None:
            if uses_weight:
                assert sampler.weight in (0.0, 1.0)
            if advances:
                sampler.advance()
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == is_reported
    assert all("call sampler.advance() after each step" in text for text in texts)


def test_what_was_read_ahead_for_another_world_is_an_error() -> None:
    placed = Placed(0, 2)
    sampler = DistributedBatchSampler(100, 5, placement=placed)
    batches = iter(sampler)
    next(batches)
    next(batches)
    placed.place = (0, 3)
    with pytest.raises(RuntimeError, match="rank 0 of 2, but this is rank 0 of 3 now: begin a new"):
        sampler.advance()
    with pytest.raises(RuntimeError, match="begin a new iteration"):
        next(batches)
    assert sampler.cursor == 0
    next(iter(sampler))
    sampler.advance()
    assert sampler.cursor == 15


def test_batches_read_without_a_step_are_not_an_empty_epoch(caplog: pytest.LogCaptureFixture) -> None:
    assert len(list(DistributedBatchSampler(10, 5, placement=Placed(0, 2)))) == 1
    assert not caplog.records
    assert list(DistributedBatchSampler(3, 5, last="drop", placement=Placed(0, 2))) == []
    assert "the epoch has no step: there are 3 rows" in caplog.text


@pytest.mark.parametrize("what", ["load_state_dict", "iter", "set_epoch"])
def test_what_was_read_ahead_of_another_position_is_an_error(what: str) -> None:
    sampler = DistributedBatchSampler(100, 5, placement=lambda: (0, 1))
    batches = iter(sampler)
    next(batches)
    if what == "load_state_dict":
        sampler.load_state_dict(sampler.state_dict())
    elif what == "set_epoch":
        sampler.set_epoch(1)
    else:
        iter(sampler)
    with pytest.raises(RuntimeError, match="begin a new iteration"):
        next(batches)


def test_a_sampler_that_is_not_advanced_repeats_its_epoch() -> None:
    """As samplers of other libraries do without set_epoch()."""
    sampler = DistributedBatchSampler(10, 5, placement=lambda: (0, 1))
    assert list(sampler) == list(sampler)
    before = list(sampler)
    sampler.set_epoch(1)
    assert before != list(sampler)


def test_a_sampler_that_is_advanced_goes_to_the_next_epoch() -> None:
    sampler = DistributedBatchSampler(range(10), 5, placement=lambda: (0, 1))
    for _ in sampler:
        sampler.advance()
    assert (sampler.epoch, sampler.cursor, len(sampler)) == (0, 10, 0)
    assert len(list(sampler)) == 2
    assert sampler.epoch == 1


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> Placed:
    found = Placed(0, 1)
    monkeypatch.setattr(elastic_sampler, "current_place", lambda: Place(*found.place))
    return found


class Group:
    """The elastic samplers of all ranks of a world."""

    def __init__(self, placed: Placed, size: int, rows: int) -> None:
        self.placed, self.size = placed, size
        self.samplers = []
        for rank in range(size):
            placed.place = (rank, size)
            self.samplers.append(ElasticSampler(range(rows), seed=3))

    def __iter__(self) -> Iterator[ElasticSampler]:
        for rank, sampler in enumerate(self.samplers):
            self.placed.place = (rank, self.size)
            yield sampler

    def passes(self) -> list[list[int]]:
        return [list(sampler) for sampler in self]


@given(
    rows=st.integers(1, 120),
    worlds=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=5),
    batch=st.integers(1, 9),
)
@settings(max_examples=repeats(40, 100), deadline=None)
def test_elastic_samplers_lose_nothing_and_repeat_what_fills_up_the_last_batch_alone(
    rows: int, worlds: list[tuple[int, int]], batch: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        placed = Placed(0, 1)
        patch.setattr(elastic_sampler, "current_place", lambda: Place(*placed.place))
        used: Counter[int] = Counter()
        state = ElasticSampler(range(rows), seed=3).state_dict()
        for size, steps in [*worlds, (worlds[-1][0], 10**6)]:
            group = Group(placed, size, rows)
            for sampler in group:
                sampler.load_state_dict(state)
            dealt = group.passes()
            assert len({len(samples) for samples in dealt}) == 1, "all ranks have equally many"
            assert {len(sampler) for sampler in group} == {len(dealt[0])}
            for number in range(min(steps, -(-len(dealt[0]) // batch))):
                for sampler, samples in zip(group, dealt, strict=True):
                    taken = sampler.get_indices(number, batch)
                    assert taken == samples[number * batch : (number + 1) * batch]
                    used.update(taken)
                    sampler.record_batch(number, batch)
            state = group.samplers[0].state_dict()
            assert all(sampler.state_dict() == state for sampler in group)
        assert state["processed_num"] == rows
        assert set(used) == set(range(rows))
        assert used.total() - rows < max(size for size, _ in worlds)


def test_set_epoch_forgets_only_another_epoch(placed: Placed) -> None:
    sampler = ElasticSampler(range(20))
    first = list(sampler)
    sampler.record_batch(0, 5)
    sampler.set_epoch(0)
    assert sampler.state_dict() == {"epoch": 0, "processed_num": 5}
    sampler.set_epoch(np.int64(1))  # type: ignore[arg-type]
    assert sampler.state_dict() == {"epoch": 1, "processed_num": 0}
    assert type(sampler.epoch) is int
    second = list(sampler)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(20))


def test_state_that_is_restored_between_two_worlds_is_dealt_in_the_next(
    placed: Placed, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed.place = (0, 2)
    sampler = ElasticSampler(range(20), shuffle=False)
    list(sampler)
    sampler.record_batch(0, 2)
    saved = sampler.state_dict()
    sampler.record_batch(1, 3)
    with monkeypatch.context() as patch:
        patch.setattr(elastic_sampler, "current_place", current_place)
        sampler.load_state_dict(saved)
        with pytest.raises(NotInitializedError):
            iter(sampler)
    assert list(sampler) == list(range(4, 20, 2))


def test_recording_again_counts_once(placed: Placed) -> None:
    placed.place = (1, 4)
    sampler = ElasticSampler(range(100))
    samples = list(sampler)
    sampler.record_batch(0, 5)
    sampler.record_batch(0, 5)
    assert sampler.processed_num == 20
    sampler.record_indices(samples[5:10])
    sampler.record_indices(samples[5:10])
    assert sampler.processed_num == 40


def test_batches_may_be_numbered_over_the_whole_epoch(placed: Placed) -> None:
    sampler = ElasticSampler(range(100))
    sampler.load_state_dict({"epoch": 2, "processed_num": 30})
    list(sampler)
    sampler.record_batch(3, 10)
    sampler.record_batch(4, 10)
    assert sampler.state_dict() == {"epoch": 2, "processed_num": 50}


def test_a_pass_after_a_whole_epoch_has_a_whole_epoch(placed: Placed) -> None:
    sampler = ElasticSampler(range(10))
    sampler.load_state_dict({"epoch": 2, "processed_num": 4})
    assert len(list(sampler)) == 6
    sampler.record_batch(0, 6)
    assert len(list(sampler)) == 10


def test_an_epoch_that_was_restored_at_its_end_deals_nothing(placed: Placed) -> None:
    sampler = ElasticSampler(range(10))
    sampler.load_state_dict({"epoch": 2, "processed_num": 10})
    assert list(sampler) == []
    assert len(sampler) == 0


def test_a_pass_that_is_broken_off_begins_again_without_losing_samples(placed: Placed) -> None:
    sampler = ElasticSampler(range(10))
    first = list(sampler)
    sampler.record_batch(0, 2)
    assert list(sampler) == first
    sampler.record_batch(0, 2)
    assert sampler.processed_num == 2


def test_a_pass_in_another_world_deals_what_is_left(placed: Placed) -> None:
    """Even if nobody called reset(), as after an interrupt that skips the synchronization."""
    sampler = ElasticSampler(range(12), shuffle=False)
    list(sampler)
    sampler.record_batch(0, 4)
    placed.place = (1, 2)
    assert list(sampler) == [5, 7, 9, 11]
    assert sampler.remaining_indices == list(range(4, 12))


@pytest.mark.parametrize(
    "state", [{"epoch": 1}, {"epoch": -1, "processed_num": 0}, {"epoch": 1, "processed_num": None}]
)
def test_bad_states_are_refused_and_change_nothing(placed: Placed, state: dict[str, object]) -> None:
    sampler = ElasticSampler(range(10))
    with pytest.raises(ValueError, match=r"lacks processed_num|has to be an integer"):
        sampler.load_state_dict(state)
    with pytest.raises(ValueError, match="what state_dict"):
        sampler.load_state_dict(None)  # type: ignore[arg-type]
    assert sampler.state_dict() == {"epoch": 0, "processed_num": 0}
