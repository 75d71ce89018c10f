"""Runs one job: ranks on hosts, from the first agent to the last exit.

The policy decides what follows when a rank fails. Signals to the launcher are passed on, gently first.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from polyhvd.elastic.standing import Decision, Doing, Wait
from polyhvd.launch.elastic.admission import Admission
from polyhvd.launch.elastic.driven import RESUME_STATUS
from polyhvd.launch.hosts.lists import Host
from polyhvd.launch.job import agent
from polyhvd.launch.job.agents import Agents
from polyhvd.launch.job.blame import Ending, traceback_lines, trim
from polyhvd.launch.job.control import CommandRequests
from polyhvd.launch.job.heartbeats import Heartbeats, Outboxes
from polyhvd.launch.job.metrics import JobMetrics
from polyhvd.launch.job.output import Output, await_reader
from polyhvd.launch.job.policy import StartReplacement, StopOthers
from polyhvd.launch.job.programs import rank_environment
from polyhvd.launch.job.ranks import ranks_of
from polyhvd.launch.job.signals import passing_signals_to, stop_like_others
from polyhvd.launch.job.situation import Situation, answers, ending
from polyhvd.launch.job.spec import JobSpec, address_of
from polyhvd.launch.job.stopping import Stopping
from polyhvd.launch.job.verdict import Verdict
from polyhvd.launch.providers.local_agents import LocalAgents
from polyhvd.launch.providers.starting import AgentProvider, HostAgent
from polyhvd.rendezvous import network
from polyhvd.rendezvous.auth import new_secret, parse_secret
from polyhvd.rendezvous.server import Server
from polyhvd.runtime.metrics import SCOPE
from polyhvd.runtime.placement import Placement

if TYPE_CHECKING:
    from polyhvd.launch.hosts.checks import HostChecks
    from polyhvd.launch.job.endpoint import Endpoint

__all__ = ["Job", "JobSpec"]

#: After a signal: how long a reader may leave our output where it is.
_STUCK_OUTPUT_S = 2.0
#: While the launcher's output is not read: how long agents continue, and bytes kept of each one.
_HOLD_AFTER_S = 0.5
_ASIDE_BYTES_MAX = 4 << 20
#: For the process of an agent that has ended, and between two looks at it.
_CLOSE_S, _CLOSING_LOOK_S = 5.0, 0.005


class Job:
    """One run of a job. ``secret`` and ``rendezvous`` exist from construction to ``close``."""

    def __init__(self, spec: JobSpec, output: Output) -> None:
        """Open the rendezvous; raises ValueError or OSError where there is no usable address."""
        self._spec = spec
        self._output = output
        self.report = output.report
        self._heartbeats = Heartbeats(spec.heartbeat_timeout_s)
        self.secret = spec.secret or new_secret()
        self._local = [] if spec.agents else [network.is_local(host.name) for host in spec.hosts]
        self._hosts = list(spec.hosts)
        self._ranks = ranks_of(spec)
        self._running = {placement.rank for placement in spec.placements}
        self._metrics = JobMetrics(self._running, self._hosts, spec.metrics_interval_s)
        self._endpoint = self._open_endpoint()
        address = address_of(spec, self._local)
        self.rendezvous = Server(parse_secret(self.secret), address, observe=self._observe)
        self._admission = Admission(spec, self.rendezvous, self.secret)  # of an elastic job's hosts
        self.endpoint = self._admission.endpoint
        self._selector = selectors.DefaultSelector()
        self._outboxes = Outboxes(self._selector)
        self._agents = Agents()
        self._closing: dict[HostAgent, tuple[float, str]] = {}  # that have ended: until when to wait, and why
        self._unstarted: list[tuple[HostAgent, list[Placement], Host]] = []
        self._agentless: list[tuple[int, str, str]] = []  # members without an agent: number, host and why
        self._checks: HostChecks | Admission | None = None  # until all hosts have passed
        self._awaiting = False  # a reader of our output
        self._holding = False  # ranks must write no more
        self._unfinished: list[int] = []  # ranks that have ended meanwhile
        self._lost = False  # an agent was silent for too long
        self._verdict = Verdict(self._ranks.noun)
        self._stopping = Stopping(spec.term_grace_s)
        self._started_at = time.monotonic()
        signals = (*agent.STOP_SIGNALS, *agent.USER_SIGNALS)
        self._ignored = [number for number in signals if signal.getsignal(number) == signal.SIG_IGN]
        # Python's C handler writes the number of each signal into it, see set_wakeup_fd.
        self._wake, self._alarm = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._alarm, False)
        self._selector.register(self._wake, selectors.EVENT_READ)
        output.await_reader = self._await_reader
        self._commands = CommandRequests(self._ring, elastic=spec.elastic is not None)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what still runs, and the rendezvous."""
        self._output.await_reader = await_reader
        self._commands.close()
        if self._endpoint is not None:
            self._endpoint.close()
        for process in self._agents:
            process.cut()
        for process in self._agents:
            process.close()
        self._selector.close()
        os.close(self._wake)
        os.close(self._alarm)
        self.rendezvous.close()
        self._ranks.close()

    @property
    def cause(self) -> Ending | None:
        """The cause of the job's failure, after :meth:`run`."""
        return self._verdict.cause

    @property
    def signalled(self) -> bool:
        """Whether the launcher has received a signal that ends the job."""
        return bool(self._stopping.received)

    def run(self) -> int:
        """Start the ranks and return the job's exit status at the end; raises HostsUnfitError."""
        with passing_signals_to(self._alarm):
            if (problem := self._commands.open()) and (self._ranks.renews or self._spec.verbose):
                self._output.report(f"polyhvd status and polyhvd leave cannot reach this job: {problem}")
            self._start_agents()
            start_by = time.monotonic() + self._spec.start_timeout_s
            self._start_ranks(self._check_hosts(start_by))
            while not self._is_over():
                self._turn()
        return self._conclude()

    def _open_endpoint(self) -> Endpoint | None:
        if self._spec.metrics_port is None:
            return None
        from polyhvd.launch.job.endpoint import Endpoint  # takes a while to import

        endpoint = Endpoint(self._spec.metrics_address, self._spec.metrics_port, self._metrics.page)
        if self._spec.metrics_port == 0 or self._spec.verbose:
            self._output.report(f"metrics at {endpoint.url}")
        return endpoint

    def _observe(self, scope: str, number: int, value: bytes) -> None:
        """Take what a rank has written to the rendezvous; on its thread."""
        if scope == SCOPE:
            self._metrics.observe(number, value)
        elif self._ranks.observe is not None:
            self._ranks.observe(scope, number, value)

    # Starting

    def _start_agents(self) -> None:
        for number, host in enumerate(self._spec.hosts):
            placements = [item for item in self._spec.placements if item.host == str(number)]
            if not placements:
                continue
            self._unstarted.append((self._start_agent(number), placements, host))

    def _start_agent(self, number: int) -> HostAgent:
        process = self._provider(number).agent(self._hosts[number])
        self._agents.add(process, number, time.monotonic() + self._spec.start_timeout_s)
        self._selector.register(process.stdout, selectors.EVENT_READ, (process, process.receive))
        self._selector.register(process.stderr, selectors.EVENT_READ, (process, process.complain))
        return process

    def _check_hosts(self, start_by: float) -> HostChecks | None:
        """Have all hosts asked whether they can run the job, unless there is only this one."""
        spec = self._spec
        used = {int(item.host) for item in spec.placements}
        if spec.agents is not None or not spec.check_hosts or all(self._local[number] for number in used):
            return None
        from polyhvd.launch.hosts.checks import HostChecks  # takes a while to import

        chosen = bool(spec.interface or spec.address)
        checks = self._checks = HostChecks(
            self.rendezvous, self.secret, spec.start_timeout_s, fixed=chosen, folder=spec.cwd
        )
        for process, items, _ in self._unstarted:
            env = {**process.environment, **spec.env}
            checks.add(process, [spec.argv_of([item.rank]) for item in items], env)
        while checks.pending and not self._stopping.begun:
            self._turn()
            if time.monotonic() >= start_by:
                checks.give_up()
        self._checks = None
        return checks

    def _start_ranks(self, checks: HostChecks | None) -> None:
        if self._stopping.begun:  # a signal came before anything was started
            for process in self._agents:
                (process.cut if process.ready else process.kill)()
            return
        if checks is not None:
            checks.conclude()
        for process, placements, host in self._unstarted:
            endpoint = checks.endpoint(process) if checks else self.rendezvous.endpoint
            own = [(p.rank, rank_environment(self._spec.programs, p, host.name)) for p in placements]
            process.start(self._order(own, process, endpoint))
        if self._spec.verbose and self._unstarted:
            if self._spec.found:
                self._output.report(self._spec.found)
            size, count = len(self._spec.placements), len(self._agents)
            self._output.report(f"{size} ranks on {count} hosts; rendezvous at {endpoint}")
        self._checks = self._admission
        if self._ranks.wake is not None:
            self._selector.register(self._ranks.wake, selectors.EVENT_READ, self._ranks)
        self._ranks.begin(self, time.monotonic())

    def _provider(self, number: int) -> AgentProvider:
        if self._spec.agents is not None:
            return self._spec.agents[number]
        return LocalAgents() if self._local[number] else self._spec.remote

    def _order(
        self, ranks: list[tuple[int, dict[str, str]]], process: HostAgent, endpoint: str
    ) -> dict[str, Any]:
        variables = {
            "POLYHVD_RENDEZVOUS": endpoint,
            "POLYHVD_SECRET": self.secret,
            "POLYHVD_HOST_ID": str(self._agents.number_of(process)),
            "POLYHVD_METRICS_INTERVAL_S": f"{self._spec.metrics_interval_s:g}",
        }
        order = self._spec.order(ranks, process.environment, variables)
        return {**order, "heartbeat_timeout_s": self._heartbeats.silence_s, "ignored": self._ignored}

    def start_member(
        self, member: int, place: Placement, host: Host, number: int, *, knows_rank: bool
    ) -> None:
        """Start a member, see :class:`polyhvd.launch.elastic.driven.DrivenJob`."""
        self._running.add(member)
        while self._output.size <= member:
            self._output.add_rank()
        try:
            process = self._agent_on(host, number)
        except OSError as error:  # too many open files or processes: the job continues without it
            why = f"was not started: polyhvdrun cannot start an agent for it: {error.strerror or error}"
            self._agentless.append((member, host.name, why))
            self._ring()
            return
        variables = {
            **rank_environment((), place, host.name, knows_rank=knows_rank),
            "POLYHVD_MEMBER": str(member),
            "POLYHVD_LAUNCHER_TIMEOUT_S": f"{self._heartbeats.silence_s:g}",
        }

        def start() -> None:
            order = self._order([(member, variables)], process, self.endpoint(number, {number}))
            process.start({**order, "local_size": place.local_size, "stays": True})

        self._admission.when_fit(process, start)

    def kill_member(self, member: int) -> None:
        """Kill a member, see :class:`polyhvd.launch.elastic.driven.DrivenJob`."""
        for process in self._agents:
            if member in process.ranks:
                process.send(agent.KILL, number=member)

    def _agent_on(self, host: Host, number: int) -> HostAgent:
        """The agent on a host of an elastic job; a new one has to report first whether the host is fit."""
        while number >= len(self._hosts):  # those between were not needed yet
            self._local.append(False)
            self._hosts.append(Host("", 0))
        if self._hosts[number].name != host.name:
            self._local[number] = network.is_local(host.name)
        self._hosts[number] = host
        for process in self._agents:
            refused = process.ended or self._admission.refuses(process)
            if self._agents.number_of(process) == number and not refused:
                return process
        process = self._start_agent(number)
        if self._spec.agents is None and not self._local[number]:
            self._admission.expect(process, number)
        return process

    def _admit(self) -> None:
        """Start members on hosts that have proved fit, and refuse the others."""
        for process, problems in self._admission.settle():
            members = self._ranks.refuse(self._agents.number_of(process), problems, time.monotonic())
            self._running -= members
            for member in members:
                self._output.retire(member)
            (process.cut if process.ready else process.kill)()
        while self._agentless:
            member, host, why = self._agentless.pop()
            self._exited(member, host, 1, why)

    def _abandon_hosts(self, now: float) -> None:
        """The job ends: do not wait for hosts that are still being reached or checked."""
        for process in self._admission.abandon():
            members = self._ranks.refuse(self._agents.number_of(process), [], now)
            self._running -= members
            for member in members:
                self._output.retire(member)
            if process.ready and not process.ended:
                process.cut()
            elif not process.ended:
                process.kill()
                process.ended = True  # what it has started may hold its output
                self._agent_ended(process)
        while self._agentless:
            self._running.discard(self._agentless.pop()[0])

    def end(self, reason: str, cause: Ending | None, status: int) -> None:
        """End the job, which has failed."""
        self._verdict.status = status if cause is None or status == RESUME_STATUS else 0
        if cause is not None:
            self._verdict.add(cause)
        if reason:
            self._output.report(reason)
        self._stopping.plan_after_failure(time.monotonic())

    def finish(self) -> None:
        """End what still runs: the job is done."""
        self._stopping.begin(signal.SIGTERM, time.monotonic())

    def _is_over(self) -> bool:
        if not self._ranks.over and not self._stopping.begun:
            return False
        if self._ranks.renews and not self._running:
            for process in self._agents:
                process.cut()  # it would wait for more to start
        return not self._closing and all(process.ended for process in self._agents)

    # Requests of commands

    def _ring(self) -> None:
        """Wake the loop, since a request has arrived; on the control thread. No signal has the number 0."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._alarm, b"\0")

    def _answer(self, now: float) -> None:
        """Answer requests for the status; other requests may print, and wait until the output is read."""
        for request in self._commands.take(lambda content: "status" in content or not self._awaiting):
            if "status" in request.content:
                job = {
                    "job": os.getpid(),
                    "elastic": self._ranks.renews,
                    "command": self._spec.command,
                    "started": self._started_at,
                }
                found = answers(self._situation(now), job, now, time.time())
                if "metrics" in request.content:
                    found[-1:-1] = self._metrics.answers()
                request.finish(found)
            else:
                self._ranks.obey(request, now)

    def _situation(self, now: float) -> Situation:
        patience_s = self._spec.start_timeout_s
        late = {
            item.host: self._agents.start_by(item) - patience_s
            for item in self._agents
            if not item.ready and not item.ended
        }
        running = frozenset(self._running)
        found = self._ranks.situation(running, late, now)
        if self._stopping.begun:
            return ending(found, running, self._why_it_ends(), self._stopping.begun_at)
        if self._awaiting:
            wait = Wait("a reader of polyhvdrun's output", "it has stopped reading")
            return replace(found, decision=Decision(Doing.WAITS, waits=(wait,)), since=None)
        return found

    def _why_it_ends(self) -> str:
        if signals := [signal.Signals(number).name for number in self._stopping.received]:
            return f"polyhvdrun has received {', '.join(signals)}"
        return self._verdict.reason

    # The loop

    def _turn(self) -> None:
        starting = [
            item for item in self._agents if not item.ended and (self._judges(item) or not item.ready)
        ]
        self._outboxes.watch(self._agents)
        self._catch_up()
        deadlines = [self._agents.start_by(process) for process in starting]
        if not self._stopping.begun:
            deadlines.append(self._ranks.next_at(time.monotonic()))
        if self._closing:
            deadlines.append(time.monotonic() + _CLOSING_LOOK_S)
        for key, _ in self._selector.select(self._timer_s(*deadlines)):
            if key.data is None:
                self._forward_signals()
                continue
            if key.data is self._ranks:
                continue  # handled below
            process, read = key.data
            if read == process.complain:
                if not process.ended and not process.complain():
                    self._selector.unregister(process.stderr)
            elif read == process.receive and not process.ended:
                self._take(process)
        self._close_ended()
        now = time.monotonic()
        self._answer(now)
        for process in starting:
            if now >= self._agents.start_by(process) and not process.ready and not process.ended:
                process.complaints.append(f"no answer within {self._spec.start_timeout_s:g} s")
                process.kill()
                process.ended = True  # what it has started may hold its output
                self._agent_ended(process)
        if self._checks is self._admission:  # all that is placed was started
            if self._stopping.begun:
                self._abandon_hosts(now)
            else:
                self._admission.give_up(item for item in starting if now >= self._agents.start_by(item))
                self._admit()
            self._ranks.turn(now)
            for process in self._agents.take_gone(now, self._is_needed):
                process.close()
                self._heartbeats.forget(process)
                self._admission.forget(process)
        self._stop_what_is_due(now)
        for process in self._heartbeats.exchange(self._agents, now, self._judges):
            self._give_up(process)

    def _catch_up(self) -> None:
        """Process what was put aside while the launcher's output was not read."""
        while self._unfinished:
            self._output.finish(self._unfinished.pop())
        for process in self._agents:
            if process.ready and not process.ended and process.unread_bytes:
                self._take(process)

    def _give_up(self, process: HostAgent) -> None:
        """Treat the host of an agent that was silent for too long as lost."""
        self._lost = True
        process.kill()
        process.ended = True
        self._agent_ended(
            process,
            f"was lost: nothing was received from {process.host} for {self._heartbeats.silence_s:g} s (is "
            f"its network cut, or {process.program} stopped?); the ranks there end by themselves",
        )

    def _timer_s(self, *others: float) -> float | None:
        now = time.monotonic()
        waits = [moment - now for moment in (*others, self._stopping.next_at())]
        timer_s = max(0.0, min([*waits, self._heartbeats.timer_s(now)]))
        return timer_s if timer_s < float("inf") else None

    def _stop_what_is_due(self, now: float) -> None:
        if self._stopping.is_due_after_failure(now):
            self._stop_others(now)
        for number in self._stopping.take_due(now):
            self._send(number)

    def _await_reader(self, descriptor: int) -> bool:
        """Wait until the launcher's output is read, while the job can be stopped. See Output.

        Meanwhile heartbeats are exchanged, and what agents send is put aside. After a while agents have to
        hold the output of their ranks, so that only lost agents are silent.
        """
        self._awaiting, give_up_at = True, float("inf")
        hold_at = time.monotonic() + _HOLD_AFTER_S
        at_end: set[HostAgent] = set()  # agents that will send no more
        try:
            while not self._stopping.at_once:
                if self._stopping.received or self._lost:
                    give_up_at = min(give_up_at, time.monotonic() + _STUCK_OUTPUT_S)
                until = give_up_at if self._holding else min(give_up_at, hold_at)
                ready = self._poll(descriptor, until, at_end)
                if descriptor in ready:
                    return True
                if self._wake in ready:
                    self._forward_signals(report=False)
                now = time.monotonic()
                self._answer(now)
                self._stop_what_is_due(now)
                for process in at_end:
                    if process.is_done():  # it stays silent until the output is read
                        self._heartbeats.received_from(process)
                for process in self._heartbeats.exchange(self._agents, now, self._judges):
                    self._give_up(process)
                if now >= hold_at and not self._holding:
                    self._holding = True
                    self._send_all(agent.HOLD)
                if now >= give_up_at:
                    return False
            return False
        finally:
            self._awaiting = False
            if self._holding:
                self._holding = False
                self._send_all(agent.GO_ON)

    def _poll(self, descriptor: int, until: float, at_end: set[HostAgent]) -> set[int]:
        """Wait for a reader, a signal, a time or an agent, whose output is put aside; what is ready."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(descriptor, select.POLLOUT)
        polled = {}
        for process in self._agents:
            if process.ended or process in at_end:
                continue
            if self._holding or process.unread_bytes < _ASIDE_BYTES_MAX:
                polled[process.stdout.fileno()] = process
                poll.register(process.stdout, select.POLLIN)
            else:
                self._heartbeats.received_from(process)  # it waits for us
        timer_s = self._timer_s(*([until] if until < float("inf") else []))
        ready = {fd for fd, _ in poll.poll(None if timer_s is None else 1000 * timer_s)}
        for fd in ready & polled.keys():
            if polled[fd].put_aside():
                self._heartbeats.received_from(polled[fd])
            else:
                at_end.add(polled[fd])
        return ready

    def _is_needed(self, process: HostAgent) -> bool:
        """Return whether an agent that has ended may not be forgotten."""
        return self._judges(process) or process in self._closing or not process.has_exited()

    def _judges(self, process: HostAgent) -> bool:
        """Return whether it is not known yet if the host of this agent can take part."""
        return self._checks is not None and self._checks.awaits(process)

    def _take(self, process: HostAgent) -> None:
        self._heartbeats.received_from(process)
        try:
            frames = process.receive()
        except ValueError as error:
            process.complaints.append(str(error))
            process.kill()
            return
        if self._checks is not None:
            self._checks.look(process)
        for kind, rank, payload in frames:
            if kind in (agent.STDOUT, agent.STDERR):
                self._output.write(rank, kind, payload)
            elif kind == agent.STARTED and self._spec.verbose:
                pid, _ = agent.parse_status(payload)
                self._output.report(f"rank {rank} is pid {pid} on {process.host}")
            elif kind == agent.REPORT:
                self._verdict.report(rank, payload)
            elif kind == agent.OUT_OF_MEMORY:
                self._verdict.suspect_memory(rank, *agent.parse_counts(payload))
            elif kind == agent.EXITED:
                status, reason = agent.parse_status(payload)
                ended = f"was ended by its agent: {reason}" if reason else ""
                if not status and self._verdict.has_finished(rank):
                    reason = ended = ""  # whatever happened to its agent
                self._exited(rank, process.host, status or int(bool(reason)), ended)
            elif kind == agent.FAILED:
                status, reason = agent.parse_status(payload)
                self._exited(rank, process.host, status, f"was not started: {reason}")
            elif kind == agent.FACTS and self._checks is not None:
                self._checks.take(process, rank, payload)
            elif kind == agent.NOTICE and rank == signal.SIGTERM:
                self._ranks.host_leaves(self._agents.number_of(process), time.monotonic())
            elif kind == agent.SIGNALLED:
                self._handle_signal(
                    agent.parse_status(payload)[0], time.monotonic(), report=not self._awaiting
                )
        if process.ended:
            self._agent_ended(process)

    def _agent_ended(self, process: HostAgent, reason: str = "") -> None:
        if not self._agents.has_ended(process, time.monotonic()):
            return
        self._selector.unregister(process.stdout)
        self._outboxes.forget(process)
        with contextlib.suppress(KeyError):  # read to the end already
            self._selector.unregister(process.stderr)
            while process.complain():
                pass
        if self._judges(process) or any(rank in self._running for rank in process.ranks):
            self._closing[process] = (time.monotonic() + _CLOSE_S, reason)
            self._close_ended()

    def _close_ended(self) -> None:
        """Handle the loss of agents whose processes have ended, or do not end in time.

        The loop does not wait for one of them: the other agents would receive no heartbeats.
        """
        for process, (until, reason) in list(self._closing.items()):
            if not process.has_exited():
                if time.monotonic() < until:
                    continue
                process.kill()
            del self._closing[process]
            self._agent_lost(process, reason)

    def _agent_lost(self, process: HostAgent, reason: str) -> None:
        lost = [rank for rank in process.ranks if rank in self._running]
        what = "was lost" if process.ready else "was not started"
        status = process.close()
        if self._checks is not None and self._checks.awaits(process):
            return self._checks.lost(process, status, reason)
        reason = reason or f"{what}: {process.fault or f'{process.program} ended with status {status}'}"
        process.end_strays()
        if process.complaints:
            reason += ": " + "; ".join(process.complaints)
        for rank in lost:
            self._exited(rank, process.host, 1, reason)

    def _exited(self, rank: int, host: str, status: int, reason: str = "") -> None:
        if rank not in self._running:
            return
        self._running.discard(rank)
        if self._awaiting:
            self._unfinished.append(rank)
        else:
            self._output.finish(rank)
        ending = self._ending(rank, host, status, reason)
        self._verdict.forget(rank)
        if self._ranks.renews:
            self._output.retire(rank)
        if self._stopping.begun and status > 0:  # else it died of our signal
            self._verdict.add_meanwhile(ending)
        if self._stopping.begun and not self._ranks.renews:
            return
        decision = self._ranks.on_ending(ending, frozenset(self._running), time.monotonic())
        if self._stopping.begun or isinstance(decision, StartReplacement):
            return
        if ending.failed:
            self._verdict.add(ending)
        if isinstance(decision, StopOthers):
            self._stopping.plan_after_failure(decision.at)

    def _ending(self, rank: int, host: str, status: int, reason: str = "") -> Ending:
        return self._verdict.ending(rank, host, status, self._output.tail(rank), reason)

    # Ending

    def _stop_others(self, now: float) -> None:
        """End the other ranks after one has failed."""
        for process in self._agents:
            living = [rank for rank in process.ranks if rank in self._running]
            self._verdict.add_late([self._ending(rank, process.host, 1) for rank in living])
        self._stopping.begin(signal.SIGTERM, now)

    def _send(self, number: int) -> None:
        for process in self._agents:
            if process.ended:
                continue
            if number and process.ready:
                process.signal(number)
            else:
                process.cut()
            if not number:
                process.kill()

    def _forward_signals(self, *, report: bool = True) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._wake, 4096):
                if number in agent.USER_SIGNALS:
                    self._send(number)
                elif number == signal.SIGTSTP:
                    self._suspend()
                elif number in agent.STOP_SIGNALS:
                    self._handle_signal(number, time.monotonic(), report=report)

    def _send_all(self, kind: int) -> None:
        for process in self._agents:
            if not process.ended:
                process.send(kind)

    def _suspend(self) -> None:
        """Stop on Ctrl-Z, as any program does. The ranks continue, and agents expect no heartbeats."""
        self._send_all(agent.SUSPENDED)
        stop_like_others()
        for process in self._agents:
            self._heartbeats.received_from(process)
        self._send_all(agent.BEAT)

    def _handle_signal(self, number: int, now: float, *, report: bool) -> None:
        """The launcher or an agent has received a signal that ends the job."""
        if self._stopping.receive(number, now):
            self._ranks.stop(now, notice=number == signal.SIGTERM)
            if report:
                self._output.report(
                    f"{signal.Signals(number).name}: stopping the ranks; once more to kill them"
                )

    def _conclude(self) -> int:
        self._catch_up()
        failed = self._verdict.failed or self.signalled
        if text := self._ranks.summary(failed=failed):
            self._output.report(text)
        status = self._verdict.conclude(self._stopping.received)
        if self.cause is not None:
            *lines, last = self._verdict.lines()
            for line in lines:
                self._output.report(line)
            self._output.report(last, alarm=True)
            self._output.quote(self.cause.rank, trim(traceback_lines(self.cause.tail)))
        return status
