"""Who is in the world of an elastic job: rules one by one, and what holds in any course of events."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhvd.elastic.membership import (
    Action,
    Dismiss,
    End,
    ExitKind,
    Finish,
    Form,
    Limits,
    Lose,
    Membership,
    Notify,
    Start,
)


def started(actions: list[Action]) -> list[int]:
    return [action.member for action in actions if isinstance(action, Start)]


def formed(actions: list[Action]) -> list[tuple[int, ...]]:
    return [action.members for action in actions if isinstance(action, Form)]


def ends(actions: list[Action]) -> list[End]:
    return [action for action in actions if isinstance(action, End)]


def running(limits: Limits, hosts: dict[str, int]) -> Membership:
    """A job whose first world is formed at time 0."""
    membership = Membership(limits)
    actions: list[Action] = []
    for number in started(membership.hosts_are(hosts, 0.0)):
        actions += membership.request(number, 0, 0.0)
    assert formed(actions)
    return membership


def ask_all(membership: Membership, members: tuple[int, ...], after: int, now: float) -> list[Action]:
    actions: list[Action] = []
    for member in members:
        actions += membership.request(member, after, now, connected=True, progressed=True)
    return actions


def test_a_host_that_has_fewer_slots_keeps_the_processes_that_are_ready() -> None:
    membership = Membership(Limits(4, 1, 4))
    assert started(membership.hosts_are({"a": 4}, 0.0)) == [0, 1, 2, 3]
    membership.request(1, 0, 1.0)
    membership.request(3, 0, 1.0)
    assert membership.hosts_are({"a": 3}, 2.0) == [Dismiss(0)]
    assert membership.ended(0, ExitKind.LOST, 3.0) == []
    assert membership.hosts_are({"a": 2}, 4.0) == [Dismiss(2), Form(1, (1, 3), ("a", "a"))]
    assert membership.ended(2, ExitKind.LOST, 5.0) == []
    assert membership.time_is(60.0) == [], "slot 0 is not used: the host has two processes"
    assert started(membership.hosts_are({"a": 3}, 61.0)) == [4]


def test_first_world_waits_for_as_many_as_were_asked_for() -> None:
    membership = Membership(Limits(3, 2, 3))
    assert started(membership.hosts_are({"a": 3}, 0.0)) == [0, 1, 2]
    assert membership.request(0, 0, 1.0) == []
    assert membership.request(2, 0, 1.0) == []
    assert membership.request(1, 0, 1.0) == [Form(1, (0, 1, 2), ("a", "a", "a"))]


def test_first_world_is_smaller_where_hosts_have_fewer_slots() -> None:
    membership = Membership(Limits(3, 2, 3))
    assert started(membership.hosts_are({"a": 2}, 0.0)) == [0, 1]
    membership.request(0, 0, 0.0)
    assert formed(membership.request(1, 0, 0.0)) == [(0, 1)]


def test_survivors_go_on_without_the_lost_and_have_the_machine_to_themselves_for_a_moment() -> None:
    membership = running(Limits(3, 2, 3), {"a": 3})
    assert membership.ended(1, ExitKind.LOST, 10.0) == [Lose(1, 1)]
    assert ask_all(membership, (0,), 1, 10.0) == []
    assert formed(ask_all(membership, (2,), 1, 10.0)) == [(0, 2)]
    assert membership.next_at(10.0) == 10.5
    assert membership.time_is(10.4) == []
    assert membership.time_is(10.5) == [Start(3, "a", 1)]


def test_lost_member_is_replaced_at_once_where_the_others_are_too_few() -> None:
    membership = running(Limits(3, 3, 3), {"a": 3})
    assert membership.ended(1, ExitKind.LOST, 10.0) == [Lose(1, 1), Start(3, "a", 1)]


def test_spare_takes_the_place_and_ranks_stay_with_the_oldest() -> None:
    membership = Membership(Limits(3, 2, 3, spares=1))
    assert started(membership.hosts_are({"a": 3}, 0.0)) == [0, 1, 2, 3]
    assert ask_all(membership, (3, 1), 0, 0.0) == []
    assert formed(membership.request(0, 0, 0.0)) == [(0, 1, 3)]  # the first that are ready
    membership = Membership(Limits(3, 2, 3, spares=1))
    membership.hosts_are({"a": 3}, 0.0)
    for number in range(4):
        membership.request(number, 0, 0.0)
    membership.ended(0, ExitKind.LOST, 10.0)
    assert formed(ask_all(membership, (1, 2), 1, 10.0)) == [(1, 2, 3)]


def test_spares_in_slots_are_started_where_the_world_leaves_some_empty() -> None:
    limits = Limits(2, 2, 2, spares_in_slots=1)
    assert started(Membership(limits).hosts_are({"a": 2}, 0.0)) == [0, 1]
    membership = running(limits, {"a": 2, "b": 2})
    assert membership.ranks == [0, 1]
    assert started(membership.ended(1, ExitKind.KILLED, 10.0)) == []
    assert formed(ask_all(membership, (0,), 1, 10.0)) == [(0, 2)]
    assert started(membership.time_is(11.0)) == [3], "the next spare"


def test_newcomer_is_admitted_when_the_world_comes_to_a_boundary() -> None:
    membership = running(Limits(3, 2, 3), {"a": 3})
    membership.ended(1, ExitKind.LOST, 10.0)
    ask_all(membership, (0, 2), 1, 10.0)
    assert started(membership.time_is(11.0)) == [3]
    assert membership.request(3, 0, 12.0) == [Notify(2)]
    assert membership.request(0, 2, 12.1, connected=True, progressed=True) == []
    assert formed(membership.request(2, 2, 12.1, connected=True, progressed=True)) == [(0, 2, 3)]


def test_slot_rests_longer_with_each_failure_and_its_host_does_not() -> None:
    membership = running(Limits(2, 1, 2, cooldown_s=(4.0, 10.0)), {"a": 2})
    assert started(membership.ended(1, ExitKind.LOST, 10.0)) == []
    ask_all(membership, (0,), 1, 10.0)
    assert membership.next_at(10.0) == 14.0
    assert membership.time_is(14.0) == [Start(2, "a", 1)]
    assert started(membership.ended(2, ExitKind.LOST, 15.0)) == []
    assert membership.next_at(15.0) == 23.0
    assert membership.time_is(23.0) == [Start(3, "a", 1)]
    assert started(membership.ended(3, ExitKind.LOST, 24.0)) == []
    assert membership.next_at(24.0) == 34.0  # at most
    assert started(membership.ended(0, ExitKind.LOST, 25.0)) == []  # its slot rests for 4 s
    assert membership.time_is(29.0) == [Start(4, "a", 0)]


def kill_and_replace(membership: Membership, exit_kind: ExitKind, *, progressed: bool) -> list[float]:
    """Lose the last rank of a world of two, ten times, four seconds apart: how long each slot rests."""
    world, waits = (0, 1), []
    for generation in range(1, 11):
        now = 4.0 * generation
        actions = membership.request(world[0], generation, now, connected=True, progressed=progressed)
        actions += membership.ended(world[1], exit_kind, now)
        while not started(actions):
            due = membership.next_at(now)
            actions += membership.time_is(due)
            now = due
        waits.append(now - 4.0 * generation)
        (new_member,) = started(actions)
        (world,) = formed(membership.request(new_member, 0, now))
    return waits


def test_slot_whose_ranks_are_killed_in_worlds_that_get_on_does_not_rest() -> None:
    waits = kill_and_replace(running(Limits(2, 2, 2), {"a": 2}), ExitKind.KILLED, progressed=True)
    assert max(waits) == 0.0


@pytest.mark.parametrize("limits", [Limits(2, 2, 2), Limits(2, 2, 2, cooldown_s=(1.0, 60.0))])
def test_slot_that_crashes_rests_though_its_worlds_get_on(limits: Limits) -> None:
    waits = kill_and_replace(running(limits, {"a": 2}), ExitKind.LOST, progressed=True)
    assert waits[-1] == 60.0


def test_rest_that_the_user_asks_for_holds_for_kills_as_well() -> None:
    limits = Limits(2, 2, 2, cooldown_s=(1.0, 60.0))
    waits = kill_and_replace(running(limits, {"a": 2}), ExitKind.KILLED, progressed=True)
    assert waits[:3] == [1.0, 2.0, 4.0]


def test_slot_of_a_killed_rank_is_free_once_a_survivor_says_that_the_world_got_on() -> None:
    membership = running(Limits(2, 1, 2), {"a": 2})
    membership.ended(1, ExitKind.KILLED, 10.0)
    ask_all(membership, (0,), 1, 10.0)
    (new_member,) = started(membership.time_is(11.0))
    assert membership.request(new_member, 0, 12.0) == [Notify(2)]
    assert formed(ask_all(membership, (0,), 2, 12.0)) == [(0, new_member)]
    membership.ended(new_member, ExitKind.KILLED, 20.0)
    assert membership.next_at(20.0) == 21.0, "the second failure, for all that is known"
    membership.request(0, 3, 20.0, connected=True, progressed=True)
    assert membership.next_at(20.0) == 20.5, "others have the machine to themselves until then"
    assert started(membership.time_is(20.5)) == [3]


def test_spares_are_dismissed_when_all_ranks_have_left_one_by_one() -> None:
    membership = Membership(Limits(1, 1, 1, spares=2))
    assert started(membership.hosts_are({"a": 1}, 0.0)) == [0, 1, 2]
    membership.request(0, 0, 1.0)
    membership.request(1, 0, 1.0)
    actions = membership.leaves([0], 2.0)
    assert [item for item in actions if isinstance(item, Dismiss)] == [Dismiss(1), Dismiss(2)]
    assert membership.request(2, 0, 2.5) == [Dismiss(2)], "it was still starting"
    assert membership.request(0, 1, 3.0) == [Dismiss(0)]
    membership.ended(1, ExitKind.WELL, 3.0)
    membership.ended(2, ExitKind.WELL, 3.0)
    (end,) = ends(membership.ended(0, ExitKind.WELL, 3.0))
    assert end.resumable


def test_nobody_is_blamable_of_worlds_that_are_long_gone() -> None:
    membership = running(Limits(2, 2, 2), {"a": 2})
    kill_and_replace(membership, ExitKind.KILLED, progressed=True)
    assert membership.blamable == set()


def test_first_failure_of_a_slot_costs_nothing_unless_the_user_says_so() -> None:
    limits = Limits(2, 1, 2)
    assert [limits.cooldown_after(failures) for failures in (1, 2, 3, 4, 99)] == [0.0, 1.0, 2.0, 4.0, 60.0]


def test_too_few_for_too_long_ends_the_job_which_can_be_resumed() -> None:
    membership = running(Limits(2, 2, 2, timeout_s=30.0, cooldown_s=(100.0, 100.0)), {"a": 2})
    membership.ended(1, ExitKind.LOST, 10.0)
    assert formed(ask_all(membership, (0,), 1, 11.0)) == []
    assert membership.shortage == ""
    assert membership.next_at(11.0) == 13.0
    assert membership.time_is(13.0) == []
    assert membership.next_at(13.0) == 40.0
    assert membership.shortage == "1 process is left, fewer than --min-np 2"
    assert membership.time_is(40.0) == [Dismiss(0)]
    assert membership.leaves_by(0) == "all"
    (end,) = ends(membership.ended(0, ExitKind.WELL, 41.0))
    assert end.resumable
    assert "1 process is left, fewer than --min-np 2, and no more have appeared within 30 s" in end.reason
    assert membership.over


def short_of_slots() -> Membership:
    """A job of three that trains, 30 s after the list of hosts has become too short."""
    membership = running(Limits(3, 2, 3, timeout_s=30.0), {"a": 1, "b": 2})
    assert membership.hosts_are({"a": 1}, 10.0) == []
    assert membership.time_is(13.0) == []
    assert membership.shortage == "the hosts have 1 slot, fewer than --min-np 2"
    assert membership.time_is(40.0) == [Notify(1)]
    return membership


def test_members_that_train_are_asked_to_leave_where_slots_are_too_few_for_too_long() -> None:
    membership = short_of_slots()
    assert ask_all(membership, (0, 1, 2), 1, 41.0) == [Dismiss(0), Dismiss(1), Dismiss(2)]
    assert ends(membership.ended(0, ExitKind.WELL, 42.0)) == []
    membership.ended(1, ExitKind.WELL, 42.0)
    (end,) = ends(membership.ended(2, ExitKind.WELL, 42.0))
    assert end.resumable
    assert end.reason.startswith("the hosts have 1 slot, fewer than --min-np 2, and no more have appeared")


def test_members_that_do_not_leave_are_ended_after_a_time() -> None:
    membership = short_of_slots()
    assert membership.next_at(40.0) == 70.0
    (end,) = ends(membership.time_is(70.0))
    assert end.resumable


def test_members_with_notice_that_their_own_handler_ends_have_left_and_not_finished() -> None:
    membership = running(Limits(2, 1, 2), {"a": 2})
    membership.host_leaves("a", 5.0)
    assert membership.ended(0, ExitKind.WELL, 5.1, is_within=True) == []
    (end,) = ends(membership.ended(1, ExitKind.WELL, 5.1, is_within=True))
    assert end.resumable
    membership = running(Limits(2, 1, 2), {"a": 1, "b": 1})
    membership.host_leaves("b", 5.0)
    membership.ended(1, ExitKind.WELL, 5.1, is_within=True)
    assert started(membership.hosts_are({"a": 2}, 6.0)), "the job continues and takes new slots"


def test_job_that_reaches_its_end_while_its_members_are_to_leave_is_done() -> None:
    membership = short_of_slots()
    for member in (0, 1):
        assert membership.ended(member, ExitKind.WELL, 41.0) == []
    assert membership.ended(2, ExitKind.WELL, 41.0) == [Finish()]


def test_member_that_leaves_before_the_end_leaves_the_job_unfinished_though_another_has_ended() -> None:
    membership = short_of_slots()
    assert membership.ended(0, ExitKind.WELL, 41.0) == []  # by itself
    assert ask_all(membership, (1, 2), 1, 41.0) == [Dismiss(1), Dismiss(2)]
    membership.ended(1, ExitKind.WELL, 42.0)
    (end,) = ends(membership.ended(2, ExitKind.WELL, 42.0))
    assert end.resumable


def test_last_member_does_not_wait_without_limit_where_no_host_is_left() -> None:
    membership = running(Limits(2, 1, 2, timeout_s=30.0), {"a": 2})
    membership.ended(0, ExitKind.WELL, 1.0)
    membership.hosts_are({}, 2.0)
    assert formed(ask_all(membership, (1,), 1, 3.0)) == []
    assert membership.next_at(5.0) == 32.0
    assert Dismiss(1) in membership.time_is(32.0)
    (end,) = ends(membership.ended(1, ExitKind.WELL, 33.0))
    assert end.resumable


def test_list_that_is_long_enough_again_in_time_is_forgotten() -> None:
    membership = running(Limits(3, 2, 3, timeout_s=30.0), {"a": 1, "b": 2})
    membership.hosts_are({"a": 1}, 10.0)
    membership.time_is(38.0)
    assert membership.shortage
    membership.hosts_are({"a": 1, "b": 2}, 39.0)
    assert membership.shortage == ""
    assert membership.time_is(41.0) == []


def test_state_is_lost_where_none_of_the_next_world_has_committed() -> None:
    membership = running(Limits(2, 1, 2), {"a": 2})
    membership.progress()
    for member in (0, 1):
        membership.ended(member, ExitKind.KILLED, 10.0)
    actions = [*membership.request(2, 0, 11.0), *membership.request(3, 0, 11.0)]
    assert actions == [Form(2, (2, 3), ("a", "a"), state_lost=True)]
    # It is reported once: the job has begun with nothing again.
    for member in (2, 3):
        membership.ended(member, ExitKind.KILLED, 20.0)
    assert started(membership.time_is(100.0)) == [4, 5]
    actions = [*membership.request(4, 0, 101.0), *membership.request(5, 0, 101.0)]
    assert actions == [Form(3, (4, 5), ("a", "a"))]


@pytest.mark.parametrize("commits", [-1, 0, 7])
def test_state_is_kept_by_a_survivor_though_it_has_committed_less_than_the_lost(commits: int) -> None:
    membership = running(Limits(2, 1, 2), {"a": 2})
    membership.progress()
    membership.ended(1, ExitKind.KILLED, 10.0)
    actions = membership.request(0, 1, 10.0, connected=True, commit=(1, commits))
    (form,) = [action for action in actions if isinstance(action, Form)]
    assert not form.state_lost


def test_programs_that_end_well_without_a_world_are_not_started_again() -> None:
    membership = Membership(Limits(2, 2, 4))
    first = started(membership.hosts_are({"a": 4}, 0.0))
    for member in first[:-1]:
        assert membership.ended(member, ExitKind.WELL, 1.0) == []
    assert membership.ended(first[-1], ExitKind.WELL, 1.0) == [Finish()]


def test_failure_of_the_program_s_own_ends_the_job() -> None:
    membership = running(Limits(2, 1, 2), {"a": 2})
    assert membership.ended(1, ExitKind.FAILED, 10.0) == [End("", 1)]


def test_program_that_cannot_be_started_ends_the_job() -> None:
    membership = Membership(Limits(2, 1, 2))
    membership.hosts_are({"a": 2}, 0.0)
    assert membership.ended(0, ExitKind.UNSTARTABLE, 0.0) == [End("", 0)]


def test_two_worlds_in_a_row_that_fail_before_a_commit_end_the_job_with_the_first_cause() -> None:
    membership = running(Limits(3, 1, 3), {"a": 3})
    membership.ended(2, ExitKind.LOST, 1.0)
    membership.request(0, 1, 1.0, connected=True)
    assert formed(membership.request(1, 1, 1.0, connected=True)) == [(0, 1)]
    membership.ended(1, ExitKind.LOST, 2.0)
    (end,) = ends(membership.request(0, 2, 2.0, connected=True))
    assert (end.cause, end.resumable) == (2, False)
    assert end.reason == "2 worlds in a row have failed before a commit"


def kill_in_recoveries(kinds: list[ExitKind]) -> list[End]:
    """A world after the other loses its last member before anybody has committed; a spare takes the place."""
    membership = Membership(Limits(2, 2, 2, spares=1, cooldown_s=(0.0, 0.0)))
    membership.hosts_are({"a": 2}, 0.0)
    world: tuple[int, ...] = formed([a for number in range(3) for a in membership.request(number, 0, 0.0)])[0]
    found: list[End] = []
    for generation, exit_kind in enumerate(kinds, 1):
        new = [n for n in range(100) if membership.has(n) and n not in world]
        actions = membership.ended(world[1], exit_kind, float(generation))
        for number in (*new, *started(actions)):
            actions += membership.request(number, 0, float(generation))
        actions += membership.request(world[0], generation, float(generation), connected=True)
        found += ends(actions)
        if not found:
            (world,) = formed(actions)
    return found


def test_kills_from_outside_in_recoveries_do_not_end_the_job_before_there_are_many() -> None:
    assert kill_in_recoveries(9 * [ExitKind.KILLED]) == []
    (end,) = kill_in_recoveries(10 * [ExitKind.KILLED])
    assert end == End("10 worlds in a row have failed before a commit", 1)


def test_crashes_between_kills_end_the_job_with_the_first_of_them() -> None:
    (end,) = kill_in_recoveries([ExitKind.KILLED, ExitKind.LOST, ExitKind.KILLED, ExitKind.LOST])
    assert (end.cause, end.reason[:2]) == (2, "4 ")


def test_world_that_was_never_whole_does_not_count() -> None:
    membership = running(Limits(3, 1, 3), {"a": 3})
    membership.ended(2, ExitKind.LOST, 1.0)
    membership.request(0, 1, 1.0, connected=True)
    membership.request(1, 1, 1.0, connected=True)
    (new_member,) = started(membership.time_is(2.0))
    membership.request(new_member, 0, 200.0)
    membership.request(0, 2, 200.0, connected=True, progressed=True)
    assert formed(membership.request(1, 2, 200.0)) == [(0, 1, new_member)]
    assert membership.ended(new_member, ExitKind.LOST, 201.0)[0] == Lose(3, new_member)  # while it joins
    membership.request(0, 3, 301.0)
    assert formed(membership.request(1, 3, 301.0)) == [(0, 1)]


def test_world_that_got_on_does_not_wait_for_the_end_of_who_was_seen_dead() -> None:
    membership = Membership(Limits(3, 2, 3, spares=1))
    membership.hosts_are({"a": 3}, 0.0)
    for number in range(4):
        membership.request(number, 0, 0.0)
    assert membership.request(0, 1, 10.0, progressed=True, dead=[2]) == []
    assert membership.request(1, 1, 10.0) == [Form(2, (0, 1, 3), ("a", "a", "a"))]
    assert membership.staying == {0, 1, 2, 3}, "its slot is not free before it has ended"
    assert membership.ended(2, ExitKind.KILLED, 10.1) == []
    assert membership.replaced == 1
    assert membership.time_is(10.5) == [], "the others have the machine to themselves"
    assert membership.time_is(10.6) == [Start(4, "a", 2)]


def test_member_that_was_seen_dead_may_have_failed_of_its_own() -> None:
    membership = running(Limits(3, 2, 3), {"a": 3})
    membership.request(0, 1, 10.0, progressed=True, dead=[2])
    assert formed(membership.request(1, 1, 10.0, dead=[2])) == [(0, 1)]
    assert membership.ended(2, ExitKind.FAILED, 10.1) == [End("", 2)]


def test_member_that_was_seen_dead_may_be_done() -> None:
    membership = running(Limits(2, 1, 2), {"a": 2})
    assert formed(membership.request(0, 1, 10.0, progressed=True, dead=[1])) == [(0,)]
    assert membership.ended(1, ExitKind.WELL, 10.1) == []
    assert membership.time_is(99.0) == [], "nobody takes its place"
    assert membership.ended(0, ExitKind.WELL, 100.0) == [Finish()]


def test_a_loss_that_is_reported_after_the_end_is_counted() -> None:
    membership = running(Limits(3, 2, 3), {"a": 3})
    membership.request(0, 1, 10.0, progressed=True, dead=[2])
    assert formed(membership.request(1, 1, 10.0, dead=[2])) == [(0, 1)]
    membership.ended(0, ExitKind.WELL, 11.0)
    assert membership.ended(1, ExitKind.WELL, 11.0) == [Finish()]
    assert membership.finished_without(2)
    assert membership.replaced == 1
    assert not membership.finished_without(1)


@pytest.mark.parametrize(
    ("limits", "progressed"),
    [
        (Limits(3, 2, 3), False),  # whether it would recur depends on what it has died of
        (Limits(3, 3, 3), True),  # too few are left
        (Limits(3, 2, 3, reset_limit=0), True),  # and the job is to end of that
    ],
)
def test_end_of_who_was_seen_dead_is_waited_for_where_it_decides(limits: Limits, progressed: bool) -> None:
    membership = running(limits, {"a": 3})
    membership.request(0, 1, 10.0, progressed=progressed, dead=[2])
    assert membership.request(1, 1, 10.0, progressed=progressed, dead=[2]) == []
    actions = membership.ended(2, ExitKind.LOST, 10.1)
    assert actions[0] == Lose(1, 2)
    assert [type(action) for action in actions[1:]] in ([Form], [Start], [End])


def test_nobody_goes_on_for_survivors_who_are_lost_as_well() -> None:
    membership = Membership(Limits(3, 1, 3, spares=1))
    membership.hosts_are({"a": 3}, 0.0)
    for number in range(4):
        membership.request(number, 0, 0.0)
    assert membership.request(0, 1, 10.0, progressed=True, dead=[1]) == []
    assert formed(membership.ended(0, ExitKind.KILLED, 10.1)) == []
    assert formed(membership.ended(2, ExitKind.KILLED, 10.1)) == [], "no member that was in the world is left"
    assert formed(membership.ended(1, ExitKind.KILLED, 10.1)) == [(3,)], "the spare starts from the beginning"


def test_member_that_others_took_for_dead_is_dismissed_if_they_have_gone_on() -> None:
    membership = running(Limits(3, 2, 3), {"a": 3})
    membership.request(0, 1, 10.0, progressed=True, dead=[2])
    assert membership.request(2, 1, 10.0) == [], "they have not"
    assert formed(membership.request(1, 1, 10.0)) == [(0, 1, 2)]
    membership.request(0, 2, 20.0, progressed=True, dead=[2])
    assert formed(membership.request(1, 2, 20.0)) == [(0, 1)]
    assert membership.request(2, 2, 20.1) == [Dismiss(2)]
    assert membership.ended(2, ExitKind.WELL, 20.2) == [Start(3, "a", 2)]


def test_reset_limit_ends_the_job() -> None:
    membership = running(Limits(3, 1, 3, reset_limit=1), {"a": 3})
    membership.ended(2, ExitKind.LOST, 1.0)
    assert formed(ask_all(membership, (0, 1), 1, 1.0)) == [(0, 1)]
    membership.ended(1, ExitKind.LOST, 2.0)
    (end,) = ends(ask_all(membership, (0,), 2, 2.0))
    assert end == End("the world has changed 2 times, and --reset-limit is 1", 1)


def test_member_of_a_host_that_is_gone_leaves_at_a_boundary() -> None:
    membership = running(Limits(2, 1, 4), {"a": 2})
    assert started(membership.hosts_are({"a": 2, "b": 2}, 1.0)) == [2, 3]
    membership.request(2, 0, 2.0)
    assert membership.request(3, 0, 2.0) == [Notify(1)]
    assert formed(ask_all(membership, (0, 1), 1, 3.0)) == [(0, 1, 2, 3)]
    assert membership.hosts_are({"b": 2}, 4.0) == [Notify(2)]
    actions = ask_all(membership, (0, 1, 2, 3), 2, 5.0)
    assert formed(actions) == [(2, 3)]
    assert [action for action in actions if isinstance(action, Dismiss)] == [Dismiss(0), Dismiss(1)]
    assert membership.ended(0, ExitKind.WELL, 6.0) == []


def test_job_is_done_when_all_of_its_world_are_and_spares_end_then() -> None:
    membership = running(Limits(2, 1, 2, spares=1), {"a": 2})
    assert membership.ended(0, ExitKind.WELL, 1.0) == []
    assert membership.ended(1, ExitKind.WELL, 2.0) == [Finish()]
    assert membership.over


def test_member_that_is_killed_when_the_others_are_done_fails_the_job() -> None:
    membership = running(Limits(2, 1, 2), {"a": 2})
    membership.ended(0, ExitKind.WELL, 1.0)
    actions = membership.ended(1, ExitKind.LOST, 2.0)
    assert ends(actions) == [End("", 1)]


def test_program_without_init_is_done_when_its_processes_are() -> None:
    membership = Membership(Limits(2, 1, 2))
    membership.hosts_are({"a": 2}, 0.0)
    assert membership.ended(0, ExitKind.WELL, 1.0) == []
    assert membership.ended(1, ExitKind.WELL, 1.0) == [Finish()]


@pytest.mark.parametrize(
    "values",
    [
        {"size": 2, "min_size": 3, "max_size": 3},
        {"size": 2, "min_size": 0, "max_size": 3},
        {"size": 4, "min_size": 1, "max_size": 3},
        {"size": 2, "min_size": 1, "max_size": 2, "timeout_s": float("nan")},
        {"size": 2, "min_size": 1, "max_size": 2, "cooldown_s": (3.0, 1.0)},
        {"size": 2, "min_size": 1, "max_size": 2, "spares": -1},
    ],
)
def test_limits_that_contradict_each_other_are_refused(values: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="--"):
        Limits(**values)


@dataclass
class Course:
    """What has been done, as a launcher would, and what must hold of it."""

    limits: Limits
    membership: Membership = field(init=False)
    now: float = 0.0
    hosts: dict[str, int] = field(default_factory=dict)
    living: dict[int, tuple[str, int]] = field(default_factory=dict)
    place: dict[int, int] = field(default_factory=dict)  # the last generation of each
    asking: set[int] = field(default_factory=set)
    world: tuple[int, ...] = ()
    generation: int = 0
    dismissed: set[int] = field(default_factory=set)
    started: int = 0
    finishing: bool = False  # a member of a world is done: the others finish without it
    ended: bool = False
    leaving: set[int] = field(default_factory=set)
    seen_dead: set[int] = field(default_factory=set)  # rightly or not

    def __post_init__(self) -> None:
        self.membership = Membership(self.limits)

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            assert not self.ended, "nothing follows the end"
            if isinstance(action, Start):
                assert action.member == self.started, "numbers are never used again"
                assert (action.host, action.slot) not in self.living.values(), "one process in a slot"
                assert action.slot < self.hosts[action.host] + self.limits.spares
                self.started += 1
                self.living[action.member] = (action.host, action.slot)
                self.place[action.member] = 0
            elif isinstance(action, Form):
                self._form(action)
            elif isinstance(action, Lose):
                assert action.generation == self.generation
                assert action.member in self.world
            elif isinstance(action, Notify):
                assert action.generation == self.generation
            elif isinstance(action, Dismiss):
                self.dismissed.add(action.member)
            else:
                self.ended = True
        # Who leaves is there until the end of its step, while who is to take the place starts.
        living = [member for member in self.living if member not in self.dismissed | self.leaving]
        most = self.limits.max_size + self.limits.spares * 3
        assert len(living) <= most

    def _form(self, action: Form) -> None:
        assert action.generation == self.generation + 1
        assert len(set(action.members)) == len(action.members)
        assert set(action.members) <= self.asking, "nobody is placed who has not asked"
        assert set(action.members) <= self.living.keys()
        assert not set(action.members) & self.dismissed
        assert not set(action.members) & self.leaving, "who was given notice is in no further world"
        assert len(action.members) <= self.limits.max_size
        assert action.hosts == tuple(self.living[member][0] for member in action.members)
        for host in set(action.hosts):
            assert action.hosts.count(host) <= self.hosts.get(host, 0)
        before = [member for member in self.world if member in action.members]
        assert list(action.members[: len(before)]) == before, "ranks stay with the oldest"
        for member in self.world:
            is_heard = member in self.asking or member in self.seen_dead
            assert member not in self.living or is_heard, "a world waits for all that live"
        assert not set(action.members) & self.seen_dead
        self.generation, self.world = action.generation, action.members
        for member in action.members:
            self.place[member] = action.generation
        self.asking -= set(action.members)

    def step(self, data: st.DataObject) -> None:
        self.now += data.draw(st.sampled_from([0.0, 0.1, 1.0, 30.0]), label="time")
        kinds = ["ask", "ask", "ask", "lose", "well", "hosts", "time", "unfit", "leave", "leave host"]
        kinds.append("evict")
        kind = data.draw(st.sampled_from(kinds))
        members = sorted(self.living)
        if kind == "hosts":
            names = data.draw(st.sets(st.sampled_from("abc")), label="hosts")
            self.hosts = {name: data.draw(st.integers(0, 3)) for name in sorted(names)}
            self.do(self.membership.hosts_are(self.hosts, self.now))
        elif kind == "unfit" and self.hosts:
            host = data.draw(st.sampled_from(sorted(self.hosts)), label="host")
            self._refuse(host, more_hosts_may_come=data.draw(st.booleans()))
        elif kind == "leave host" and self.hosts:
            host = data.draw(st.sampled_from(sorted(self.hosts)), label="host")
            self.leaving |= {member for member in self.living if self.living[member][0] == host}
            self.do(self.membership.host_leaves(host, self.now))
        elif kind in ("time", "unfit", "leave host") or not members:
            self.do(self.membership.time_is(self.now))
        else:
            member = data.draw(st.sampled_from(members), label=kind)
            if kind == "ask":
                self.asking.add(member)
                flags = {"connected": data.draw(st.booleans()), "progressed": data.draw(st.booleans())}
                dead: set[int] = set()
                self.seen_dead.discard(member)
                if member in self.world and self.place[member] == self.generation:
                    others = sorted(set(self.world) - {member})
                    dead = data.draw(st.sets(st.sampled_from(others)), label="dead") if others else dead
                    self.seen_dead |= (dead & self.living.keys()) - self.asking
                self.do(self.membership.request(member, self.place[member], self.now, **flags, dead=dead))
            elif kind == "leave":
                self.leaving.add(member)
                self.do(self.membership.leaves([member], self.now))
            elif kind == "evict":
                actions = self.membership.evict(member, self.now)
                if actions:
                    assert member in self.world
                    assert set(self.world) - {member}, "somebody stays who has the state"
                    assert self.asking - set(self.world) - self.leaving, "somebody is ready to replace it"
                    self.leaving.add(member)
                self.do(actions)
            else:
                del self.living[member]
                self.asking.discard(member)
                lost = (
                    data.draw(st.sampled_from([ExitKind.LOST, ExitKind.KILLED])) if kind == "lose" else None
                )
                exit_kind = lost or ExitKind.WELL
                self.finishing |= exit_kind is ExitKind.WELL and member in self.world
                self.do(self.membership.ended(member, exit_kind, self.now))

    def _refuse(self, host: str, *, more_hosts_may_come: bool) -> None:
        """Nothing can be started on a host: its processes that were never heard of are none."""
        for member in self.membership.unready_on(host):
            assert self.living.pop(member)[0] == host
            assert member not in self.asking or member in self.dismissed
            self.asking.discard(member)
        self.do(self.membership.host_unfit(host, self.now, more_hosts_may_come=more_hosts_may_come))

    def let_it_run(self) -> None:
        """Whoever lives asks, and time goes on: the job is in a world then, or at its end."""
        for _ in range(40):
            if self.ended:
                return
            for member in sorted(self.living):
                if member in self.dismissed:
                    self.do(self.membership.request(member, self.place[member], self.now))
                    del self.living[member]
                    self.asking.discard(member)
                    self.do(self.membership.ended(member, ExitKind.WELL, self.now))
                    if self.ended:
                        return
                    continue
                behind = self.place[member] < self.generation or self.place[member] == 0
                if behind or self.is_broken() or self.leaving & set(self.world):
                    self.asking.add(member)
                    self.seen_dead.discard(member)
                    self.do(
                        self.membership.request(
                            member, self.place[member], self.now, connected=True, progressed=True
                        )
                    )
                if self.ended:
                    return
            self.now = min(max(self.membership.next_at(self.now), self.now + 0.1), self.now + 1000.0)
            self.do(self.membership.time_is(self.now))
            least = 1 if self.finishing else self.limits.min_size
            is_whole = not self.is_broken() and not self.leaving & set(self.world)
            if is_whole and least <= len(self.world):
                return
        raise AssertionError("neither a world nor an end")

    def is_broken(self) -> bool:
        return any(member not in self.living for member in self.world)


LIMITS = st.builds(
    lambda least, more, most, spares, limit, timeout, cool: Limits(
        least + more, least, least + more + most, spares, limit, timeout, cool
    ),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(0, 2),
    st.none() | st.integers(0, 5),
    st.sampled_from([0.0, 10.0, 600.0]),
    st.none() | st.just((1.0, 20.0)),
)


@given(LIMITS, st.integers(1, 60), st.data())
@settings(max_examples=300, deadline=None)
def test_any_course_of_events_keeps_the_rules_and_comes_to_a_world_or_an_end(
    limits: Limits, steps: int, data: st.DataObject
) -> None:
    course = Course(limits)
    for _ in range(steps):
        if not course.ended:
            course.step(data)
    if not course.ended:
        course.let_it_run()


def test_host_that_is_unfit_rests_longer_each_time_and_others_form_the_world() -> None:
    membership = Membership(Limits(3, 2, 3))
    assert started(membership.hosts_are({"a": 2, "b": 1}, 0.0)) == [0, 1, 2]
    assert membership.host_unfit("b", 1.0) == []
    assert membership.next_at(1.0) == 6.0
    membership.request(0, 0, 2.0)
    assert formed(membership.request(1, 0, 2.0)) == [(0, 1)]
    assert membership.time_is(6.0) == [Start(3, "b", 0)]
    assert membership.host_unfit("b", 7.0) == []
    assert membership.time_is(16.9) == []
    assert membership.time_is(17.0) == [Start(4, "b", 0)]
    membership.request(4, 0, 18.0)
    membership.ended(4, ExitKind.LOST, 19.0)
    membership.host_unfit("b", 20.0)
    assert membership.time_is(25.0) == [Start(6, "b", 0)]  # it had been fit meanwhile


def test_host_that_is_unfit_ends_the_job_where_no_other_can_come() -> None:
    limits = Limits(2, 2, 2)
    membership = Membership(limits)
    membership.hosts_are({"a": 1, "b": 1}, 0.0)
    reason = "the other hosts have 1 slots, fewer than --min-np 2"
    assert membership.host_unfit("b", 1.0, more_hosts_may_come=False) == [End(reason)]
    membership = Membership(limits)
    membership.hosts_are({"a": 1, "b": 1}, 0.0)
    assert membership.host_unfit("b", 1.0, more_hosts_may_come=True) == []
    assert membership.hosts_are({"a": 2, "b": 1}, 2.0) == [Start(2, "a", 1)]


def test_host_that_is_listed_anew_does_not_rest() -> None:
    membership = running(Limits(1, 1, 2), {"a": 1})
    assert started(membership.hosts_are({"a": 1, "b": 1}, 1.0)) == [1]
    membership.host_unfit("b", 2.0)
    assert membership.hosts_are({"a": 1}, 3.0) == []
    assert started(membership.hosts_are({"a": 1, "b": 1}, 4.0)) == [2]


def test_member_that_leaves_is_in_no_further_world_and_its_slot_stays_empty() -> None:
    membership = running(Limits(3, 2, 3), {"a": 3})
    assert membership.leaves([0], 1.0) == [Notify(1)]
    assert membership.leaves([0], 1.0) == []
    actions = ask_all(membership, (0, 1, 2), 1, 2.0)
    assert actions == [Form(2, (1, 2), ("a", "a")), Dismiss(0)]
    assert membership.departed_world(0) == [0, 1, 2]
    assert membership.ended(0, ExitKind.WELL, 3.0) == []
    assert membership.next_at(3.0) == float("inf")


def test_spare_takes_the_place_of_a_member_that_leaves() -> None:
    membership = running(Limits(2, 2, 2, spares=1), {"a": 2})
    membership.leaves([1], 1.0)
    assert formed(ask_all(membership, (0, 1), 1, 2.0)) == [(0, 2)]


def test_member_that_leaves_is_replaced_where_too_few_would_be_left() -> None:
    membership = running(Limits(2, 2, 2), {"a": 2})
    assert membership.leaves([1], 1.0) == [Notify(1)]
    assert ask_all(membership, (0, 1), 1, 2.0) == [Dismiss(1)]
    assert membership.ended(1, ExitKind.WELL, 3.0) == [Start(2, "a", 1)]
    assert formed(membership.request(2, 0, 4.0)) == [(0, 2)]


def test_host_that_leaves_is_used_again_when_it_is_listed_anew() -> None:
    membership = running(Limits(2, 1, 2), {"a": 1, "b": 1})
    assert membership.host_leaves("b", 1.0) == [Notify(1)]
    assert formed(ask_all(membership, (0, 1), 1, 2.0)) == [(0,)]
    membership.ended(1, ExitKind.WELL, 3.0)
    assert membership.hosts_are({"a": 1, "b": 1}, 4.0) == []
    assert membership.hosts_are({"a": 1}, 5.0) == []
    assert membership.hosts_are({"a": 1, "b": 1}, 6.0) == [Start(2, "b", 0)]


def test_job_that_everybody_leaves_can_be_resumed() -> None:
    membership = running(Limits(2, 1, 2, spares=1), {"a": 2})
    membership.leaves([0], 1.0)
    assert not membership.all_are_leaving
    membership.leaves([1], 1.0)
    assert membership.all_are_leaving
    assert ask_all(membership, (0, 1), 1, 2.0) == [Dismiss(0), Dismiss(1)]


def test_where_the_only_one_to_stay_is_lost_all_leave() -> None:
    membership = running(Limits(3, 1, 3), {"a": 3})
    membership.request(3, 0, 1.0)
    membership.leaves([1, 2], 1.0)
    assert not membership.all_are_leaving
    membership.ended(0, ExitKind.KILLED, 2.0)
    assert membership.all_are_leaving
    assert ask_all(membership, (1, 2), 1, 3.0) == [Dismiss(1), Dismiss(2)]
    assert membership.departed_world(2) == [1, 2]
    assert [membership.leaves_by(member) for member in (1, 2)] == ["all", "all"]


def survivors_of_rank_0(*commits: tuple[int, int]) -> Membership:
    """Rank 0 of a world is lost, and the others have asked for a place. These are their last commits."""
    size = 1 + len(commits)
    membership = running(Limits(size, size, size, cooldown_s=(600.0, 600.0)), {"a": size})
    membership.ended(0, ExitKind.KILLED, 1.0)
    for member, commit in enumerate(commits, 1):
        asked = membership.request(
            member, 1, 2.0, connected=True, progressed=True, failed=True, commit=commit
        )
        assert asked == []
    return membership


@pytest.mark.parametrize(
    ("commits", "left"),
    [
        (((1, 5), (1, 5), (1, 5)), [1, 2, 3]),
        (((1, 6), (1, 5), (1, 6)), [1, 3, 2]),
        (((1, 5), (1, 6), (1, 6)), [2, 3, 1]),
        (((1, 9), (2, -1), (2, 0)), [3, 2, 1]),  # a later call
    ],
)
def test_members_with_the_newest_commit_come_first_where_all_leave(
    commits: tuple[tuple[int, int], ...], left: list[int]
) -> None:
    membership = survivors_of_rank_0(*commits)
    actions = membership.all_leave(3.0)
    assert sorted(action.member for action in actions if isinstance(action, Dismiss)) == [1, 2, 3]
    assert [membership.departed_world(member) for member in (1, 2, 3)] == 3 * [left]


def test_last_member_to_be_told_to_leave_does_not_count_those_that_have_left() -> None:
    membership = survivors_of_rank_0((1, 6), (1, 6))
    assert membership.leaves([1], 3.0) == [Dismiss(1)]
    assert (membership.leaves_by(1), membership.departed_world(1)) == ("one", [1, 2])
    assert membership.leaves([2], 4.0) == [Dismiss(2)]  # the process of the first one has not ended yet
    assert (membership.leaves_by(2), membership.departed_world(2)) == ("all", [2])


def test_worlds_in_a_row_that_fail_without_a_loss_end_the_job_as_well() -> None:
    membership = running(Limits(2, 1, 2), {"a": 2})
    for generation in (1, 2):
        membership.request(0, generation, 1.0, connected=True, failed=True)
        actions = membership.request(1, generation, 1.0, connected=True, failed=generation == 1)
    assert ends(actions) == [End("2 worlds in a row have failed before a commit", None)]


def test_worlds_that_are_left_of_one_s_own_accord_do_not_count() -> None:
    membership = running(Limits(2, 1, 2), {"a": 2})
    for generation in range(1, 6):
        membership.request(0, generation, 1.0, connected=True)
        assert formed(membership.request(1, generation, 1.0, connected=True)) == [(0, 1)]


def test_slot_that_was_left_is_made_up_for_where_others_are_free() -> None:
    membership = running(Limits(3, 1, 3), {"a": 3})
    membership.leaves([1], 1.0)
    assert started(membership.hosts_are({"a": 3, "b": 4}, 2.0)) == [3]
    assert started(membership.hosts_are({"a": 3, "b": 5}, 3.0)) == []


def test_host_that_leaves_is_made_up_for_where_others_have_slots() -> None:
    membership = running(Limits(3, 1, 3, spares=0), {"a": 2, "b": 1, "c": 2})
    assert membership.host_of(2) == "b"
    assert started(membership.host_leaves("b", 1.0)) == [3]
    assert membership.host_of(3) == "c"


def test_slot_that_was_left_stays_empty_where_no_other_is_free() -> None:
    membership = running(Limits(3, 1, 3), {"a": 3})
    membership.leaves([1], 1.0)
    assert started(membership.hosts_are({"a": 3}, 2.0)) == []
    assert started(membership.time_is(60.0)) == []


def joined(limits: Limits, hosts: dict[str, int]) -> Membership:
    """A job of two whose functions have begun, and that process 2 has joined at time 2, in generation 2."""
    membership = running(limits, hosts)
    membership.hosts_are({"a": 3}, 1.0)
    membership.request(2, 0, 1.0)
    membership.request(0, 1, 2.0, connected=True, progressed=True, commit=(1, 0))
    assert formed(membership.request(1, 1, 2.0, connected=True, progressed=True, commit=(1, 0))) == [
        (0, 1, 2)
    ]
    return membership


def fail_together(membership: Membership, after: int, now: float) -> list[Action]:
    actions = membership.request(0, after, now, connected=True, failed=True, commit=(1, 0))
    return actions + membership.request(1, after, now, connected=True, failed=True, commit=(1, 0))


@pytest.mark.parametrize("exit_kind", [ExitKind.FAILED, ExitKind.KILLED, ExitKind.LOST, ExitKind.WELL])
def test_world_goes_on_without_a_new_member_that_ends_before_its_function(exit_kind: ExitKind) -> None:
    membership = joined(Limits(2, 2, 3), {"a": 2})
    assert not ends(membership.ended(2, exit_kind, 3.0, has_begun=False))
    assert formed(fail_together(membership, 2, 3.0)) == [(0, 1)]
    membership.ended(0, ExitKind.WELL, 4.0)
    assert membership.ended(1, ExitKind.WELL, 4.0) == [Finish()]


def test_new_member_that_fails_in_its_function_ends_the_job() -> None:
    membership = joined(Limits(2, 2, 3), {"a": 2})
    assert ends(membership.ended(2, ExitKind.FAILED, 3.0)) == [End("", 2)]


def test_slot_of_a_new_member_that_fails_before_its_function_stays_empty() -> None:
    membership = joined(Limits(2, 2, 3), {"a": 2})
    membership.ended(2, ExitKind.FAILED, 3.0, has_begun=False)
    fail_together(membership, 2, 3.0)
    assert started(membership.time_is(100.0)) == []


def test_slot_whose_new_process_fails_before_it_has_a_place_rests_and_is_tried_again() -> None:
    membership = running(Limits(2, 1, 2, cooldown_s=(5.0, 60.0)), {"a": 2})
    membership.request(0, 1, 1.0, connected=True, progressed=True, failed=True, commit=(1, 0))
    membership.ended(1, ExitKind.KILLED, 1.0)
    (number,) = started(membership.time_is(7.0))
    actions = membership.ended(number, ExitKind.FAILED, 8.0, has_begun=False)
    assert (ends(actions), started(actions), started(membership.time_is(17.9))) == ([], [], [])
    assert len(started(membership.time_is(18.0))) == 1


def test_process_that_fails_before_it_has_a_place_ends_the_job_where_no_rank_is_left() -> None:
    membership = running(Limits(2, 1, 2), {"a": 2})
    membership.ended(0, ExitKind.KILLED, 1.0)
    (number, *_) = started(membership.ended(1, ExitKind.KILLED, 1.0) + membership.time_is(2.0))
    assert ends(membership.ended(number, ExitKind.FAILED, 3.0, has_begun=False)) == [End("", number)]


def test_new_members_that_end_before_their_function_do_not_end_the_job_however_many() -> None:
    membership = joined(Limits(2, 2, 3), {"a": 2})
    number, now = 2, 3.0
    for generation in range(2, 20, 2):
        membership.ended(number, ExitKind.KILLED, now, has_begun=False)
        now += 100.0
        (number,) = started(fail_together(membership, generation, now) + membership.time_is(now))
        membership.request(number, 0, now)
        membership.request(0, generation + 1, now, connected=True, commit=(1, 0))
        assert formed(membership.request(1, generation + 1, now, connected=True, commit=(1, 0))) == [
            (0, 1, number)
        ]


def test_new_members_that_are_needed_and_fail_before_their_function_end_the_job() -> None:
    membership = running(Limits(2, 2, 2), {"a": 2})
    membership.request(0, 1, 1.0, connected=True, progressed=True, failed=True, commit=(1, 0))
    (number,) = started(membership.ended(1, ExitKind.KILLED, 1.0) + membership.time_is(2.0))
    assert formed(membership.request(number, 0, 2.0)) == [(0, number)]
    membership.request(0, 2, 3.0, connected=True, failed=True, commit=(1, 0))
    (other,) = started(
        membership.ended(number, ExitKind.FAILED, 3.0, has_begun=False) + membership.time_is(9.0)
    )
    assert formed(membership.request(other, 0, 9.0)) == [(0, other)]
    membership.request(0, 3, 10.0, connected=True, failed=True, commit=(1, 0))
    (end,) = ends(membership.ended(other, ExitKind.FAILED, 10.0, has_begun=False))
    assert end.cause == number


def test_new_member_that_does_not_come_to_its_function_in_time_is_given_up() -> None:
    membership = joined(Limits(2, 2, 3, timeout_s=60.0), {"a": 2})
    assert membership.time_is(61.9) == []
    assert membership.next_at(61.9) == 62.0
    (lose,) = membership.time_is(62.0)
    assert isinstance(lose, Lose)
    assert "has not reached its elastic function within 60 s" in lose.reason
    assert formed(fail_together(membership, 2, 62.0)) == [(0, 1)]
    assert not membership.has(2)


def test_new_member_that_has_come_to_its_function_is_given_any_time() -> None:
    membership = joined(Limits(2, 2, 3, timeout_s=60.0), {"a": 2})
    membership.begins(2)
    assert membership.time_is(1000.0) == []
