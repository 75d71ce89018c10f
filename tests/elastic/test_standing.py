"""The state of each slot of an elastic job, and the sentence that says what the job does now and why."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_membership import LIMITS, Course, ask_all, running, started

from polyhvd.elastic.membership import ExitKind, Limits, Membership
from polyhvd.elastic.standing import Doing, SlotState, decide, lasting, slot_states


def sentence(membership: Membership, now: float) -> str:
    decision = decide(membership.standing(now))
    return f"{decision.does.value}: {decision.sentence(now)}"


def states(membership: Membership, now: float) -> list[str]:
    return [state.value for *_, state in slot_states(membership.standing(now))]


def starts() -> Membership:
    membership = Membership(Limits(2, 2, 2))
    membership.hosts_are({"a": 1, "b": 1}, 0.0)
    membership.request(0, 0, 1.0)
    return membership


def test_start_waits_for_processes_that_have_not_come_to_init() -> None:
    assert sentence(starts(), 4.0) == "starts: waits for process 1 on b: it has been starting for 4 s"
    assert states(starts(), 4.0) == ["ready", "starting"]
    assert decide(starts().standing(4.0)).is_healthy_start


def test_start_after_a_failure_names_the_failure() -> None:
    membership = starts()
    membership.ended(1, ExitKind.KILLED, 2.0, why="process 1 on b was killed by SIGKILL")
    assert sentence(membership, 3.0) == (
        "starts: waits for process 2 on b: it has been starting for 1 s "
        "(process 1 on b was killed by SIGKILL)"
    )
    assert not decide(membership.standing(3.0)).is_healthy_start


def test_world_trains_as_a_generation() -> None:
    membership = running(Limits(2, 1, 2, spares=1), {"a": 2})
    assert sentence(membership, 5.0) == "trains: trains as generation 1, 2 ranks"
    assert states(membership, 5.0) == ["training", "training", "ready"]


def test_loss_waits_for_the_others_to_leave_the_world() -> None:
    membership = running(Limits(3, 2, 3), {"a": 3})
    membership.ended(1, ExitKind.LOST, 10.0, why="process 1 on a was killed by SIGSEGV")
    assert sentence(membership, 10.0) == (
        "waits: waits for process 0 (rank 0) on a: it has not left generation 1; "
        "process 2 (rank 1) on a: it has not left generation 1"
    )
    assert decide(membership.standing(10.0)).reason == "generation 1 has lost 1 process"
    ask_all(membership, (0,), 1, 11.0)
    assert sentence(membership, 15.0) == (
        "waits: waits for process 2 (rank 1) on a: it has not left generation 1 for 4 s"
    )
    assert states(membership, 15.0) == ["arrived", "starting", "training"]


def test_process_that_others_have_seen_dead_is_dying() -> None:
    membership = running(Limits(2, 2, 2), {"a": 2})
    membership.request(0, 1, 11.0, connected=True, dead=[1])
    assert states(membership, 12.0) == ["arrived", "dying"]
    assert sentence(membership, 12.0) == (
        "waits: waits for process 1 (rank 1) on a: it has died, and its agent has not reported it for 1 s"
    )


def short() -> Membership:
    """Two of two are wanted; one is left, and the slot of the other rests for 4 s from 10 on."""
    membership = running(Limits(2, 2, 2, cooldown_s=(4.0, 10.0), timeout_s=60.0), {"a": 2})
    membership.ended(1, ExitKind.LOST, 10.0, why="process 1 on a was killed by SIGSEGV")
    ask_all(membership, (0,), 1, 10.0)
    return membership


def test_shortage_waits_for_a_slot_that_rests_and_says_when_the_job_ends() -> None:
    membership = short()
    assert states(membership, 11.0) == ["arrived", "cooling"]
    decision = decide(membership.standing(11.0))
    assert decision.sentence(11.0) == (
        "waits for slot 1 of a: it is not used after 1 failure for 3 s more "
        "(process 1 on a was killed by SIGSEGV)"
    )
    assert (decision.does, decision.until) == (Doing.WAITS, 70.0)
    assert decision.reason == "1 process of at least 2 is ready"
    assert not decision.is_healthy_start


def test_slot_that_has_rested_is_free_and_then_starts() -> None:
    membership = short()
    assert states(membership, 14.0) == ["arrived", "free"]
    assert sentence(membership, 14.0) == "waits: waits for slot 1 of a: its next process is about to start"
    membership.time_is(14.0)
    assert states(membership, 14.0) == ["arrived", "starting"]


def test_shortage_waits_for_a_spare_that_starts() -> None:
    membership = running(Limits(2, 2, 2), {"a": 2})
    membership.limits = Limits(2, 2, 2, spares=1)
    assert started(membership.time_is(1.0)) == [2]
    membership.ended(1, ExitKind.LOST, 9.0)
    membership.request(0, 1, 9.0, connected=True, progressed=True)
    assert sentence(membership, 9.0).startswith(
        "waits: waits for spare process 2 on a: it has been starting for 8 s"
    )


def test_shortage_without_a_slot_waits_for_hosts() -> None:
    membership = Membership(Limits(2, 2, 2))
    membership.hosts_are({"a": 1}, 0.0)
    membership.request(0, 0, 1.0)
    assert sentence(membership, 2.0) == "starts: waits for more hosts: the hosts have 1 slot"


def test_unfit_host_is_named_once_with_its_reason() -> None:
    membership = Membership(Limits(2, 2, 2))
    membership.hosts_are({"a": 1, "b": 2}, 0.0)
    membership.request(0, 0, 1.0)
    membership.host_unfit("b", 1.0, why="no space in /dev/shm")
    said = "starts: waits for b: it is unfit, and not tried for 4 s more (no space in /dev/shm)"
    assert sentence(membership, 2.0) == said
    assert states(membership, 2.0) == ["ready", "unfit", "unfit"]


def test_member_that_leaves_changes_the_world_at_the_next_commit() -> None:
    membership = running(Limits(3, 2, 3), {"a": 3})
    membership.leaves([1], 5.0)
    assert sentence(membership, 6.0) == (
        "changes: changes its world at the next commit, since process 1 (rank 1) on a leaves"
    )
    assert states(membership, 6.0) == ["training", "leaving", "training"]
    ask_all(membership, (0, 1, 2), 1, 7.0)
    assert states(membership, 7.0) == ["training", "ending", "training"]
    membership.ended(1, ExitKind.WELL, 8.0)
    assert states(membership, 8.0) == ["training", "empty", "training"]


def test_newcomer_changes_the_world_and_joins_it() -> None:
    membership = running(Limits(3, 2, 3), {"a": 3})
    membership.ended(1, ExitKind.LOST, 10.0)
    ask_all(membership, (0, 2), 1, 10.0)
    membership.time_is(11.0)
    membership.request(3, 0, 12.0)
    assert (
        sentence(membership, 12.0)
        == "changes: changes its world at the next commit, since process 3 on a joins"
    )
    for number in (0, 2):
        membership.request(number, 2, 13.0, connected=True, progressed=True, commit=(1, 0))
    assert states(membership, 14.0) == ["training", "joining", "training"]
    assert sentence(membership, 17.0) == (
        "waits: waits for process 3 (rank 2) on a: it has not reached its elastic function for 4 s"
    )
    membership.begins(3)
    assert states(membership, 17.0) == ["training", "training", "training"]
    assert sentence(membership, 17.0) == "trains: trains as generation 3, 3 ranks"


def test_newcomer_that_is_given_up_leaves_its_slot_empty() -> None:
    membership = running(Limits(3, 2, 3, timeout_s=20.0), {"a": 3})
    membership.ended(1, ExitKind.LOST, 10.0)
    ask_all(membership, (0, 2), 1, 10.0)
    membership.time_is(11.0)
    membership.request(3, 0, 12.0)
    for number in (0, 2):
        membership.request(number, 2, 13.0, connected=True, progressed=True, commit=(1, 0))
    membership.time_is(40.0)
    at = membership.standing(40.0)
    assert states(membership, 40.0) == ["training", "empty", "training"]
    assert "has not reached its elastic function within 20 s" in at.slots["a", 1].why


def test_job_that_everybody_leaves_waits_for_each() -> None:
    membership = running(Limits(2, 1, 2), {"a": 2})
    membership.all_leave(5.0)
    assert sentence(membership, 6.0) == (
        "leaves: ends with notice; waits for process 0 (rank 0) on a: it has not left; "
        "process 1 (rank 1) on a: it has not left"
    )


def test_job_whose_ranks_are_done_waits_for_the_others_and_ends() -> None:
    membership = running(Limits(2, 1, 2), {"a": 2})
    membership.ended(0, ExitKind.WELL, 5.0)
    assert sentence(membership, 6.0) == (
        "finishes: finishes; waits for process 1 (rank 0) on a: it has not finished"
    )
    assert states(membership, 6.0) == ["done", "training"]
    membership.ended(1, ExitKind.WELL, 7.0)
    assert sentence(membership, 7.0) == "ends: ends"


def test_spare_of_a_host_that_is_gone_is_ending() -> None:
    membership = running(Limits(1, 1, 1, spares=1), {"a": 1})
    membership.hosts_are({"b": 1}, 5.0)
    assert states(membership, 5.0)[:2] == ["training", "ending"]


@pytest.mark.parametrize(("seconds", "text"), [(-1, "0 s"), (4.2, "4 s"), (600, "10 min"), (7300, "2 h")])
def test_durations_are_in_the_largest_unit_that_has_two_of_them(seconds: float, text: str) -> None:
    assert lasting(seconds) == text


@given(LIMITS, st.integers(1, 40), st.data())
@settings(max_examples=100, deadline=None)
def test_any_course_of_events_has_states_and_sentences_that_agree_with_the_membership(
    limits: Limits, steps: int, data: st.DataObject
) -> None:
    course = Course(limits)
    for _ in range(steps):
        if not course.ended:
            course.step(data)
        at = course.membership.standing(course.now)
        found = {member: state for *_, member, state in slot_states(at) if member is not None}
        assert found.keys() == at.members.keys(), "each process is in one slot"
        decision = decide(at)
        assert decision.sentence(course.now)
        if decision.does in (Doing.STARTS, Doing.WAITS):
            assert decision.waits, "a job that waits names what it waits for"
        if decision.does is Doing.TRAINS:
            assert {found[member] for member in course.membership.ranks} == {SlotState.TRAINING}


@given(LIMITS, st.integers(1, 40), st.data())
@settings(max_examples=100, deadline=None)
def test_decision_changes_by_events_and_when_the_membership_is_to_be_asked_again(
    limits: Limits, steps: int, data: st.DataObject
) -> None:
    course = Course(limits)
    for _ in range(steps):
        if not course.ended:
            course.step(data)
    due = min(course.membership.next_at(course.now), course.now + 1000.0)
    later = course.now + 0.999 * (due - course.now)
    assert decide(course.membership.standing(later)) == decide(course.membership.standing(course.now))
