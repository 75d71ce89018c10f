"""Who of a world is slow: what members tell of their steps, and what the launcher makes of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhvd.elastic.membership import ExitKind, Form, Limits, Membership, Notify
from polyhvd.elastic.pace import Figure, Pace, SlowMemberDetector, SlowRank
from polyhvd.elastic.slow import slow_ranks


def figures(own_s: list[float], step_s: float) -> list[Figure]:
    """The figures that a member has sent whose steps have each taken so long."""
    pace, now, waited_s, sent = Pace(1), 100.0, 0.0, []
    for number, own in enumerate([0.0, *own_s]):
        now += max(step_s, own)
        waited_s += max(step_s, own) - own
        if (figure := pace.step(now, waited_s, number + 1)) is not None:
            sent.append(figure)
    return sent


def slow(figures: list[tuple[int, float]], factor: float = 1.5) -> list[int]:
    """Who is slow, by member and own time."""
    detector = SlowMemberDetector(factor)
    detector.begin(1, sorted({member for member, _ in figures}))
    for now in (5.0, 8.0):
        for member, own_s in figures:
            detector.add(member, Figure(1, own_s, 1.0), now)
    return [item.member for item in detector.slow]


def test_figure_is_the_median_of_the_time_in_which_a_member_does_not_wait() -> None:
    sent = figures(20 * [0.02], 0.1)
    assert len(sent) == 1
    assert sent[0].own_s == pytest.approx(0.02)
    assert sent[0].step_s == pytest.approx(0.1)


def test_nothing_is_told_of_few_steps_unless_they_are_long() -> None:
    assert not figures(19 * [0.02], 0.1)
    assert not figures(4 * [11.0], 16.0)
    assert figures(5 * [11.0], 16.0)[0].own_s == pytest.approx(11.0)


def test_figure_has_the_part_in_which_a_member_waits_for_its_data() -> None:
    pace, sent = Pace(1), []
    for number in range(21):
        sent.append(pace.step(100.0 + 0.1 * number, 0.02 * number, number + 1, 0.03 * number))
    (figure,) = filter(None, sent)
    assert (figure.own_s, figure.data_s) == (pytest.approx(0.08), pytest.approx(0.03))


def test_slow_member_that_waits_for_its_data_is_named_as_that() -> None:
    detector = SlowMemberDetector(1.5)
    detector.begin(1, (0, 1))
    for now in (5.0, 8.0):
        detector.add(0, Figure(1, 0.010, 1.0, 0.001), now)
        detector.add(1, Figure(1, 0.060, 1.0, 0.040), now)
    assert [(item.member, item.data_s) for item in detector.slow] == [(1, 0.040)]
    by_data, by_itself = SlowRank(1, "a", 0.06, 0.01, 0.0, 0.04), SlowRank(1, "a", 0.06, 0.01, 0.0, 0.02)
    assert (by_data.waits_for_data, by_itself.waits_for_data) == (True, False)
    assert "takes 60 ms, of which it waits 40 ms for data; that of the other ranks" in str(by_data)
    assert "takes 60 ms; that of the other ranks, which wait for it, takes 10 ms" in str(by_itself)


def test_pauses_in_some_steps_change_nothing() -> None:
    (figure, *_) = figures([*9 * [3.0], *11 * [0.02]], 0.1)
    assert figure.own_s == pytest.approx(0.02)


def test_figure_is_told_once_a_second() -> None:
    assert len(figures(70 * [0.03125], 0.125)) == 1 + 50 // 8


def test_what_follows_a_step_without_an_operation_is_the_same_step() -> None:
    pace = Pace(1)
    sent = []
    for number in range(40):
        now = 100.0 + number // 2  # commit() after check_host_updates(), say
        sent.append(pace.step(now, 0.0, 1 + number // 2))
    assert all(figure is None for figure in sent)


def test_member_that_takes_much_longer_than_the_others_is_slow() -> None:
    assert slow([(0, 0.01), (1, 0.05), (2, 0.012)]) == [1]
    assert slow([(0, 0.05), (1, 0.01)]) == [0]
    assert slow([(0, 0.01), (1, 0.05), (2, 0.07), (3, 0.011)]) == [2, 1]


def test_nobody_is_slow_where_all_are_or_where_it_is_not_much() -> None:
    assert slow([(0, 0.05), (1, 0.06), (2, 0.055)]) == []
    assert slow([(0, 0.001), (1, 0.009), (2, 0.001)]) == []  # ten times as long, and no 10 ms
    assert slow([(0, 1.0), (1, 1.4), (2, 1.0)]) == []
    assert slow([(0, 1.0), (1, 1.4), (2, 1.0)], factor=1.2) == [1]
    assert slow([(0, 5.0)]) == []


def test_nothing_is_known_until_all_have_told_and_of_another_world_nothing_counts() -> None:
    detector = SlowMemberDetector()
    detector.begin(2, (0, 1))
    assert not detector.add(0, Figure(2, 0.01, 0.1), 1.0)
    assert not detector.add(1, Figure(1, 0.09, 0.1), 2.0)
    assert not detector.add(7, Figure(2, 0.09, 0.1), 2.0)
    assert detector.slow == []
    assert not detector.add(1, Figure(2, 0.09, 0.1), 3.0)
    assert detector.add(1, Figure(2, 0.09, 0.1), 6.0)
    assert [(item.member, item.since) for item in detector.slow] == [(1, 3.0)]
    detector.begin(3, (0, 1))
    assert detector.slow == []


def test_member_is_slow_after_three_seconds_in_a_row_and_stays_so_as_long() -> None:
    detector = SlowMemberDetector()
    detector.begin(1, (0, 1))
    detector.add(0, Figure(1, 0.01, 0.1), 0.0)
    for now in (1.0, 3.9):
        assert not detector.add(1, Figure(1, 0.09, 0.1), now)
    assert not detector.add(1, Figure(1, 0.01, 0.1), 3.95)
    for now in (4.5, 7.4):
        assert not detector.add(1, Figure(1, 0.09, 0.1), now)
    assert detector.add(1, Figure(1, 0.09, 0.1), 7.5)
    assert [(item.member, item.since) for item in detector.slow] == [(1, 4.5)]
    for now in (8.0, 10.9):
        assert detector.add(1, Figure(1, 0.01, 0.1), now) is (now == 8.0), "its figure has changed"
        assert detector.slow
    assert detector.add(1, Figure(1, 0.01, 0.1), 11.0)
    assert detector.slow == []


def test_slow_member_is_told_again_when_its_figure_changes_much_and_since_when_stays() -> None:
    detector = SlowMemberDetector()
    detector.begin(1, (0, 1))
    detector.add(0, Figure(1, 0.01, 0.1), 1.0)
    detector.add(1, Figure(1, 0.09, 0.1), 2.0)
    assert detector.add(1, Figure(1, 0.09, 0.1), 5.0)
    assert not detector.add(1, Figure(1, 0.091, 0.1), 6.0)
    assert detector.add(1, Figure(1, 0.2, 0.2), 7.0)
    assert [(item.own_s, item.since) for item in detector.slow] == [(0.2, 2.0)]
    for now in (8.0, 20.0):
        detector.add(1, Figure(1, 0.019, 0.1), now)
    assert detector.slow, "9 ms more than the others: it is not let go for a hair's breadth"


@settings(deadline=None)
@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=8), st.floats(1.01, 100.0))
def test_no_more_than_half_are_slow(own_s: list[float], factor: float) -> None:
    assert len(slow(list(enumerate(own_s)), factor)) <= len(own_s) // 2


def test_figure_survives_the_way_and_what_is_none_is_refused() -> None:
    assert Figure.decoded(Figure(3, 0.25, 0.5, 0.125).encoded()) == Figure(3, 0.25, 0.5, 0.125)
    for data in (b"", b"[]", b'{"generation": 1}', b'{"generation": "x", "own_s": 1, "step_s": 1}'):
        with pytest.raises((ValueError, TypeError, KeyError)):
            Figure.decoded(data)


def test_nobody_is_slow_in_a_process_of_no_elastic_job() -> None:
    assert slow_ranks() == []


# Replacement


def running(spares: int) -> Membership:
    membership = Membership(Limits(2, 2, 2, spares=spares))
    membership.hosts_are({"a": 2}, 0.0)
    for member in range(2):
        membership.request(member, 0, 0.0)
    return membership


def test_spare_that_is_ready_takes_the_place_of_a_member_that_is_evicted() -> None:
    membership = running(spares=1)
    assert membership.evict(1, 10.0) == [], "the spare is not ready"
    membership.request(2, 0, 10.0)
    assert membership.evict(2, 10.0) == [], "it is in no world"
    assert membership.evict(1, 11.0) == [Notify(1)]
    assert membership.evict(0, 11.0) == [], "the world changes already"
    membership.request(0, 1, 11.1, connected=True, progressed=True)
    actions = membership.request(1, 1, 11.1, connected=True, progressed=True)
    assert [action.members for action in actions if isinstance(action, Form)] == [(0, 2)]
    assert membership.leaves_by(1) == "one"
    assert membership.ended(1, ExitKind.WELL, 11.2) == []


def test_nobody_is_evicted_from_a_world_of_one() -> None:
    membership = Membership(Limits(1, 1, 1, spares=1))
    membership.hosts_are({"a": 1}, 0.0)
    for member in range(2):
        membership.request(member, 0, 0.0)
    assert membership.evict(0, 10.0) == []
    assert not membership.all_are_leaving


def test_nobody_is_evicted_without_a_spare_or_from_a_world_that_has_lost_somebody() -> None:
    assert running(spares=0).evict(1, 10.0) == []
    membership = running(spares=1)
    membership.request(2, 0, 10.0)
    membership.ended(0, ExitKind.LOST, 10.0)
    assert membership.evict(1, 10.0) == []
