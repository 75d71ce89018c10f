"""What the launcher of an elastic job does about slow ranks: it says who they are, and has them replaced."""

from __future__ import annotations

import json
import time
from dataclasses import asdict

from polyhvd.elastic.membership import Action, Form, Membership
from polyhvd.elastic.pace import Figure, Judge, SlowMember, SlowRank
from polyhvd.elastic.places import slow_scope
from polyhvd.launch.elastic.driven import DrivenJob, Elastic

__all__ = ["SlowRanks"]

#: After a replacement, until the next one: doubled each time, since where many in a row are slow, another
#: process is no help.
_REST_S, _REST_S_MAX = 60.0, 3600.0
#: So long a rank is slow until it is replaced: what it suffers from may be over by then.
_PATIENCE_S = 6.0
#: Of what was reported, so much is kept for members that are behind.
_KEPT = 16


class SlowRanks:
    """See the module.

    Args:
        elastic: whether slow ranks are replaced, and who is one.
        membership: of the job.
    """

    def __init__(self, elastic: Elastic, membership: Membership) -> None:
        self._judge = Judge(elastic.slow_factor)
        self._evicts = elastic.evicts_slow
        self._membership = membership
        self._formed = Form(0, (), ())
        self._number = 0  # of what was reported in this world
        self._named: set[int] = set()  # members of which the user knows that they are slow
        self._rest_s = _REST_S
        self._rests_until = 0.0

    @property
    def step_s(self) -> float | None:
        """How long a step of this world takes; None: no member has reported it."""
        return self._judge.step_s

    def begin(self, formed: Form, job: DrivenJob) -> None:
        """A world is formed: what was said of the last one is over."""
        job.rendezvous.drop(f"elastic/slow/{self._formed.generation}/", waiters=True)
        self._formed, self._number = formed, 0
        self._named &= set(formed.members)
        self._judge.begin(formed.generation, formed.members)

    def add(self, member: int, figure: Figure, job: DrivenJob, now: float) -> list[Action]:
        """A member has said how long its steps take."""
        if self._judge.add(member, figure, now):
            self._tell(job, now)
        if not self._evicts or now < self._rests_until:
            return []
        for item in self._judge.slow:
            if now < item.since + _PATIENCE_S:
                continue
            if actions := self._membership.evict(item.member, now):
                job.say(f"process {item.member}, which is rank {self._rank(item)}, leaves: a spare is faster")
                self._rests_until = now + self._rest_s
                self._rest_s = min(2.0 * self._rest_s, _REST_S_MAX)
                return actions
        return []

    def _rank(self, item: SlowMember) -> int:
        return self._formed.members.index(item.member)

    def _tell(self, job: DrivenJob, now: float) -> None:
        ranks = []
        slow = {item.member for item in self._judge.slow}
        for item in self._judge.slow:
            rank = self._rank(item)
            since = time.time() - (now - item.since)
            figures = (item.own_s, item.typical_s, since, item.data_s)
            ranks.append(SlowRank(rank, self._formed.hosts[rank], *figures))
            if item.member not in self._named:
                job.say(f"{ranks[-1]}; it is process {item.member}")
        for member in sorted(self._named - slow):
            rank = self._formed.members.index(member)
            job.say(f"rank {rank} on {self._formed.hosts[rank]} is slow no more; it is process {member}")
        self._named = slow
        self._number += 1
        generation = self._formed.generation
        data = json.dumps([asdict(item) for item in ranks]).encode()
        job.rendezvous.post(slow_scope(generation, self._number), 0, data)
        job.rendezvous.drop(slow_scope(generation, self._number - _KEPT))
