"""Reports the slow ranks of an elastic job, and replaces them if asked to."""

from __future__ import annotations

import json
import time
from dataclasses import asdict

from polyhvd.elastic.membership import Action, Form, Membership
from polyhvd.elastic.pace import Figure, SlowMember, SlowMemberDetector, SlowRank
from polyhvd.elastic.places import slow_scope
from polyhvd.launch.elastic.driven import DrivenJob, Elastic

__all__ = ["SlowRanks"]

#: Cooldown after a replacement, doubled each time: if many in a row are slow, another process does not help.
_COOLDOWN_S, _COOLDOWN_S_MAX = 60.0, 3600.0
#: How long a rank has to be slow before it is replaced.
_PATIENCE_S = 6.0
#: Number of reports that are kept for members that are behind.
_KEPT = 16


class SlowRanks:
    """See the module.

    Args:
        elastic: whether slow ranks are replaced, and which ranks count as slow.
        membership: of the job.
    """

    def __init__(self, elastic: Elastic, membership: Membership) -> None:
        self._detector = SlowMemberDetector(elastic.slow_factor)
        self._evicts = elastic.evicts_slow
        self._membership = membership
        self._formed = Form(0, (), ())
        self._number = 0  # of what was reported in this world
        self._named: set[int] = set()  # members that were reported to the user
        self._cooldown_s = _COOLDOWN_S
        self._cooling_until = 0.0

    @property
    def step_s(self) -> float | None:
        """How long a step of this world takes; None: no member has reported it."""
        return self._detector.step_s

    def begin(self, formed: Form, job: DrivenJob) -> None:
        """A world is formed: drop the reports of the last one."""
        job.rendezvous.drop(f"elastic/slow/{self._formed.generation}/", waiters=True)
        self._formed, self._number = formed, 0
        self._named &= set(formed.members)
        self._detector.begin(formed.generation, formed.members)

    def add(self, member: int, figure: Figure, job: DrivenJob, now: float) -> list[Action]:
        """Take a member's report of how long its steps take."""
        if self._detector.add(member, figure, now):
            self._publish(job, now)
        if not self._evicts or now < self._cooling_until:
            return []
        for item in self._detector.slow:
            if now < item.since + _PATIENCE_S:
                continue
            if actions := self._membership.evict(item.member, now):
                job.report(
                    f"process {item.member}, which is rank {self._rank(item)}, leaves: a spare is faster"
                )
                self._cooling_until = now + self._cooldown_s
                self._cooldown_s = min(2.0 * self._cooldown_s, _COOLDOWN_S_MAX)
                return actions
        return []

    def _rank(self, item: SlowMember) -> int:
        return self._formed.members.index(item.member)

    def _publish(self, job: DrivenJob, now: float) -> None:
        ranks = []
        slow = {item.member for item in self._detector.slow}
        for item in self._detector.slow:
            rank = self._rank(item)
            since = time.time() - (now - item.since)
            figures = (item.own_s, item.typical_s, since, item.data_s)
            ranks.append(SlowRank(rank, self._formed.hosts[rank], *figures))
            if item.member not in self._named:
                job.report(f"{ranks[-1]}; it is process {item.member}")
        for member in sorted(self._named - slow):
            rank = self._formed.members.index(member)
            job.report(f"rank {rank} on {self._formed.hosts[rank]} is no longer slow; it is process {member}")
        self._named = slow
        self._number += 1
        generation = self._formed.generation
        data = json.dumps([asdict(item) for item in ranks]).encode()
        job.rendezvous.post(slow_scope(generation, self._number), 0, data)
        job.rendezvous.drop(slow_scope(generation, self._number - _KEPT))
