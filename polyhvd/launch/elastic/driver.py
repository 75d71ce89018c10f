"""The launcher's part in an elastic job: passes events to the membership, and executes its actions.

See :mod:`polyhvd.elastic.membership` for the decisions, and :mod:`polyhvd.elastic.places` for the messages of
members. All of it runs in the job's loop, except :meth:`Driver.observe` and the discovery's thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING

from polyhvd.elastic.limits import BEGUN, FINISHED
from polyhvd.elastic.membership import (
    Action,
    Dismiss,
    End,
    ExitKind,
    Finish,
    Form,
    Lose,
    Membership,
    Notify,
    Start,
)
from polyhvd.elastic.pace import Figure
from polyhvd.elastic.places import (
    BEGUN_CALLS,
    LEAVE_NOTICES,
    MESSAGES,
    PLACE_REQUESTS,
    PROGRESS,
    PROLOGUE,
    STEPS,
    PlaceReply,
    PlaceRequest,
    lost_scope,
    notice_scope,
    place_scope,
    places_scope,
)
from polyhvd.launch.elastic.account import Account
from polyhvd.launch.elastic.driven import RESUME_STATUS, DrivenJob, Elastic
from polyhvd.launch.elastic.slow import SlowRanks
from polyhvd.launch.hosts.lists import Host
from polyhvd.launch.job.blame import Ending, describe
from polyhvd.launch.job.control import Request
from polyhvd.launch.job.policy import Decision, GoOn, StartReplacement, StopOthers
from polyhvd.launch.job.situation import Situation
from polyhvd.observe.terminal import printable
from polyhvd.runtime.placement import Placement, placements

if TYPE_CHECKING:
    from polyhvd.launch.hosts.checks import Problem

__all__ = ["Driver"]

#: From a failure that ends the job to the end of the others, whose own errors may explain it.
_SETTLE_S = 0.1
_REJECTED_MAX = 16  # members whose replies are kept
_NAMED_MAX = 32  # in a message
_SIGNAL_STATUS = range(129, 129 + 64)  # of a shell whose program was killed
#: Raised when decoding a message that is invalid.
_INVALID = (ValueError, TypeError, KeyError, OverflowError, RecursionError)
#: Scopes of messages from members, besides their place requests.
_SCOPES = (BEGUN_CALLS, LEAVE_NOTICES, PROGRESS, MESSAGES, STEPS)
_FROM_OUTSIDE = (-signal.SIGKILL, 128 + signal.SIGKILL)


class Driver:
    """See the module; it is what the job's loop runs, see :class:`polyhvd.launch.job.ranks.Ranks`."""

    noun = "process"
    renews = True

    def __init__(self, elastic: Elastic, hosts: Sequence[Host]) -> None:
        self._membership = Membership(elastic.limits)
        self._limits = elastic.limits
        self._on_state_lost = elastic.on_state_lost
        self._replaces_failed = elastic.replaces_failed
        self._slow = SlowRanks(elastic, self._membership)
        self._account = Account(self._membership)
        self._discovery = elastic.discovery
        self._hosts = {host.name: host for host in hosts}
        self._numbers = {host.name: number for number, host in enumerate(hosts)}
        self._job: DrivenJob | None = None
        self._received: deque[tuple[str, int, bytes]] = deque()  # by the server's thread; needs no lock
        self._leaves: list[tuple[Request, set[int]]] = []  # requests, each with the members that it waits for
        self._signalled = self._stopped = False  # the job is ended from outside; at once
        self._place_requests: dict[int, PlaceRequest] = {}  # the last of each member that lives
        self._endings: dict[int, Ending] = {}  # of members that were lost, as far as they may be blamed
        self._resumable = False
        self._saved = PlaceRequest().commit  # after a failure: the newest that a member was asked to write
        self._shortage = ""  # the shortage that was printed last
        self._rejected: deque[int] = deque()  # members that requested a place after they were given up
        #: What the job's loop waits on: something was received.
        self.wake, self._alarm = os.pipe()
        for descriptor in (self.wake, self._alarm):
            os.set_blocking(descriptor, False)

    def close(self) -> None:
        """End the discovery."""
        if self._discovery is not None:
            self._discovery.close()
        for request, _ in self._leaves:
            request.close()
        os.close(self.wake)
        os.close(self._alarm)

    @property
    def over(self) -> bool:
        """Whether nothing more will be started."""
        return self._membership.over

    def summary(self, *, failed: bool) -> str:
        """The text to print at the end; empty: nothing."""
        if self._resumable:
            return f"status {RESUME_STATUS}: run the job again, to resume from its checkpoint"
        lost = 0 if failed else self._membership.replaced
        processes = f"{lost} process{'es' if lost > 1 else ''}"
        return f"the job has continued after the loss of {processes}" if lost else ""

    def observe(self, scope: str, member: int, value: bytes) -> None:
        """Queue a member's message; on the server's thread."""
        if scope.startswith(f"{PLACE_REQUESTS}/") or scope in _SCOPES:
            self._received.append((scope, member, value))
            self._ring()

    def _take_steps(self, member: int, value: bytes, now: float) -> None:
        assert self._job is not None
        if not self._continues:
            return
        try:
            figure = Figure.decoded(value)
        except _INVALID:
            return
        self._do(self._slow.add(member, figure, self._job, now))

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
        """Handle what was received, and the time."""
        assert self._job is not None
        with contextlib.suppress(BlockingIOError):
            while os.read(self.wake, 4096):
                pass
        while self._received:
            scope, member, value = self._received.popleft()
            if scope == LEAVE_NOTICES:
                self._job.rendezvous.drop(LEAVE_NOTICES)  # each member sends it once
                self._leave({member}, now)
                continue
            if scope == STEPS:
                self._take_steps(member, value, now)
                continue
            if scope == BEGUN_CALLS:
                self._membership.begins(member)
                continue
            if scope == PROGRESS:
                self._job.rendezvous.drop(PROGRESS)
                self._membership.progress()
                continue
            if scope == MESSAGES:
                self._report(printable(value.decode("utf-8", "replace")))
                continue
            try:
                request = PlaceRequest.decoded(value)
            except _INVALID:
                continue
            self._take_place_request(member, request, now)
        if self._stopped or self.over:
            self._dismiss_all()  # also those that requested a place before
        if self._stopped:
            return
        if self._membership.all_are_leaving:
            self._do(self._membership.time_is(now))  # one may not leave in time
            return
        if self._discovery is not None:
            for text in self._discovery.complaints():
                self._report(text)
            if (found := self._discovery.take()) is not None:
                self.discover(found, now)
        self._do(self._membership.time_is(now))
        self._report_shortage()
        if self._continues and (sentence := self._account.look(now)):
            self._report(printable(sentence))

    def _report_shortage(self) -> None:
        """Report a shortage that may end the job, once."""
        shortage = self._membership.shortage if self._continues else ""
        if shortage and not self._shortage:
            self._report(
                f"{shortage}: the job waits {self._limits.timeout_s:g} s for more (--elastic-timeout)"
            )
        self._shortage = shortage

    def _take_place_request(self, member: int, request: PlaceRequest, now: float) -> None:
        assert self._job is not None
        former = self._place_requests.get(member, request)
        if former.after != request.after:  # it has read the reply to that
            self._job.rendezvous.drop(place_scope(member, former.after))
        # A member that was given up may return when its host's network is restored.
        if not self._membership.has(member):
            self._reject(member, request)
            return
        self._place_requests[member] = request
        if self._stopped or self.over:
            return
        self._do(
            self._membership.request(
                member,
                request.after,
                now,
                connected=request.wired,
                progressed=request.progressed,
                failed=bool(request.failure),
                dead=request.dead,
                commit=request.commit,
            )
        )

    def next_at(self, now: float) -> float:
        """Return when :meth:`turn` has something to do even if nothing was received."""
        return min(self._membership.next_at(now), self._account.next_at(now))

    def on_ending(self, ending: Ending, running: Set[int], now: float) -> Decision:
        """Replace a member that was lost, or end the job if the failure would recur."""
        exit_kind = _exit_kind_of(ending)
        if exit_kind is ExitKind.FAILED and self._replaces_failed and ending.progress:
            exit_kind = ExitKind.LOST
        self._place_requests.pop(ending.rank, None)
        assert self._job is not None
        self._job.rendezvous.drop(places_scope(ending.rank))
        self._reply_to_leaves(ending.rank)
        if self._stopped:
            return GoOn()
        if exit_kind is not ExitKind.WELL:
            blamable = self._membership.blamable
            self._endings = {member: item for member, item in self._endings.items() if member in blamable}
            self._endings[ending.rank] = ending
        if self.over:  # for another reason, which is about to end this one, too
            if exit_kind in (ExitKind.LOST, ExitKind.KILLED) and self._membership.finished_without(
                ending.rank
            ):
                self._report(f"{describe(ending)}; the others have finished without it")
            return StopOthers(now + _SETTLE_S) if ending.failed else GoOn()
        counted = self._membership.staying | set(self._membership.ranks)
        has_finished = ending.progress == FINISHED
        staying = self._membership.staying & set(self._membership.ranks)
        if exit_kind is ExitKind.WELL and ending.progress == BEGUN and ending.rank in staying:
            self._report(f"{describe(ending)} before its training was over; the others continue without it")
        has_begun = bool(ending.progress)
        actions = self._membership.ended(
            ending.rank,
            exit_kind,
            now,
            has_begun=has_begun,
            has_finished=has_finished,
            is_within=ending.progress == BEGUN,
            why=describe(ending),
        )
        ends = [action for action in actions if isinstance(action, End)]
        if ends:  # ranks that have continued without it would train on until they are killed
            self._job.rendezvous.post(notice_scope(self._membership.formed), 0, b"")
        is_loss = ending.rank in counted and not self._membership.all_are_leaving and not has_finished
        if exit_kind in (ExitKind.LOST, ExitKind.KILLED) and not ends and is_loss:
            self._report(f"{describe(ending)}; the job continues")
        if exit_kind is ExitKind.UNSTARTABLE and not ends:
            self._report(f"{describe(ending)}; the job continues without it")
        if exit_kind is ExitKind.FAILED and not (ends or has_begun) and is_loss:
            self._report(f"{describe(ending)} before its elastic function; the job continues without it")
        if not any(end.cause == ending.rank for end in ends):
            self._do(actions)
            return GoOn() if exit_kind is ExitKind.WELL else StartReplacement()
        self._do(action for action in actions if not isinstance(action, End))
        if ends[0].reason:
            self._report(ends[0].reason)
        return StopOthers(now + _SETTLE_S, ends[0].reason)

    def refuse(self, number: int, problems: Sequence[Problem], now: float) -> set[int]:
        """Report why a host cannot take part, and continue without it; returns the members planned for it."""
        assert self._job is not None
        name = next(host for host, known in self._numbers.items() if known == number)
        for problem in problems:
            self._report(f"{name} cannot take part for now: {problem.what}: {problem.found}; {problem.cure}")
        gone = self._membership.unready_on(name)
        if self._stopped:  # the membership decides nothing more
            return gone
        why = "; ".join(f"{problem.what}: {problem.found}" for problem in problems)
        more_hosts_may_come = self._discovery is not None
        self._do(self._membership.host_unfit(name, now, more_hosts_may_come=more_hosts_may_come, why=why))
        return gone

    # Leaving

    def stop(self, now: float, *, notice: bool) -> None:
        """End the job on a signal: with notice, all members leave at their next boundary."""
        if self._job is None or self._stopped or self.over:
            return
        self._stopped, self._signalled = not notice, True
        if notice:
            self._do(self._membership.all_leave(now))

    def host_leaves(self, number: int, now: float) -> None:
        """The agent of a host has received SIGTERM."""
        name = next(host for host, known in self._numbers.items() if known == number)
        if self._continues:
            self._report(f"{name} leaves with notice")
        self._do(self._membership.host_leaves(name, now))

    @property
    def _continues(self) -> bool:
        return not (self.over or self._stopped or self._membership.all_are_leaving)

    def _leave(self, members: set[int], now: float) -> None:
        if self._continues:
            for member in sorted(members & self._membership.staying):
                self._report(f"{self._named(member)} leaves with notice")
        self._do(self._membership.leaves(sorted(members), now))

    def rank_of(self, member: int) -> int | None:
        """The rank of a process in the present world; None: it has none."""
        ranks = self._membership.ranks
        return ranks.index(member) if member in ranks else None

    def _named(self, member: int) -> str:
        rank = self.rank_of(member)
        place = "no rank" if rank is None else f"rank {rank}"
        return f"process {member} ({place}) on {self._membership.host_of(member)}"

    def situation(self, running: Set[int], late: Mapping[str, float], now: float) -> Situation:
        """The current state of the job; see :meth:`polyhvd.launch.job.ranks.Ranks.situation`."""
        return self._account.situation(late.keys(), self._slow.step_s, now)

    def obey(self, request: Request, now: float) -> None:
        """Handle a request that ranks or hosts leave."""
        try:
            hosts = [str(host) for host in request.content["hosts"]]
            members = {int(number) for number in request.content["processes"]}
            wanted = [int(rank) for rank in request.content["ranks"]]
        except (KeyError, TypeError, ValueError, OverflowError):  # JSON has infinities
            hosts, members, wanted = [], set(), []
        ranks = self._membership.ranks
        members |= {ranks[rank] if 0 <= rank < len(ranks) else -1 for rank in wanted}
        unknown = [host for host in hosts if host not in self._hosts]
        staying = self._membership.staying
        if unknown or not members <= staying or not (hosts or members):
            known = _some([self._named(member) for member in sorted(staying)])
            request.answer(error=f"no such host or process; hosts: {_some(list(self._hosts))}; {known}")
            request.close()
            return
        leaving = members | {member for member in staying if self._membership.host_of(member) in hosts}
        request.answer(leaving=[*map(self._named, sorted(leaving)), *hosts])
        for host in hosts:
            self.host_leaves(self._numbers[host], now)
        self._leave(members, now)
        if request.content.get("wait"):
            self._leaves.append((request, leaving))
            self._reply_to_leaves(-1)
        else:
            request.close()

    def _reply_to_leaves(self, gone: int) -> None:
        """A process has ended: reply to requests that waited for it to leave."""
        for request, members in self._leaves:
            members.discard(gone)
            if not members:
                request.answer(left=True)
                request.close()
        self._leaves = [item for item in self._leaves if item[1]]

    # Doing

    def _report(self, text: str) -> None:
        assert self._job is not None
        self._job.report(text)

    def _slots(self) -> dict[str, int]:
        return {host.name: host.slots for host in self._hosts.values()}

    def discover(self, found: Mapping[str, int], now: float) -> None:
        """These are the hosts now, with their slots."""
        for name in found:
            self._numbers.setdefault(name, len(self._numbers))
        self._hosts = {name: Host(name, slots) for name, slots in found.items()}
        self._do(self._membership.hosts_are(self._slots(), now))

    def _do(self, actions: Iterable[Action], *, first: bool = False) -> None:
        listed = list(actions)
        assert self._job is not None
        starts = [action for action in listed if isinstance(action, Start)]
        is_known = first and len(starts) <= self._limits.size  # else ranks depend on which ones are the first
        known = placements([action.host for action in starts]) if is_known else []
        for action in listed:
            if isinstance(action, Start):
                place = known[action.member] if action.member < len(known) else None
                self._start(action, place)
            elif isinstance(action, Form):
                self._form(action)
            elif isinstance(action, Lose):
                if action.reason:
                    self._report(f"{action.reason}; the job continues without it")
                    self._job.kill_member(action.member)
                reason = action.reason or describe(self._endings[action.member])
                text = json.dumps([True, f"{reason} while the ranks met"]).encode()
                self._job.rendezvous.post(f"init/{action.generation}/failed", 0, text)
                self._job.rendezvous.post(lost_scope(action.generation), 0, reason.encode())
            elif isinstance(action, Notify):
                self._job.rendezvous.post(notice_scope(action.generation), 0, b"")
            elif isinstance(action, Dismiss):
                self._dismiss(action.member)
            elif isinstance(action, Finish):
                self._dismiss_all()
                self._job.finish()
            else:
                self._end(action)

    def _start(self, action: Start, place: Placement | None) -> None:
        assert self._job is not None
        host = self._hosts[action.host]
        number = str(self._numbers[action.host])
        local_size = max(host.slots, action.slot + 1)
        knows_rank = place is not None
        if place is None:  # it receives its rank in the reply to its place request
            place = Placement(1, 0, local_size, action.slot, local_size, 0, 1, number)
        self._job.start_member(
            action.member, place, Host(host.name, host.slots), int(number), knows_rank=knows_rank
        )

    def _form(self, action: Form) -> None:
        assert self._job is not None
        generation = action.generation
        hosts = [str(self._numbers[host]) for host in action.hosts]
        members = list(action.members)
        oldest = next(
            (self._place_requests[m] for m in members if self._place_requests[m].after), PlaceRequest()
        )
        ranks = {member: rank for rank, member in enumerate(members)}
        sets = [sorted(ranks[m] for m in those if m in ranks) for those in oldest.sets]
        call = max(self._place_requests[member].call for member in members)
        if call == 0:  # all that have recorded results are lost
            self._job.rendezvous.drop(PROLOGUE)
        numbers = {self._numbers[host] for host in action.hosts}
        for former in (generation - 2, generation - 1):
            self._job.rendezvous.drop(f"init/{former}/")
            for scope in (notice_scope(former), lost_scope(former)):
                self._job.rendezvous.drop(scope, waiters=True)
        replies: dict[str, bytes] = {}  # by endpoint: agents expect a heartbeat while thousands are encoded
        for member, host in zip(members, action.hosts, strict=True):
            endpoint = self._job.endpoint(self._numbers[host], numbers)
            if endpoint not in replies:
                replies[endpoint] = PlaceReply(
                    generation,
                    members,
                    hosts,
                    sets,
                    call=call,
                    rendezvous=endpoint,
                    max_size=self._limits.max_size,
                    state_lost=self._on_state_lost if action.state_lost else "",
                ).encoded()
            scope = place_scope(member, self._place_requests[member].after)
            self._job.rendezvous.post(scope, 0, replies[endpoint])
        self._slow.begin(action, self._job)
        size = len(members)
        if generation > 1 or size < self._limits.size:
            self._report(f"generation {generation}: {size} rank{'s' if size > 1 else ''}")

    def _dismiss_all(self) -> None:
        """Dismiss all members that wait for a place. If the job has failed, one writes the newest commit."""
        newest_first = sorted(self._place_requests.items(), key=lambda item: item[1].commit, reverse=True)
        for member, request in newest_first:
            waits = self._membership.awaits_place(member, request.after)
            saves = self._membership.has_failed and waits and request.commit > self._saved
            self._saved = request.commit if saves else self._saved
            self._dismiss(member, saves=saves)
        self._place_requests.clear()

    def _reject(self, member: int, request: PlaceRequest) -> None:
        """Reply to a process that is not a member; some of these have ended and read no reply."""
        assert self._job is not None
        self._job.rendezvous.post(place_scope(member, request.after), 0, PlaceReply(0).encoded())
        if len(self._rejected) == _REJECTED_MAX:
            self._job.rendezvous.drop(places_scope(self._rejected.popleft()))
        self._rejected.append(member)

    def _dismiss(self, member: int, *, saves: bool = False) -> None:
        assert self._job is not None
        request = self._place_requests.get(member)
        if request is not None:
            scope = place_scope(member, request.after)
            leaves = self._membership.leaves_by(member)
            answer = PlaceReply(0, self._membership.departed_world(member), leaves=leaves, saves=saves)
            self._job.rendezvous.post(scope, 0, answer.encoded())

    def _end(self, action: End) -> None:
        assert self._job is not None
        if self._signalled:
            return  # it ends anyway
        cause = None if action.cause is None else self._endings.get(action.cause)
        failures = [
            f"process {m} reports: {q.failure}" for m, q in sorted(self._place_requests.items()) if q.failure
        ]
        reason = action.reason if cause is not None or not failures else f"{action.reason}; {failures[0]}"
        self._resumable = action.resumable
        self._job.end(reason, cause, RESUME_STATUS if action.resumable else 1)


def _some(names: Sequence[str]) -> str:
    """The first of several names, as a list in a message."""
    more = [f"{len(names) - _NAMED_MAX} more"] if len(names) > _NAMED_MAX else []
    return ", ".join([*names[:_NAMED_MAX], *more])


def _exit_kind_of(ending: Ending) -> ExitKind:
    if not ending.failed:
        return ExitKind.WELL
    if ending.unstartable:
        return ExitKind.UNSTARTABLE
    if ending.reason or ending.status in _FROM_OUTSIDE:
        return ExitKind.KILLED
    crashed = ending.status < 0 or ending.status in _SIGNAL_STATUS
    return ExitKind.LOST if crashed or ending.certainty == 2 else ExitKind.FAILED
