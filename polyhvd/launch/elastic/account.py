"""Describes what an elastic job does: for its user, and for ``polyhvd status``."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any

from polyhvd.elastic.members import Standing
from polyhvd.elastic.membership import Membership
from polyhvd.elastic.standing import Decision, Doing, SlotState, decide, slot_states
from polyhvd.launch.job.situation import HostSituation, Situation, SlotSituation, WorldSituation

__all__ = ["Account"]

#: A wait is printed after this time, and another one not earlier than the second time after that.
_PRINTED_AFTER_S, _PRINTED_AGAIN_S = 3.0, 10.0
#: States for which the slot knows a reason.
_FAILED = (SlotState.COOLING, SlotState.EMPTY, SlotState.STARTING)


class Account:
    """See the module.

    Args:
        membership: of the job.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._decision = Decision(Doing.STARTS)
        self._since: float | None = None  # when the job began to do what it does
        self._printed: Decision | None = None
        self._prints_at = float("inf")  # no sentence is printed before

    def look(self, now: float) -> str:
        """Look at what the job does now; returns a sentence to print; empty: none."""
        decision = self._decide(self._membership.standing(now))
        if decision.does not in (Doing.STARTS, Doing.WAITS) or decision.is_healthy_start:
            self._printed, self._prints_at = None, float("inf")
            return ""
        if self._prints_at == float("inf"):
            self._prints_at = now + _PRINTED_AFTER_S
        if now < self._prints_at or decision == self._printed:
            return ""
        self._printed, self._prints_at = decision, now + _PRINTED_AGAIN_S
        return decision.sentence(now)

    def _decide(self, at: Standing) -> Decision:
        decision = decide(at)
        if decision.does is not self._decision.does or self._since is None:
            self._since = at.now
        self._decision = decision
        return decision

    def next_at(self, now: float) -> float:
        """Return when :meth:`look` may have something to print, after now; infinite: never."""
        is_due = self._decision != self._printed and self._prints_at > now
        return self._prints_at if is_due else float("inf")

    def situation(self, late: Set[str], step_s: float | None, now: float) -> Situation:
        """The current state of the job.

        Args:
            late: hosts whose agents have not answered.
            step_s: how long a step of the present world takes; None: it is not known.
            now: the time.
        """
        at = self._membership.standing(now)
        decision = self._decide(at)
        world = None
        if at.world is not None:
            world = WorldSituation(at.world.generation, len(at.world.members), at.world.since)
        call, number = max((item.commit for item in at.members.values()), default=(0, -1))
        facts: dict[str, Any] = {"commit": {"call": call, "number": number} if number >= 0 else None}
        facts["step_s"] = step_s
        slots = list(_slots(at, late))
        return Situation(decision, self._since, world, slots, list(_hosts(at)), facts)


def _slots(at: Standing, late: Set[str]) -> Iterator[SlotSituation]:
    for host, number, member, state in slot_states(at):
        slot = at.slots[host, number]
        why = slot.why if state in _FAILED else ""
        if state is SlotState.STARTING and host in late:
            why = "its agent has not answered"
        rank = None if member is None else at.ranks.get(member)
        until = slot.free_at if state is SlotState.COOLING else None
        yield SlotSituation(host, number, state.value, rank, member, why, until)


def _hosts(at: Standing) -> Iterator[HostSituation]:
    for host, cooldown in at.cooldowns.items():
        if at.now < cooldown.until:
            yield HostSituation(host, "unfit", cooldown.why, cooldown.until)
    for host in sorted(at.departed_hosts):
        yield HostSituation(host, "left", "it has left with notice; it is used again when it is listed again")
