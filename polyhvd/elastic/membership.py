"""Decides which processes are in the world of an elastic job. Pure: no socket, process or clock.

A *member* is a process, identified by a number that is never used again. It occupies a *slot* of a host and
waits there for a place in the next *generation* of the world. The launcher reports each event with its time,
and executes the returned actions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from polyhvd.elastic.actions import Action, Dismiss, End, ExitKind, Finish, Form, Lose, Notify, Start
from polyhvd.elastic.limits import Limits
from polyhvd.elastic.members import Cooldown, FormedWorld, Member, Slot, Standing

__all__ = [
    "Action",
    "Dismiss",
    "End",
    "ExitKind",
    "Finish",
    "Form",
    "Limits",
    "Lose",
    "Membership",
    "Notify",
    "Start",
]

#: The job ends after so many worlds in a row have failed before a commit: the next one would fail, too.
_FAILED_WORLDS_MAX = 2
#: The same, if processes were killed from outside. That can also hit recoveries, so more are allowed; but a
#: system that is short of memory kills again and again.
_KILLED_WORLDS_MAX = 10
#: The failures of a slot are forgotten when its process has lived for this long.
_FORGIVEN_AFTER_S = 600.0
#: How long new members that are ready wait for others that were started with them.
_GATHER_S = 5.0
#: No replacement is started for this long after a loss: importing a framework would take processors from the
#: remaining members while they recover.
_QUIET_S = 0.5
#: Time for a replacement to arrive before the shortage is reported.
_REPORTED_AFTER_S = 3.0
#: Time for members to leave after a shortage has lasted for --elastic-timeout.
_PARTING_S = 30.0
#: Minimum time for a new member to call its elastic function, while the others wait for it.
_PROLOGUE_S_MIN = 10.0


class Membership:
    """See the module. Every method for an event returns the actions to execute, in order.

    Example::

        membership = Membership(Limits(size=2, min_size=1, max_size=2))
        membership.hosts_are({"a": 2}, now=0.0)  # [Start(0, "a", 0), Start(1, "a", 1)]
        membership.request(0, 0, now=1.0)  # []
        membership.request(1, 0, now=1.2)  # [Form(1, (0, 1), ("a", "a"))]
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.replaced = 0  #: number of members that were lost without ending the job
        self.formed = 0  #: the last generation
        self._hosts: dict[str, int] = {}
        self._slots: dict[tuple[str, int], Slot] = {}
        self._cooldowns: dict[str, Cooldown] = {}
        self._members: dict[int, Member] = {}  # those that live
        self._next = 0
        self._world: FormedWorld | None = None
        self._departed_hosts: set[str] = set()  # that have given notice, while they are listed
        self._finishing = False  # a member of a world has ended well
        self._leaving = False  # all members leave with notice
        self._cut_short = False  # one of them has left before the end of the program
        self._over = self._has_failed = False
        self._too_few_since: float | None = None
        self._shortage = ""  # message for the user while processes or slots are too few
        self._parting = ""  # why the job ends when all have left; empty: it was not for a shortage
        self._parts_until = float("inf")
        self._has_progressed = False  # a commit was made since the job began without a state
        self._quiet_until = 0.0  # no process is started before, unless there are too few
        self._failed_worlds = self._crashed = 0  # in a row: all, and those without a kill from outside
        self._first_cause: int | None = None  # of the failed worlds, if possible not a kill from outside
        self._lost_now: int | None = None  # the first that the present world has lost

    # Events

    def hosts_are(self, hosts: Mapping[str, int], now: float) -> list[Action]:
        """Set the hosts with their slots; a host that is missing is gone, or about to be."""
        if self._over:
            return []
        self._departed_hosts &= hosts.keys()
        for (host, _), slot in self._slots.items():
            slot.vacated = slot.vacated and host in hosts
        self._hosts = {
            host: slots for host, slots in hosts.items() if slots > 0 and host not in self._departed_hosts
        }
        self._cooldowns = {host: cooldown for host, cooldown in self._cooldowns.items() if host in hosts}
        actions: list[Action] = []
        for host in dict.fromkeys(member.host for member in self._members.values()):
            for number in self._surplus_on(host):
                self._members[number].dismissed = True
                actions.append(Dismiss(number))
        return actions + self._settle(now)

    def _surplus_on(self, host: str) -> list[int]:
        """New members for which a host has no slot: rather those that start, and of these the oldest."""
        surplus = self._count_on(host) - self._capacity(host)
        new = [
            n
            for n, item in self._members.items()
            if item.host == host and item.generation == 0 and not item.dismissed and not item.leaving
        ]
        starting = [n for n in new if not self._members[n].waiting]
        ready = [n for n in reversed(new) if self._members[n].waiting]
        return [*starting, *ready][: max(0, surplus)]

    def host_unfit(
        self, host: str, now: float, *, more_hosts_may_come: bool = True, why: str = ""
    ) -> list[Action]:
        """Nothing can be started on a host: try it again after a cooldown.

        Processes that were to be started there are removed. If no more hosts may come, and the first world
        cannot be formed without this host, the job ends.
        """
        if self._over:
            return []
        for number in self.unready_on(host):
            del self._members[number]
        cooldown = self._cooldowns.setdefault(host, Cooldown())
        cooldown.refusals += 1
        cooldown.until = now + self.limits.host_cooldown_after(cooldown.refusals)
        cooldown.why = why
        fit = sum(slots for name, slots in self._hosts.items() if not self._is_cooling(name, now))
        if self.formed == 0 and fit < self.limits.min_size and not more_hosts_may_come:
            return self._end(f"the other hosts have {fit} slots, fewer than --min-np {self.limits.min_size}")
        return self._settle(now)

    def leaves(self, members: Collection[int], now: float) -> list[Action]:
        """Processes have been given notice: they stay in the world until its next boundary, and join no more.

        Their slots stay empty, unless there are fewer than ``min_size`` processes without them.
        """
        if self._over:
            return []
        actions: list[Action] = []
        for number in members:
            found = self._members.get(number)
            if found is None or found.leaving:
                continue
            found.leaving = True
            self._slots[found.host, found.slot].vacate(f"process {number} left with notice")
            if found.generation == 0 and not found.dismissed:
                found.dismissed = True
                actions.append(Dismiss(number))
        return actions + self._dismiss_where_all_leave() + self._settle(now)

    def _dismiss_where_all_leave(self) -> list[Action]:
        """Dismiss the processes that wait for a place if no member with the state stays."""
        world = self._world
        if world is not None and world.members and not self._finishing:
            self._leaving |= all(self._members[number].leaving for number in world.members)
        actions: list[Action] = []
        for number, item in self._members.items():
            if self._leaving and item.generation == 0 and not item.dismissed:
                item.dismissed = True
                actions.append(Dismiss(number))
        return actions

    def host_leaves(self, host: str, now: float) -> list[Action]:
        """A host has given notice: do not use it until it has been removed from the list and listed again."""
        if self._over:
            return []
        self._departed_hosts.add(host)
        self._hosts.pop(host, None)
        return self.leaves([n for n, item in self._members.items() if item.host == host], now)

    def all_leave(self, now: float) -> list[Action]:
        """Every process has been given notice."""
        self._leaving = True
        return self.leaves(list(self._members), now)

    def evict(self, member: int, now: float) -> list[Action]:
        """Replace a member, which leaves with notice, by a process that is ready, if there is one."""
        world, found = self._world, self._members.get(member)
        if self._over or found is None or world is None or member not in world.members:
            return []
        if len(world.members) < 2:  # no member would be left to send the state
            return []
        if found.leaving or world.notified or world.lost or self._finishing or self._leaving:
            return []
        found.leaving = True
        chosen = self._next_world()
        found.leaving = False
        return self.leaves([member], now) if len(chosen) >= len(world.members) else []

    @property
    def all_are_leaving(self) -> bool:
        """Whether all members of the present world leave, and its state with them."""
        return self._leaving

    @property
    def staying(self) -> set[int]:
        """The members that live and have been given no notice."""
        return {n for n, item in self._members.items() if not item.leaving and not item.dismissed}

    def has(self, member: int) -> bool:
        """Return whether a member counts as alive."""
        return member in self._members

    def host_of(self, member: int) -> str:
        """Return the host of a running member."""
        return self._members[member].host

    def awaits_place(self, member: int, after: int) -> bool:
        """Return whether a member's request for a place after this generation has not been answered."""
        found = self._members.get(member)
        return found is not None and not found.dismissed and found.generation == after

    def leaves_by(self, member: int) -> str:
        """Which members leave with notice: "one" (this one), "all" of its world; empty: this one does not."""
        found = self._members.get(member)
        return "" if found is None or not found.leaving else "all" if self._leaving else "one"

    def departed_world(self, member: int) -> list[int]:
        """The members of the world that a member has left with notice, without those that were lost.

        They are in the order of their ranks. If all leave, members with the newest commit come first: the
        first one saves the state, and a loss can leave survivors with commits that are a step apart.
        """
        return list(self._members[member].departed_world) if member in self._members else []

    @property
    def ranks(self) -> list[int]:
        """The members of the present world, by rank, as far as they live."""
        return [] if self._world is None else list(self._world.members)

    @property
    def blamable(self) -> set[int]:
        """The members whose loss may still be reported as the cause of the job's failure."""
        lost = [] if self._world is None else self._world.lost
        named = {self._first_cause, self._lost_now}
        return {*lost, *(member for member in named if member is not None)}

    def unready_on(self, host: str) -> set[int]:
        """The members on a host that have never requested a place."""
        living = self._members.items()
        return {n for n, item in living if item.host == host and item.generation == 0 and not item.waiting}

    def request(
        self,
        member: int,
        after: int,
        now: float,
        *,
        connected: bool = False,
        progressed: bool = False,
        failed: bool = False,
        dead: Collection[int] = (),
        commit: tuple[int, int] = (0, -1),
    ) -> list[Action]:
        """A member requests a place in a generation after this one.

        The next world does not wait for members that this one has seen dead, if their exit status could only
        end the whole job: a process with much memory takes long to end.

        Args:
            member: which.
            after: the last generation that it had a place in; 0: none.
            now: the time.
            connected: whether it has been connected in that one.
            progressed: whether it has committed in it.
            failed: whether a collective has failed there.
            dead: the members of it that this member has seen dead.
            commit: its last one, as the number of the call of an elastic function and of the commit in that
                call, from 0. A greater one is newer.
        """
        found = self._members.get(member)
        if self._over or found is None or after < found.generation:
            return []
        world = self._world
        if found.dying and world is not None:
            found.dying = False  # it lives, but the others may have continued without it
            found.dismissed |= found.generation < world.generation
        if found.dismissed:
            return [Dismiss(member)]
        found.commit = commit
        if not found.waiting:
            found.waiting = True
            found.ready_at = now
            self._cooldowns.pop(found.host, None)
        if world is not None and found.generation == world.generation:
            world.connected |= connected
            world.progressed |= progressed
            world.failed |= failed
            for number in set(dead).intersection(world.members):
                self._members[number].dying = not self._members[number].waiting
            self._forgive(world)
        return self._settle(now)

    def ended(
        self,
        member: int,
        exit_kind: ExitKind,
        now: float,
        *,
        has_begun: bool = True,
        has_finished: bool = False,
        is_within: bool = False,
        why: str = "",
    ) -> list[Action]:
        """A member has ended.

        Args:
            member: which.
            exit_kind: how.
            now: the time.
            has_begun: whether it had called an elastic function. The job continues without a new member that
                ends or fails before; if it had no place yet, its slot has a cooldown as after a loss.
            has_finished: whether its elastic functions had returned. If it was lost after that, no step is
                repeated, and the job fails when the other members have ended.
            is_within: whether it was within an elastic function. If it had been given notice and its own
                handler of SIGTERM has ended the program, it has left, and has not finished.
            why: how it has ended, for messages about its slot.
        """
        found = self._members.pop(member, None)
        if self._over or found is None:
            return []
        found.dismissed |= is_within and found.leaving and exit_kind is ExitKind.WELL
        slot = self._slots[found.host, found.slot]
        world = self._world
        placed = world is not None and member in world.members
        is_early = found.joins_since is not None and not has_begun
        if placed and world is not None:
            world.members.remove(member)
            world.early += [member] if is_early else []
        if exit_kind is ExitKind.WELL or found.dismissed:
            slot.done = slot.done or (exit_kind is ExitKind.WELL and not found.dismissed)
            in_world = placed or found.dying
            self._cut_short |= in_world and found.dismissed and self._leaving
            self._finishing |= (
                in_world and exit_kind is ExitKind.WELL and not found.dismissed and not is_early
            )
            return self._settle(now)
        if has_finished and placed and world is not None and exit_kind in (ExitKind.LOST, ExitKind.KILLED):
            slot.done = self._finishing = True
            world.lost.append(member)
            return self._settle(now)
        joins = found.generation == 0 and world is not None and bool(world.members)
        if exit_kind is ExitKind.FAILED and is_early:
            slot.vacate(why)  # another one would fail again
        elif (exit_kind is ExitKind.FAILED and not joins) or (
            exit_kind is ExitKind.UNSTARTABLE and self.formed == 0
        ):
            return self._end("", cause=member)
        self._fail_slot(slot, found, now, why)
        self.replaced += found.generation > 0
        actions: list[Action] = []
        if found.dying and not placed:  # the others have continued, so that world had a commit
            self._quiet_until = now + _QUIET_S
            if exit_kind is ExitKind.KILLED:
                self._pardon(slot, now)
        if placed and world is not None:
            if not world.lost:
                self._lost_now = member
            world.lost.append(member)
            if exit_kind is ExitKind.KILLED:
                world.killed = True
                world.killed_slots.append((slot, now))
                self._forgive(world)
            self._quiet_until = now + _QUIET_S
            actions.append(Lose(world.generation, member))
            actions += self._dismiss_where_all_leave()  # it may have been the only one to stay
        return actions + self._settle(now)

    def finished_without(self, member: int) -> bool:
        """Return whether the others have continued without a member until the job's end; counts its loss.

        It was lost, but the report of that has arrived only after the end.
        """
        found = self._members.get(member)
        is_lost = self._over and found is not None and found.dying
        self.replaced += is_lost
        return is_lost

    def begins(self, member: int) -> None:
        """A member that has joined has called its elastic function."""
        if (found := self._members.get(member)) is not None:
            found.joins_since = None

    def progress(self) -> None:
        """A member has made its first commit."""
        self._has_progressed = True

    def time_is(self, now: float) -> list[Action]:
        """Act on the time: that of :meth:`next_at` may have come."""
        return [] if self._over else self._settle(now)

    def next_at(self, now: float) -> float:
        """The next time after now at which :meth:`time_is` may have something to do; infinite: never."""
        if self._over:
            return float("inf")
        vacant = [slot for key, slot in self._slots.items() if self._is_vacant(key)]
        times = [max(slot.free_at, self._quiet_until) for slot in vacant]
        times += [cooldown.until for host, cooldown in self._cooldowns.items() if host in self._hosts]
        if self._too_few_since is not None:
            times.append(self._too_few_since + self.limits.timeout_s)
            times.append(self._too_few_since + self._reported_after_s)
        times.append(self._parts_until)
        times += [self._joins_until(item) for item in self._members.values()]
        times += [item.ready_at + _GATHER_S for item in self._members.values() if self._may_join(item)]
        return min((moment for moment in times if moment > now), default=float("inf"))

    @property
    def over(self) -> bool:
        """Whether nothing more will be decided."""
        return self._over

    @property
    def has_failed(self) -> bool:
        """Whether the job is over because it has failed."""
        return self._has_failed

    # Consequences of events

    def _settle(self, now: float) -> list[Action]:
        if self._leaving and not self._members and not self._has_finished():
            return self._end(self._parting or "every process has left with notice", resumable=True)
        if now >= self._parts_until:
            return self._end(self._parting, cause=self._lost_now, resumable=True)
        if self._is_finished():
            lost = [] if self._world is None else self._world.lost
            if lost:
                return self._end("", cause=lost[0])
            self._over = True
            return [Finish()]
        actions = self._give_up_joining(now)
        actions += self._start_missing(now)
        if self._is_complete():
            actions += self._form(now)
        else:
            actions += self._notify(now)
        if not self._over:
            actions += self._watch_size(now)
        return actions

    def _is_finished(self) -> bool:
        """Return whether all members of the world have ended well, or no process has anything to do."""
        if self._leaving:
            return not self._members and self._has_finished()
        if self._world is not None:
            return self._finishing and not self._world.members
        return not self._members and any(slot.done for slot in self._slots.values())

    def _has_finished(self) -> bool:
        """Return whether all members of the last world have finished the program."""
        return self._finishing and not self._cut_short and self._world is not None and not self._world.lost

    def _joins_until(self, member: Member) -> float:
        """Return when the others stop waiting for it; infinite: it is not joining."""
        since = float("inf") if member.joins_since is None or member.waiting else member.joins_since
        return since + max(self.limits.timeout_s, _PROLOGUE_S_MIN)

    def _give_up_joining(self, now: float) -> list[Action]:
        """Continue without new members that have not called their elastic function in time."""
        actions: list[Action] = []
        world = self._world
        if world is None:
            return actions
        for number in list(world.members):
            member = self._members[number]
            if now < self._joins_until(member):
                continue
            del self._members[number]
            world.members.remove(number)
            world.lost.append(number)
            world.early.append(number)
            self.replaced += 1
            limit = max(self.limits.timeout_s, _PROLOGUE_S_MIN)
            reason = (
                f"process {number} on {member.host} has not reached its elastic function within {limit:g} s "
                "(--elastic-timeout)"
            )
            self._slots[member.host, member.slot].vacate(reason)
            actions.append(Lose(world.generation, number, reason))
        return actions

    def _fail_slot(self, slot: Slot, member: Member, now: float, why: str) -> None:
        slot.failures = 1 if now - member.since >= _FORGIVEN_AFTER_S else slot.failures + 1
        slot.free_at = now + self.limits.cooldown_after(slot.failures)
        slot.why = why

    def _forgive(self, world: FormedWorld) -> None:
        """Count kills from outside as first failures of their slots if the world has committed.

        Such slots work, and a cooldown would only delay the job. Cooldowns set by the user apply to all
        failures.
        """
        if not world.progressed:
            return
        for slot, killed_at in world.killed_slots:
            self._pardon(slot, killed_at)
        world.killed_slots = []

    def _pardon(self, slot: Slot, killed_at: float) -> None:
        if self.limits.cooldown_s is None:
            slot.failures = 1
            slot.free_at = killed_at + self.limits.cooldown_after(1)

    def _count_on(self, host: str) -> int:
        """Number of the members on a host that stay."""
        return sum(
            item.host == host and not item.dismissed and not item.leaving for item in self._members.values()
        )

    def _capacity(self, host: str) -> int:
        slots = self._hosts.get(host, 0)
        return slots + self.limits.spares if slots else 0

    def _is_cooling(self, host: str, now: float) -> bool:
        cooldown = self._cooldowns.get(host)
        return cooldown is not None and now < cooldown.until

    def _is_vacant(self, key: tuple[str, int]) -> bool:
        host, number = key
        taken = any((item.host, item.slot) == key for item in self._members.values())
        return not taken and number < self._capacity(host) and not self._slots[key].done

    def _target(self) -> int:
        return min(self.limits.max_size, sum(self._hosts.values()))

    def _start_missing(self, now: float) -> list[Action]:
        """Start what is missing: as many as the world may have, and the spares."""
        vacated = sum(
            slot.vacated and not slot.done and host in self._hosts for (host, _), slot in self._slots.items()
        )
        most = self.limits.max_size + self.limits.spares_in_slots
        wanted = min(most, sum(self._hosts.values()) - vacated)
        wanted += self.limits.spares * len(self._hosts)
        done = sum(slot.done for slot in self._slots.values())
        wanted -= done
        staying = sum(not item.dismissed and not item.leaving for item in self._members.values())
        if staying + self._need_no_world() < self.limits.min_size:
            wanted = max(wanted, self.limits.min_size)
        actions: list[Action] = []
        if now < self._quiet_until and len(self._next_world()) >= self._least():
            return actions
        for host in self._hosts:
            for number in range(0 if self._is_cooling(host, now) else self._capacity(host)):
                slot = self._slots.setdefault((host, number), Slot())
                living = sum(not item.dismissed and not item.leaving for item in self._members.values())
                if living >= wanted or self._finishing or self._leaving:
                    return actions
                if self._count_on(host) >= self._capacity(host):
                    break
                is_free = slot.free_at <= now and (not slot.vacated or living < self.limits.min_size)
                if is_free and self._is_vacant((host, number)):
                    slot.vacated = False
                    self._members[self._next] = Member(host, number, now)
                    actions.append(Start(self._next, host, number))
                    self._next += 1
        return actions

    def _need_no_world(self) -> int:
        """Number of processes that ended with status 0, if no process has called init()."""
        if self._world is not None or any(item.waiting for item in self._members.values()):
            return 0
        return sum(slot.done for slot in self._slots.values())

    def _ready_members(self) -> list[int]:
        """New members that are ready, the oldest first."""
        return [n for n, item in self._members.items() if self._is_ready(item)]

    @staticmethod
    def _is_ready(item: Member) -> bool:
        return item.waiting and item.generation == 0 and not item.dismissed and not item.leaving

    def _next_world(self) -> list[int]:
        """The members of the next world: those of the present one, then ready ones, the oldest first."""
        staying = [] if self._world is None else self._world.members
        target = self.limits.size if self._world is None else self._target()
        room = dict(self._hosts)
        chosen: list[int] = []
        for number in (*staying, *self._ready_members()):
            item = self._members[number]
            if item.leaving or item.dying or self._leaving:
                continue
            host = item.host
            if len(chosen) < target and room.get(host, 0) > 0:
                chosen.append(number)
                room[host] -= 1
        return chosen

    def _is_complete(self) -> bool:
        """Return whether all members that the next world has to wait for have requested a place."""
        late = self._late()
        if self._world is None or not self._world.members:
            chosen = len(self._next_world())
            return chosen >= self.limits.size or (not late and chosen >= self._least())
        return not late

    def _late(self) -> list[int]:
        """The members without a place request that the next world has to wait for."""
        world = self._world
        if world is None or not world.members:
            return [n for n, item in self._members.items() if not item.waiting and not item.dismissed]
        late = [number for number in world.members if not self._members[number].waiting]
        passed = late and len(late) < len(world.members) and self._may_pass_over(late, world)
        return [] if passed else late

    def _may_pass_over(self, late: list[int], world: FormedWorld) -> bool:
        """Return whether nothing of the next world depends on how these members end."""
        if not all(self._members[number].dying for number in late) or not world.progressed:
            return False
        limit = self.limits.reset_limit
        return len(self._next_world()) >= self._least() and (limit is None or self.formed <= limit)

    def _least(self) -> int:
        """The minimum size of a world. When some members are done, the others may finish without them."""
        return 1 if self._finishing else self.limits.min_size

    def _form(self, now: float) -> list[Action]:
        chosen = self._next_world()
        world = self._world
        broken = world is not None and bool(world.lost or world.failed)
        if world is not None and broken and (reason := self._recurs(world)) is not None:
            return self._end(reason, cause=self._first_cause)
        if len(chosen) < self._least():
            return self._dismiss_leaving(world)
        if self.limits.reset_limit is not None and self.formed > self.limits.reset_limit:
            reason = (
                f"the world has changed {self.formed} times, and --reset-limit is {self.limits.reset_limit}"
            )
            return self._end(reason, cause=self._lost_now)
        self.formed += 1
        former = () if world is None else self._living_members(world)
        leaving = [number for number in former if number not in chosen]
        for number in leaving:
            self._members[number].dismissed = True
            self._members[number].departed_world = former
        state_lost = self._has_progressed and not any(self._holds_state(number) for number in chosen)
        begins = self._world is None or state_lost
        self._has_progressed &= not state_lost
        runs = any(self._members[number].commit[0] for number in chosen)  # an elastic function
        for number in chosen:
            if runs and self._members[number].generation == 0:
                self._members[number].joins_since = now
            self._members[number].is_founder |= begins
            self._members[number].generation = self.formed
            self._members[number].waiting = False
        self._world = FormedWorld(self.formed, chosen, now)
        self._lost_now = None
        hosts = tuple(self._members[number].host for number in chosen)
        return [Form(self.formed, tuple(chosen), hosts, state_lost), *map(Dismiss, leaving)]

    def _holds_state(self, number: int) -> bool:
        member = self._members[number]
        return member.is_founder or member.commit[1] >= 0

    def _living_members(self, world: FormedWorld) -> tuple[int, ...]:
        """The living members of a world, as far as known, by rank."""
        return tuple(number for number in world.members if not self._members[number].dying)

    def _dismiss_leaving(self, world: FormedWorld | None) -> list[Action]:
        """Dismiss the members that leave, although the others are too few to form a world."""
        actions: list[Action] = []
        # Members that were dismissed before have left already and save nothing.
        living = () if world is None else self._living_members(world)
        members = tuple(number for number in living if not self._members[number].dismissed)
        if self._leaving:
            members = tuple(sorted(members, key=lambda number: self._members[number].commit, reverse=True))
        for number in members:
            item = self._members[number]
            if item.leaving:
                item.dismissed = True
                item.departed_world = members
                actions.append(Dismiss(number))
        return actions

    def _recurs(self, world: FormedWorld) -> str | None:
        """Why the next world would fail, too, or None; each world is counted once."""
        if world.judged:
            return None
        world.judged = True
        if world.early and set(world.lost) <= set(world.early) and len(world.members) >= self._least():
            return None  # there are enough members without those that have not begun
        if world.progressed:
            self._failed_worlds = self._crashed = 0
            self._first_cause = None
        elif world.connected or not world.members:
            self._failed_worlds += 1
            self._crashed += not world.killed
            if self._first_cause is None or (self._crashed == 1 and not world.killed):
                self._first_cause = self._lost_now
        if self._crashed < _FAILED_WORLDS_MAX and self._failed_worlds < _KILLED_WORLDS_MAX:
            return None
        return f"{self._failed_worlds} worlds in a row have failed before a commit"

    def _may_join(self, item: Member) -> bool:
        return self._is_ready(item) and self._world is not None and not self._world.notified

    def _notify(self, now: float) -> list[Action]:
        """Make the world stop at a boundary if the next one would have other members."""
        world = self._world
        if world is None or world.notified or world.lost or self._finishing:
            return []
        if any(self._members[number].waiting for number in world.members):
            return []  # it stops already
        chosen = self._next_world()
        if any(self._members[number].leaving for number in world.members):
            world.notified = True
            return [Notify(world.generation)]
        if chosen == world.members or len(chosen) < self.limits.min_size:
            return []
        joining = chosen[len([number for number in world.members if number in chosen]) :]
        starting = any(not item.waiting and item.generation == 0 for item in self._members.values())
        staying = len(chosen) - len(joining) == len(world.members)
        if starting and staying and now < self._members[joining[0]].ready_at + _GATHER_S:
            return []
        world.notified = True
        return [Notify(world.generation)]

    def _watch_size(self, now: float) -> list[Action]:
        """Make all members leave, and end the job, if there have been too few members for too long."""
        usable = Counter(
            item.host
            for item in self._members.values()
            if (item.generation or item.waiting or self._world is None)
            and not (item.dismissed or item.leaving)
        )
        if self._leaving:
            return []
        count = self._need_no_world()
        count += sum(min(number, self._hosts.get(host, 0)) for host, number in usable.items())
        if count >= self._least():
            self._too_few_since, self._shortage = None, ""
            return []
        if self._too_few_since is None:
            self._too_few_since = now
        living, slots = sum(usable.values()), sum(self._hosts.values())
        found = f"{living} process{'es are' if living != 1 else ' is'} left"
        if slots < min(living, self.limits.min_size):
            found = f"the hosts have {slots} slot{'s' if slots != 1 else ''}"
        found += f", fewer than --min-np {self.limits.min_size}"
        if now >= self._too_few_since + self._reported_after_s:
            self._shortage = found
        if now < self._too_few_since + self.limits.timeout_s:
            return []
        reason = f"{found}, and no more have appeared within {self.limits.timeout_s:g} s"
        self._too_few_since = None
        if not any(item.generation for item in self._members.values()):
            return self._end(reason, cause=self._lost_now, resumable=True)
        # They have a state and get the time to save it.
        self._parting, self._parts_until = reason, now + _PARTING_S
        return self.all_leave(now)

    @property
    def _reported_after_s(self) -> float:
        return min(_REPORTED_AFTER_S, self.limits.timeout_s / 2)

    @property
    def shortage(self) -> str:
        """Message about a shortage of processes or slots that has lasted for a while; empty: none."""
        return self._shortage

    def standing(self, now: float) -> Standing:
        """The present view for :func:`polyhvd.elastic.standing.decide`. Read it before the next event."""
        return Standing(
            now=now,
            limits=self.limits,
            hosts=self._hosts,
            departed_hosts=self._departed_hosts,
            slots=self._slots,
            cooldowns=self._cooldowns,
            members=self._members,
            world=self._world,
            next_world=self._next_world(),
            late=self._late(),
            least=self._least(),
            over=self._over,
            leaving=self._leaving,
            finishing=self._finishing,
            parting=self._parting,
            too_few_since=self._too_few_since,
        )

    def _end(self, reason: str, cause: int | None = None, *, resumable: bool = False) -> list[Action]:
        self._over = self._has_failed = True
        return [End(reason, cause, resumable)]
