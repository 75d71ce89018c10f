"""The current state of an elastic job and its reason: a state for each slot, a sentence for the job. Pure.

It reads the state of :class:`polyhvd.elastic.membership.Membership`, and changes nothing there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from polyhvd.elastic.members import FormedWorld, Member, Slot, Standing

__all__ = [
    "Decision",
    "Doing",
    "SlotState",
    "Wait",
    "counted",
    "decide",
    "lasting",
    "named",
    "slot_states",
    "state_of",
]

#: Maximum number of waits that a sentence names.
_NAMED_MAX = 3


class SlotState(Enum):
    """The state of a slot. :func:`state_of` chooses the first of these that applies."""

    ENDING = "ending"  #: its process is not needed any more, and has not ended yet
    DYING = "dying"  #: other ranks have seen its process dead, the launcher has not
    LEAVING = "leaving"  #: its process leaves with notice at the next boundary
    STARTING = "starting"  #: its process has not called init() yet
    READY = "ready"  #: its process waits for its first place in a world
    ARRIVED = "arrived"  #: its process has left the last world, and waits for the next one
    JOINING = "joining"  #: its process has joined a job that runs, and has not reached its elastic function
    TRAINING = "training"  #: its process is in the world
    DONE = "done"  #: its process has finished the program
    EMPTY = "empty"  #: given up: used again only if fewer than --min-np would be left
    UNFIT = "unfit"  #: its host could not take part, and is tried again later
    COOLING = "cooling"  #: its process has failed, and the next one is started later
    FREE = "free"  #: a process can be started


class Doing(Enum):
    """States of a job. For an elastic one, :func:`decide` chooses the first of these that applies."""

    ENDS = "ends"  #: nothing more will be started
    LEAVES = "leaves"  #: every process leaves with notice
    FINISHES = "finishes"  #: some ranks have finished the program
    STARTS = "starts"  #: there has been no world yet
    WAITS = "waits"  #: for processes that the next world needs, or the present one
    CHANGES = "changes"  #: the world is to come to a boundary, since the next one has other members
    TRAINS = "trains"
    RUNS = "runs"  #: a job that is not elastic


@dataclass(frozen=True)
class Wait:
    """Something that the job waits for. Equal until an event: it has times and no durations."""

    name: str
    why: str
    since: float | None = None  #: when the wait began, if this is known
    until: float | None = None  #: when it ends by itself, if it does
    because: str = ""

    def text(self, now: float) -> str:
        """Return it as a part of a sentence."""
        since = "" if self.since is None else f" for {lasting(now - self.since)}"
        until = "" if self.until is None else f" for {lasting(self.until - now)} more"
        return f"{self.name}: {self.why}{since}{until}" + (f" ({self.because})" if self.because else "")


@dataclass(frozen=True)
class Decision:
    """The state of a job, and the reason. Equal until an event, see :class:`Wait`."""

    does: Doing
    what: str = ""  #: what it does, in words; empty: it only waits
    waits: tuple[Wait, ...] = ()
    reason: str = ""  #: why it waits at all
    until: float | None = None  #: when it gives up

    def sentence(self, now: float) -> str:
        """The decision in words, as of a time."""
        named = [wait.text(now) for wait in self.waits[:_NAMED_MAX]]
        more = len(self.waits) - len(named)
        named += [f"{more} more"] if more else []
        waits = f"waits for {'; '.join(named)}" if named else ""
        return "; ".join(part for part in (self.what, waits) if part)

    @property
    def is_healthy_start(self) -> bool:
        """Whether processes start for the first time, and none has failed."""
        return self.does is Doing.STARTS and not any(wait.until or wait.because for wait in self.waits)


def lasting(seconds: float) -> str:
    """A duration in words.

    Example::

        lasting(4.2)  # "4 s"
    """
    seconds = max(0.0, seconds)
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def state_of(slot: Slot, member: Member | None, now: float, *, host_is_cooling: bool = False) -> SlotState:
    """The state of a slot.

    Args:
        slot: which.
        member: its process; None: it has none.
        now: the time.
        host_is_cooling: whether its host could not take part, and is not tried yet.
    """
    if member is not None:
        return _state_with(member)
    if slot.done:
        return SlotState.DONE
    if slot.vacated:
        return SlotState.EMPTY
    if host_is_cooling:
        return SlotState.UNFIT
    return SlotState.COOLING if now < slot.free_at else SlotState.FREE


def _state_with(member: Member) -> SlotState:
    if member.dismissed:
        return SlotState.ENDING
    if member.dying:
        return SlotState.DYING
    if member.leaving:
        return SlotState.LEAVING
    if member.generation == 0:
        return SlotState.READY if member.waiting else SlotState.STARTING
    if member.waiting:
        return SlotState.ARRIVED
    return SlotState.TRAINING if member.joins_since is None else SlotState.JOINING


def slot_states(at: Standing) -> Iterator[tuple[str, int, int | None, SlotState]]:
    """Host, number, member and state of each slot that has a process, or has had one and may have another."""
    taken = {(item.host, item.slot): number for number, item in at.members.items()}
    for (host, number), slot in at.slots.items():
        member = taken.get((host, number))
        listed = at.hosts.get(host, 0)
        if member is None and not number < listed + at.limits.spares * bool(listed):
            continue
        cooldown = at.cooldowns.get(host)
        is_cooling = cooldown is not None and at.now < cooldown.until
        process = None if member is None else at.members[member]
        yield host, number, member, state_of(slot, process, at.now, host_is_cooling=is_cooling)


def decide(at: Standing) -> Decision:
    """The current state of the job, and the reason."""
    world = at.world
    if at.over:
        return Decision(Doing.ENDS, "ends", _living(at, "it has not ended"))
    if at.leaving:
        return Decision(Doing.LEAVES, "ends with notice", _living(at, "it has not left"), at.parting)
    if at.finishing:
        return Decision(Doing.FINISHES, "finishes", _living(at, "it has not finished"))
    if world is None or not world.members:
        return _gathering(at)
    if (changed := _changed(at, world)) is not None:
        return changed
    if world.notified:
        return Decision(Doing.CHANGES, f"changes its world at the next commit, since {_change(at, world)}")
    joining = [number for number in world.members if at.members[number].joins_since is not None]
    if joining:
        why = "it has not reached its elastic function"
        waits = [Wait(named(at, n), why, at.members[n].joins_since) for n in joining]
        return Decision(Doing.WAITS, waits=tuple(waits))
    count = len(world.members)
    return Decision(Doing.TRAINS, f"trains as generation {world.generation}, {counted(count, 'rank')}")


def _changed(at: Standing, world: FormedWorld) -> Decision | None:
    """The wait for a next world, if members of this one have requested it; else None."""
    waiting_since = [at.members[number].ready_at for number in world.members if at.members[number].waiting]
    if not (waiting_since or world.lost or world.failed):
        return None
    if not at.late:
        return _gathering(at)
    why = f"it has not left generation {world.generation}"
    dead = "it has died, and its agent has not reported it"
    since = min(waiting_since, default=None)
    waits = [Wait(named(at, n), dead if at.members[n].dying else why, since) for n in at.late]
    reason = ""
    if world.lost:
        reason = f"generation {world.generation} has lost {counted(len(world.lost), 'process')}"
    return Decision(Doing.WAITS, waits=tuple(waits), reason=reason)


def _gathering(at: Standing) -> Decision:
    """The wait for enough processes to be ready for a world."""
    ready = len(at.next_world)
    waits = [
        Wait(
            named(at, number),
            "it has been starting",
            item.since,
            because=at.slots[item.host, item.slot].why,
        )
        for number, item in at.members.items()
        if item.generation == 0 and not item.waiting and not item.dismissed
    ]
    does = Doing.STARTS if at.world is None else Doing.WAITS
    reason = f"{counted(ready, 'process')} of at least {at.least} {'is' if ready == 1 else 'are'} ready"
    if ready + len(waits) < at.least:
        waits += _missing(at)
    until = None if at.too_few_since is None else at.too_few_since + at.limits.timeout_s
    return Decision(does, waits=tuple(waits), reason=reason, until=until)


def _missing(at: Standing) -> list[Wait]:
    """The slots that could have more processes, and why they have none."""
    waits: dict[str, Wait] = {}  # an unfit host is named once
    for host, number, _, state in slot_states(at):
        slot, cooldown = at.slots.get((host, number)), at.cooldowns.get(host)
        name = f"slot {number} of {host}"
        if state is SlotState.UNFIT and cooldown is not None:
            waits[host] = Wait(host, "it is unfit, and not tried", until=cooldown.until, because=cooldown.why)
        elif state is SlotState.COOLING and slot is not None:
            why = f"it is not used after {counted(slot.failures, 'failure')}"
            waits[name] = Wait(name, why, until=slot.free_at, because=slot.why)
        elif state is SlotState.FREE:
            waits[name] = Wait(name, "its next process is about to start")
    slots = counted(sum(at.hosts.values()), "slot")
    return list(waits.values()) or [Wait("more hosts", f"the hosts have {slots}")]


def _change(at: Standing, world: FormedWorld) -> str:
    """Why a world is to have other members."""
    chosen = set(at.next_world)
    leaving = [f"{named(at, number)} leaves" for number in world.members if number not in chosen]
    joining = [f"{named(at, number)} joins" for number in at.next_world if number not in at.ranks]
    listed = leaving + joining
    more = [f"{len(listed) - _NAMED_MAX} more do"] if len(listed) > _NAMED_MAX else []
    return ", ".join([*listed[:_NAMED_MAX], *more]) or "its members were to change"


def _living(at: Standing, why: str) -> tuple[Wait, ...]:
    return tuple(Wait(named(at, number), why) for number in at.members)


def named(at: Standing, number: int) -> str:
    """The name of a living member in messages."""
    item = at.members[number]
    place = f" (rank {at.ranks[number]})" if number in at.ranks else ""
    spare = "spare " if not place and item.slot >= at.hosts.get(item.host, 0) else ""
    return f"{spare}process {number}{place} on {item.host}"


def counted(count: int, noun: str) -> str:
    """A number with its noun, as in "2 processes"."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"
