"""The launcher's part in an elastic job: hears what happens, asks the membership, and does what it says.

See :mod:`polyhvd.elastic.membership`, which decides, and :mod:`polyhvd.elastic.places`, in whose words
members ask. All of it runs in the job's loop, but for :meth:`Driver.observe` and the discovery's thread.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING

from polyhvd.elastic.membership import (
    Action,
    Dismiss,
    End,
    Fate,
    Finish,
    Form,
    Lose,
    Membership,
    Notify,
    Start,
)
from polyhvd.elastic.places import ASKS, Answer, Question, lost_scope, notice_scope, place_scope
from polyhvd.launch.blame import Ending, describe
from polyhvd.launch.driven import RESUME_STATUS, DrivenJob, Elastic
from polyhvd.launch.hosts import Host
from polyhvd.launch.policy import Decision, GoOn, StartReplacement, StopOthers
from polyhvd.runtime.placement import Placement, placements

if TYPE_CHECKING:
    from polyhvd.launch.host_checks import Problem

__all__ = ["Driver"]

#: From a failure that ends the job to the end of the others: their own last words may explain it.
_SETTLE_S = 0.1
_SIGNAL_STATUS = range(129, 129 + 64)  # of a shell whose program was killed


class Driver:
    """See the module; a policy of failures as well, see :class:`polyhvd.launch.policy.FailurePolicy`."""

    def __init__(self, elastic: Elastic, hosts: Sequence[Host]) -> None:
        self._membership = Membership(elastic.limits)
        self._limits = elastic.limits
        self._discovery = elastic.discovery
        self._hosts = {host.name: host for host in hosts}
        self._numbers = {host.name: number for number, host in enumerate(hosts)}
        self._job: DrivenJob | None = None
        self._told: deque[tuple[int, bytes]] = deque()  # by the server's thread; needs no lock
        self._questions: dict[int, Question] = {}  # the last of each member that lives
        self._endings: dict[int, Ending] = {}  # of members that were lost
        self._resumable = False
        #: What the job's loop waits on: something was told.
        self.wake, self._alarm = os.pipe()
        for descriptor in (self.wake, self._alarm):
            os.set_blocking(descriptor, False)

    def close(self) -> None:
        """End the discovery."""
        if self._discovery is not None:
            self._discovery.close()
        os.close(self.wake)
        os.close(self._alarm)

    @property
    def over(self) -> bool:
        """Whether nothing more will be started."""
        return self._membership.over

    def summary(self, *, failed: bool) -> str:
        """What to say at the end; empty: nothing."""
        if self._resumable:
            return f"status {RESUME_STATUS}: run the job again, to resume from its checkpoint"
        lost = 0 if failed else self._membership.replaced
        processes = f"{lost} process{'es' if lost > 1 else ''}"
        return f"the job has gone on after the loss of {processes}" if lost else ""

    def observe(self, scope: str, member: int, value: bytes) -> None:
        """A member has written something; on the server's thread."""
        if scope.startswith(f"{ASKS}/"):
            self._told.append((member, value))
            self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._alarm, b"+")

    def begin(self, job: DrivenJob, now: float) -> None:
        """Start the first processes."""
        self._job = job
        self._do(self._membership.hosts_are(self._slots(), now), first=True)
        if self._discovery is not None:
            self._discovery.begin(self._ring)

    def turn(self, now: float) -> None:
        """Look at what was told, and at the time."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.wake, 4096):
                pass
        while self._told:
            member, value = self._told.popleft()
            with contextlib.suppress(ValueError, TypeError, KeyError):  # no question of ours
                question = Question.decoded(value)
                self._questions[member] = question
                self._do(
                    self._membership.asks(
                        member,
                        question.after,
                        now,
                        wired=question.wired,
                        progressed=question.progressed,
                        failed=bool(question.failure),
                    )
                )
        if self._discovery is not None:
            for text in self._discovery.complaints():
                self._say(text)
            if (found := self._discovery.take()) is not None:
                self._discover(found, now)
        self._do(self._membership.time_is(now))

    def next_at(self, now: float) -> float:
        """When :meth:`turn` has something to do though nothing was told."""
        return self._membership.next_at(now)

    def on_ending(self, ending: Ending, running: Set[int], now: float) -> Decision:
        """Have a member that was lost replaced, and end the job for what would only recur."""
        fate = _fate_of(ending)
        self._questions.pop(ending.rank, None)
        if fate is not Fate.WELL:
            self._endings[ending.rank] = ending
        if self.over:  # of another cause, which is about to end this one, too
            return StopOthers(now + _SETTLE_S) if ending.failed else GoOn()
        actions = self._membership.ended(ending.rank, fate, now)
        ends = [action for action in actions if isinstance(action, End)]
        if fate is Fate.LOST and not ends:
            self._say(f"{describe(ending)}; the job goes on")
        if not any(end.cause == ending.rank for end in ends):
            self._do(actions)
            return GoOn() if fate is Fate.WELL else StartReplacement()
        self._do(action for action in actions if not isinstance(action, End))
        if ends[0].reason:
            self._say(ends[0].reason)
        return StopOthers(now + _SETTLE_S)

    def refuse(self, number: int, problems: Sequence[Problem], now: float) -> set[int]:
        """A host cannot take part: say why, and go on without it; returns the members that it was to have."""
        assert self._job is not None
        name = next(host for host, known in self._numbers.items() if known == number)
        for problem in problems:
            self._say(f"{name} cannot take part for now: {problem.what}: {problem.found}; {problem.cure}")
        gone = self._membership.unready_on(name)
        self._do(self._membership.host_unfit(name, now, others_may_come=self._discovery is not None))
        return gone

    # Doing

    def _say(self, text: str) -> None:
        assert self._job is not None
        self._job.say(text)

    def _slots(self) -> dict[str, int]:
        return {host.name: host.slots for host in self._hosts.values()}

    def _discover(self, found: Mapping[str, int], now: float) -> None:
        for name in found:
            self._numbers.setdefault(name, len(self._numbers))
        self._hosts = {name: Host(name, slots) for name, slots in found.items()}
        self._do(self._membership.hosts_are(self._slots(), now))

    def _do(self, actions: Iterable[Action], *, first: bool = False) -> None:
        listed = list(actions)
        assert self._job is not None
        starts = [action for action in listed if isinstance(action, Start)]
        known = placements([action.host for action in starts][: self._limits.size]) if first else []
        for action in listed:
            if isinstance(action, Start):
                place = known[action.member] if action.member < len(known) else None
                self._start(action, place)
            elif isinstance(action, Form):
                self._form(action)
            elif isinstance(action, Lose):
                ending = self._endings[action.member]
                text = json.dumps([True, f"{describe(ending)} while the ranks met"]).encode()
                self._job.rendezvous.post(f"init/{action.generation}/failed", 0, text)
                self._job.rendezvous.post(lost_scope(action.generation), 0, describe(ending).encode())
            elif isinstance(action, Notify):
                self._job.rendezvous.post(notice_scope(action.generation), 0, b"")
            elif isinstance(action, Dismiss):
                self._dismiss(action.member)
            elif isinstance(action, Finish):
                for member in list(self._questions):
                    self._dismiss(member)
                self._job.finish()
            else:
                self._end(action)

    def _start(self, action: Start, place: Placement | None) -> None:
        assert self._job is not None
        host = self._hosts[action.host]
        number = str(self._numbers[action.host])
        local_size = max(host.slots, action.slot + 1)
        if place is None:  # it is told its place when it has asked for one; this is what scripts may read
            size = max(self._limits.size, local_size)
            rank = min(action.member, size - 1)
            place = Placement(1, rank, size, action.slot, local_size, 0, 1, number)
        self._job.start_member(action.member, place, Host(host.name, host.slots), int(number))

    def _form(self, action: Form) -> None:
        assert self._job is not None
        generation = action.generation
        hosts = [str(self._numbers[host]) for host in action.hosts]
        members = list(action.members)
        oldest = next((self._questions[m] for m in members if self._questions[m].after), Question())
        ranks = {member: rank for rank, member in enumerate(members)}
        sets = [sorted(ranks[m] for m in those if m in ranks) for those in oldest.sets]
        numbers = {self._numbers[host] for host in action.hosts}
        for former in (generation - 2, generation - 1):
            self._job.rendezvous.drop(f"init/{former}/")
            for scope in (notice_scope(former), lost_scope(former)):
                self._job.rendezvous.drop(scope, waiters=True)
        for member, host in zip(members, action.hosts, strict=True):
            endpoint = self._job.endpoint(self._numbers[host], numbers)
            answer = Answer(generation, members, hosts, sets, endpoint).encoded()
            self._job.rendezvous.post(place_scope(member, self._questions[member].after), 0, answer)
        size = len(members)
        if generation > 1 or size < self._limits.size:
            self._say(f"generation {generation}: {size} rank{'s' if size > 1 else ''}")

    def _dismiss(self, member: int) -> None:
        assert self._job is not None
        question = self._questions.get(member)
        if question is not None:
            scope = place_scope(member, question.after)
            self._job.rendezvous.post(scope, 0, Answer(0).encoded())

    def _end(self, action: End) -> None:
        assert self._job is not None
        cause = None if action.cause is None else self._endings.get(action.cause)
        said = [f"process {m} says: {q.failure}" for m, q in sorted(self._questions.items()) if q.failure]
        reason = action.reason if cause is not None or not said else f"{action.reason}; {said[0]}"
        self._resumable = action.resumable
        self._job.end(reason, cause, RESUME_STATUS if action.resumable else 1)


def _fate_of(ending: Ending) -> Fate:
    if not ending.failed:
        return Fate.WELL
    if ending.unstartable:
        return Fate.UNSTARTABLE
    killed = ending.status < 0 or bool(ending.reason) or ending.status in _SIGNAL_STATUS
    return Fate.LOST if killed or ending.certainty == 2 else Fate.FAILED
