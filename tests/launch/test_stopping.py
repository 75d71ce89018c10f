"""Which signals end the ranks of a job, and when."""

from __future__ import annotations

from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM

import pytest

from polyhvd.launch.job.stopping import Stopping

GRACE_S = 30.0
KILL_AGENTS = 0


def test_signals_follow_one_another_until_agents_are_killed() -> None:
    stopping = Stopping(GRACE_S)
    assert stopping.receive(SIGINT, 100.0)
    assert list(stopping.take_due(100.0)) == [SIGINT]
    assert stopping.next_at() == 105.0
    assert list(stopping.take_due(105.0)) == [SIGTERM]
    assert list(stopping.take_due(134.9)) == []
    assert list(stopping.take_due(140.0)) == [SIGKILL, KILL_AGENTS]
    assert stopping.next_at() == float("inf")


def test_second_interrupt_kills_at_once() -> None:
    stopping = Stopping(GRACE_S)
    stopping.receive(SIGINT, 100.0)
    assert not stopping.receive(SIGINT, 100.1)
    assert stopping.at_once
    assert list(stopping.take_due(100.1)) == [SIGKILL]


@pytest.mark.parametrize(("after_s", "kills"), [(0.5, False), (1.5, True)])
def test_same_signal_counts_as_impatience_only_after_a_second(after_s: float, kills: bool) -> None:
    stopping = Stopping(GRACE_S)
    stopping.receive(SIGTERM, 100.0)
    stopping.receive(SIGTERM, 100.0 + after_s)
    assert stopping.at_once == kills


def test_termination_after_a_hangup_is_sent_without_its_grace() -> None:
    stopping = Stopping(GRACE_S)
    stopping.receive(SIGHUP, 100.0)
    assert list(stopping.take_due(100.0)) == [SIGHUP]
    assert not stopping.receive(SIGTERM, 100.1)
    assert not stopping.at_once
    assert list(stopping.take_due(100.1)) == [SIGTERM]


def test_earliest_failure_stops_the_others() -> None:
    stopping = Stopping(GRACE_S)
    stopping.plan_after_failure(101.0)
    stopping.plan_after_failure(100.1)
    stopping.plan_after_failure(102.0)
    assert stopping.next_at() == 100.1
    assert not stopping.is_due_after_failure(100.0)
    assert stopping.is_due_after_failure(100.1)
    stopping.begin(SIGTERM, 100.1)
    assert not stopping.is_due_after_failure(200.0)
    assert not stopping.receive(SIGTERM, 101.0), "a signal from outside does not begin it a second time"
