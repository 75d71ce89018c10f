"""Runs one job: ranks on hosts, from the first agent to the last exit.

What follows when a rank fails is the policy's to say. Signals to the launcher are passed on, gently first.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import time
from typing import TYPE_CHECKING, Any

from polyhvd.elastic.limits import FINISHED, PROGRESSES
from polyhvd.launch import agent
from polyhvd.launch.admission import Admission
from polyhvd.launch.blame import (
    Ending,
    describe,
    exit_status,
    first_cause,
    had_failed,
    others,
    traceback_lines,
    trim,
)
from polyhvd.launch.crew import Crew
from polyhvd.launch.driven import RESUME_STATUS, driver_of
from polyhvd.launch.hosts import Host
from polyhvd.launch.job_spec import JobSpec, address_of
from polyhvd.launch.output import Output, await_reader
from polyhvd.launch.policy import StartReplacement, StopOthers
from polyhvd.launch.programs import rank_environment
from polyhvd.launch.providers.local_agents import LocalAgents
from polyhvd.launch.providers.starting import AgentProvider, HostAgent
from polyhvd.launch.pulses import Outboxes, Pulses
from polyhvd.launch.signals import passing_signals_to, stop_like_others
from polyhvd.rendezvous import network
from polyhvd.rendezvous.auth import new_secret, parse_secret
from polyhvd.rendezvous.server import Server
from polyhvd.runtime.placement import Placement

if TYPE_CHECKING:
    from polyhvd.launch.driver import Driver
    from polyhvd.launch.host_checks import HostChecks

__all__ = ["Job", "JobSpec"]

_KILL_GRACE_S = 5.0
#: After a signal: how long a reader may leave our output where it is.
_STUCK_OUTPUT_S = 2.0
#: While nobody reads our output: how long agents go on, and how much of what one says is kept until then.
_HOLD_AFTER_S = 0.5
_ASIDE_BYTES_MAX = 4 << 20


class Job:
    """One run of a job. ``secret`` and ``rendezvous`` exist from construction to ``close``."""

    def __init__(self, spec: JobSpec, output: Output) -> None:
        """Open the rendezvous; raises ValueError or OSError where there is no usable address."""
        self._spec = spec
        self._output = output
        self.say = output.say
        self._pulses = Pulses(spec.heartbeat_timeout_s)
        self.secret = spec.secret or new_secret()
        self.cause: Ending | None = None  # of the job's failure, after ``run``
        self._local = [] if spec.agents else [network.is_local(host.name) for host in spec.hosts]
        self._hosts = list(spec.hosts)
        self._driver = driver_of(spec.elastic, spec.hosts)
        self._what = "rank" if self._driver is None else "process"
        observe = None if self._driver is None else self._driver.observe
        self.rendezvous = Server(parse_secret(self.secret), address_of(spec, self._local), observe=observe)
        self._admission = Admission(spec, self.rendezvous, self.secret)  # of an elastic job's hosts
        self.endpoint = self._admission.endpoint
        self._selector = selectors.DefaultSelector()
        self._outboxes = Outboxes(self._selector)
        self._agents = Crew()
        self._unstarted: list[tuple[HostAgent, list[Placement], Host]] = []
        self._checks: HostChecks | Admission | None = None  # until all hosts have passed
        self._awaiting = False  # somebody who reads our output
        self._holding = False  # ranks must write no more
        self._unfinished: list[int] = []  # ranks that have ended meanwhile
        self._lost = False  # an agent was silent for too long
        self._running = {placement.rank for placement in spec.placements}
        self._endings: list[Ending] = []
        self._progress: dict[int, bytes] = {}  # likewise
        self._suffered: dict[int, list[bytes]] = {}  # what ranks have reported, see Ending
        self._slow: list[Ending] = []  # of ranks that had failed when they were told to end
        self._later: list[Ending] = []  # of ranks that failed while they were to end anyway
        self._stopping = False  # ranks end because we told them to
        self._stop_at: float | None = None  # when to look for the cause, and stop the others
        self._steps: list[tuple[float, int]] = []  # when to send which signal next
        self._signals: dict[int, float] = {}  # that end the job and the launcher has received: when first
        self._killing = False  # somebody does not want to wait
        self._verdict = 0  # exit status, where that of no rank says it
        signals = (*agent.STOP_SIGNALS, *agent.USER_SIGNALS)
        self._ignored = [number for number in signals if signal.getsignal(number) == signal.SIG_IGN]
        # Python's C handler writes the number of each signal into it, see set_wakeup_fd.
        self._wake, self._alarm = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._alarm, False)
        self._selector.register(self._wake, selectors.EVENT_READ)
        output.await_reader = self._await_reader

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what still runs, and the rendezvous."""
        self._output.await_reader = await_reader
        for process in self._agents:
            process.cut()
        for process in self._agents:
            process.close()
        self._selector.close()
        os.close(self._wake)
        os.close(self._alarm)
        self.rendezvous.close()
        if self._driver is not None:
            self._driver.close()

    @property
    def signalled(self) -> bool:
        """Whether somebody has wanted the job to end, by a signal to the launcher."""
        return bool(self._signals)

    def run(self) -> int:
        """Start the ranks and return the job's exit status at the end; raises HostsUnfitError."""
        with passing_signals_to(self._alarm):
            self._start_agents()
            start_by = time.monotonic() + self._spec.start_timeout_s
            self._start_ranks(self._check_hosts(start_by))
            while not self._is_over():
                self._turn()
        return self._conclude()

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
        from polyhvd.launch.host_checks import HostChecks  # takes a while to import

        chosen = bool(spec.interface or spec.address)
        checks = self._checks = HostChecks(self.rendezvous, self.secret, spec.start_timeout_s, fixed=chosen)
        for process, items, _ in self._unstarted:
            env = {**process.environment, **spec.env}
            checks.add(process, [spec.argv_of([item.rank]) for item in items], env)
        while checks.pending and not self._stopping:
            self._turn()
            if time.monotonic() >= start_by:
                checks.give_up()
        self._checks = None
        return checks

    def _start_ranks(self, checks: HostChecks | None) -> None:
        if self._stopping:  # somebody wants it to end before anything has begun
            for process in self._agents:
                (process.cut if process.ready else process.kill)()
            return
        if checks is not None:
            checks.conclude()
        for process, placements, host in self._unstarted:
            endpoint = checks.endpoint(process) if checks else self.rendezvous.endpoint
            own = [(p.rank, rank_environment(self._spec.programs, p, host.name)) for p in placements]
            process.start(self._order(own, process, endpoint))
        if self._driver is not None:
            self._checks = self._admission
            self._selector.register(self._driver.wake, selectors.EVENT_READ, self._driver)
            self._driver.begin(self, time.monotonic())
        elif self._spec.verbose:
            if self._spec.found:
                self._output.say(self._spec.found)
            size, count = len(self._spec.placements), len(self._agents)
            self._output.say(f"{size} ranks on {count} hosts; rendezvous at {endpoint}")

    def _provider(self, number: int) -> AgentProvider:
        if self._spec.agents is not None:
            return self._spec.agents[number]
        return LocalAgents() if self._local[number] else self._spec.remote

    def _order(
        self, ranks: list[tuple[int, dict[str, str]]], process: HostAgent, endpoint: str
    ) -> dict[str, Any]:
        told = {
            "POLYHVD_RENDEZVOUS": endpoint,
            "POLYHVD_SECRET": self.secret,
            "POLYHVD_HOST_ID": str(self._agents.number_of(process)),
        }
        order = self._spec.order(ranks, process.environment, told)
        return {**order, "heartbeat_timeout_s": self._pulses.silence_s, "ignored": self._ignored}

    def start_member(
        self, member: int, place: Placement, host: Host, number: int, *, knows_rank: bool
    ) -> None:
        """For the driver of an elastic job, see :class:`polyhvd.launch.driven.DrivenJob`."""
        self._running.add(member)
        while self._output.size <= member:
            self._output.add_rank()
        process = self._agent_on(host, number)
        told = {"POLYHVD_MEMBER": str(member), "POLYHVD_LAUNCHER_TIMEOUT_S": f"{self._pulses.silence_s:g}"}
        variables = {**rank_environment((), place, host.name, knows_rank=knows_rank), **told}

        def start() -> None:
            order = self._order([(member, variables)], process, self.endpoint(number, {number}))
            process.start({**order, "local_size": place.local_size, "stays": True})

        self._admission.when_fit(process, start)

    def kill_member(self, member: int) -> None:
        """For the driver of an elastic job, see :class:`polyhvd.launch.driven.DrivenJob`."""
        for process in self._agents:
            if member in process.ranks:
                process.tell(agent.KILL, number=member)

    def _agent_on(self, host: Host, number: int) -> HostAgent:
        """The agent on a host of an elastic job; a new one is to say first whether the host is fit."""
        while number >= len(self._hosts):
            self._hosts.append(host)
            self._local.append(network.is_local(host.name))
        self._hosts[number] = host
        for process in self._agents:
            refused = process.ended or self._admission.refuses(process)
            if self._agents.number_of(process) == number and not refused:
                return process
        process = self._start_agent(number)
        if self._spec.agents is None and not self._local[number]:
            self._admission.expect(process, number)
        return process

    def _admit(self, driver: Driver) -> None:
        """Start members on hosts that have proved fit, and refuse the others."""
        for process, problems in self._admission.settle():
            members = driver.refuse(self._agents.number_of(process), problems, time.monotonic())
            self._running -= members
            for member in members:
                self._output.retire(member)
            (process.cut if process.ready else process.kill)()

    def end(self, reason: str, cause: Ending | None, status: int) -> None:
        """End the job, which has failed."""
        self._verdict = status if cause is None or status == RESUME_STATUS else 0
        self._endings += [] if cause is None else [cause]
        if reason:
            self._output.say(reason)
        self._stop_at = time.monotonic()

    def finish(self) -> None:
        """End what still runs: the job is done."""
        self._stopping = True
        self._end_gently(signal.SIGTERM, time.monotonic())

    def _is_over(self) -> bool:
        if self._driver is not None:
            if not self._driver.over and not self._stopping:
                return False
            if not self._running:
                for process in self._agents:
                    process.cut()  # it would wait for more to start
        return all(process.ended for process in self._agents)

    # The loop

    def _turn(self) -> None:
        starting = [
            item for item in self._agents if not item.ended and (self._judges(item) or not item.ready)
        ]
        self._outboxes.watch(self._agents)
        self._catch_up()
        deadlines = [self._agents.start_by(process) for process in starting]
        if self._driver is not None and not self._stopping:
            deadlines.append(self._driver.next_at(time.monotonic()))
        for key, _ in self._selector.select(self._timer_s(*deadlines)):
            if key.data is None:
                self._forward_signals()
                continue
            if key.data is self._driver:
                continue  # its turn comes below
            process, read = key.data
            if read == process.complain:
                if not process.ended and not process.complain():
                    self._selector.unregister(process.stderr)
            elif read == process.receive and not process.ended:
                self._take(process)
        now = time.monotonic()
        for process in starting:
            if now >= self._agents.start_by(process) and not process.ready and not process.ended:
                process.complaints.append(f"no answer within {self._spec.start_timeout_s:g} s")
                process.kill()
        if self._driver is not None:
            if not self._stopping:
                self._admission.give_up(item for item in starting if now >= self._agents.start_by(item))
                self._admit(self._driver)
            self._driver.turn(now)
            for process in self._agents.take_gone(now, self._judges):
                process.close()
                self._pulses.forget(process)
                self._admission.forget(process)
        self._take_steps(now)
        for process in self._pulses.exchange(self._agents, now, self._judges):
            self._give_up(process)

    def _catch_up(self) -> None:
        """Take what was put aside while nobody read our output."""
        while self._unfinished:
            self._output.finish(self._unfinished.pop())
        for process in self._agents:
            if process.ready and not process.ended and process.unread_bytes:
                self._take(process)

    def _give_up(self, process: HostAgent) -> None:
        """Nothing has come from this agent for too long: its host counts as lost."""
        self._lost = True
        process.kill()
        process.ended = True
        self._agent_ended(
            process,
            f"was lost: nothing was heard of {process.host} for {self._pulses.silence_s:g} s (is its network "
            f"cut, or {process.program} stopped?); the ranks there end by themselves",
        )

    def _timer_s(self, *others: float) -> float | None:
        times = [*others, *(moment for moment, _ in self._steps[:1])]
        if self._stop_at is not None:
            times.append(self._stop_at)
        now = time.monotonic()
        waits = [moment - now for moment in times]
        timer_s = max(0.0, min([*waits, self._pulses.timer_s(now)]))
        return timer_s if timer_s < float("inf") else None

    def _take_steps(self, now: float) -> None:
        if self._stop_at is not None and now >= self._stop_at:
            self._stop()
        while self._steps and now >= self._steps[0][0]:
            self._send(self._steps.pop(0)[1])

    def _await_reader(self, descriptor: int) -> bool:
        """Nobody reads our output for now: the job waits, but can be stopped. See Output.

        Agents are heard meanwhile, and hear us; what they say waits. That they stay silent for no other
        reason than that we do not read, they are told to let ranks write no more.
        """
        self._awaiting, give_up_at = True, float("inf")
        hold_at = time.monotonic() + _HOLD_AFTER_S
        unheard: set[HostAgent] = set()  # from whom nothing more will come
        try:
            while not self._killing:
                if self._signals or self._lost:
                    give_up_at = min(give_up_at, time.monotonic() + _STUCK_OUTPUT_S)
                until = give_up_at if self._holding else min(give_up_at, hold_at)
                ready = self._poll(descriptor, until, unheard)
                if descriptor in ready:
                    return True
                if self._wake in ready:
                    self._forward_signals(say=False)
                now = time.monotonic()
                self._take_steps(now)
                for process in unheard:
                    if process.is_done():  # and will be silent for as long as nobody reads
                        self._pulses.hear(process)
                for process in self._pulses.exchange(self._agents, now, self._judges):
                    self._give_up(process)
                if now >= hold_at and not self._holding:
                    self._holding = True
                    self._tell_all(agent.HOLD)
                if now >= give_up_at:
                    return False
            return False
        finally:
            self._awaiting = False
            if self._holding:
                self._holding = False
                self._tell_all(agent.GO_ON)

    def _poll(self, descriptor: int, until: float, unheard: set[HostAgent]) -> set[int]:
        """Wait for a reader, a signal, a time or an agent, whose words are put aside; what is ready."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(descriptor, select.POLLOUT)
        heard = {}
        for process in self._agents:
            if process.ended or process in unheard:
                continue
            if self._holding or process.unread_bytes < _ASIDE_BYTES_MAX:
                heard[process.stdout.fileno()] = process
                poll.register(process.stdout, select.POLLIN)
            else:
                self._pulses.hear(process)  # it is for us to read
        timer_s = self._timer_s(*([until] if until < float("inf") else []))
        ready = {fd for fd, _ in poll.poll(None if timer_s is None else 1000 * timer_s)}
        for fd in ready & heard.keys():
            if heard[fd].put_aside():
                self._pulses.hear(heard[fd])
            else:
                unheard.add(heard[fd])
        return ready

    def _judges(self, process: HostAgent) -> bool:
        """Whether it is not known yet if the host of this agent can take part."""
        return self._checks is not None and self._checks.awaits(process)

    def _take(self, process: HostAgent) -> None:
        self._pulses.hear(process)
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
                self._output.say(f"rank {rank} is pid {pid} on {process.host}")
            elif kind == agent.REPORT:
                self._heed_report(rank, payload)
            elif kind == agent.EXITED:
                status, reason = agent.parse_status(payload)
                ended = f"was ended by its agent: {reason}" if reason else ""
                if not status and self._progress.get(rank) == FINISHED:
                    reason = ended = ""  # it has come to its end, whatever happened to its agent
                self._exited(rank, process, status or int(bool(reason)), ended)
            elif kind == agent.FAILED:
                status, reason = agent.parse_status(payload)
                self._exited(rank, process, status, f"was not started: {reason}")
            elif kind == agent.FACTS and self._checks is not None:
                self._checks.take(process, rank, payload)
            elif kind == agent.NOTICE and rank == signal.SIGTERM and self._driver is not None:
                self._driver.host_leaves(self._agents.number_of(process), time.monotonic())
            elif kind == agent.SIGNALLED:
                self._heed(agent.parse_status(payload)[0], time.monotonic(), say=not self._awaiting)
        if process.ended:
            self._agent_ended(process)

    def _heed_report(self, rank: int, payload: bytes) -> None:
        items = [item for item in payload.split(b"\0") if item]
        self._suffered[rank] = [item for item in items if item not in PROGRESSES]
        self._progress.update((rank, item) for item in items if item in PROGRESSES)  # the last one counts

    def _agent_ended(self, process: HostAgent, reason: str = "") -> None:
        if not self._agents.has_ended(process, time.monotonic()):
            return
        self._selector.unregister(process.stdout)
        self._outboxes.forget(process)
        with contextlib.suppress(KeyError):  # read to the end already
            self._selector.unregister(process.stderr)
            while process.complain():
                pass
        lost = [rank for rank in process.ranks if rank in self._running]
        if not lost and not self._judges(process):
            return
        what = "was lost" if process.ready else "was not started"
        status = process.close()
        if self._checks is not None and self._checks.awaits(process):
            return self._checks.lost(process, status, reason)
        reason = reason or f"{what}: {process.fault or f'{process.program} ended with status {status}'}"
        process.end_strays()
        if process.complaints:
            reason += ": " + "; ".join(process.complaints)
        for rank in lost:
            self._exited(rank, process, 1, reason)

    def _exited(self, rank: int, process: HostAgent, status: int, reason: str = "") -> None:
        if rank not in self._running:
            return
        self._running.discard(rank)
        if self._awaiting:
            self._unfinished.append(rank)
        else:
            self._output.finish(rank)
        ending = self._ending(rank, process, status, reason)
        self._suffered.pop(rank, None)
        self._progress.pop(rank, None)
        if self._driver is not None:
            self._output.retire(rank)
        if self._stopping and status > 0:  # else it died of our signal
            self._later.append(ending)
        if self._stopping and self._driver is None:
            return
        policy = self._spec.policy if self._driver is None else self._driver
        decision = policy.on_ending(ending, frozenset(self._running), time.monotonic())
        if self._stopping:
            return
        if isinstance(decision, StartReplacement):
            if self._driver is None:
                raise NotImplementedError(f"rank {rank}: only an elastic job can replace its ranks")
            return
        if ending.failed:
            self._endings.append(ending)
        if isinstance(decision, StopOthers):
            self._stop_at = decision.at if self._stop_at is None else min(decision.at, self._stop_at)

    def _ending(self, rank: int, process: HostAgent, status: int, reason: str = "") -> Ending:
        tail, suffered = self._output.tail(rank), self._suffered.get(rank, [])
        progress = self._progress.get(rank, b"")
        return Ending(rank, process.host, status, tail, reason, suffered, self._what, progress)

    # Ending

    def _stop(self) -> None:
        """The policy has said so: end the other ranks."""
        self._stop_at = None
        self._stopping = True
        for process in self._agents:
            endings = [self._ending(rank, process, 1) for rank in process.ranks if rank in self._running]
            self._slow += filter(had_failed, endings)
        self._end_gently(signal.SIGTERM, time.monotonic())

    def _end_gently(self, number: int, now: float) -> None:
        """Plan which signals the ranks get, and when."""
        self._steps = [(now, number)]
        if number != signal.SIGTERM:
            now += agent.INTERRUPT_GRACE_S
            self._steps.append((now, signal.SIGTERM))
        now += self._spec.term_grace_s
        self._steps += [(now, signal.SIGKILL), (now + _KILL_GRACE_S, 0)]

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

    def _forward_signals(self, *, say: bool = True) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._wake, 4096):
                if number in agent.USER_SIGNALS:
                    self._send(number)
                elif number == signal.SIGTSTP:
                    self._suspend()
                elif number in agent.STOP_SIGNALS:
                    self._heed(number, time.monotonic(), say=say)

    def _tell_all(self, kind: int) -> None:
        for process in self._agents:
            if not process.ended:
                process.tell(kind)

    def _suspend(self) -> None:
        """Somebody has pressed Ctrl-Z: stop, as any program does. The ranks go on, and agents do not wait."""
        self._tell_all(agent.SUSPENDED)
        stop_like_others()
        for process in self._agents:
            self._pulses.hear(process)
        self._tell_all(agent.BEAT)

    def _heed(self, number: int, now: float, *, say: bool) -> None:
        """Somebody wants the job to end, or to end at once.

        What tells every process of a job to end (Slurm, systemd, a closed terminal) may come twice,
        or as two signals, and while ranks have begun to fail of it: none of that is impatience.
        """
        former = self._signals.setdefault(number, now)
        first = len(self._signals) == 1 and former == now
        again = former != now and (number == signal.SIGINT or now >= former + agent.REPEAT_S)
        if again or (self._stopping and number == signal.SIGINT):
            self._stopping = self._killing = True
            self._steps = [(now, signal.SIGKILL), (now + _KILL_GRACE_S, 0)]
        elif not self._stopping:
            self._stopping = True
            self._stop_at = None
            if self._driver is not None:
                self._driver.stop(now, notice=number == signal.SIGTERM)
            self._end_gently(number, now)
            if say:
                self._output.say(f"{signal.Signals(number).name}: stopping the ranks; once more to kill them")
        elif number == signal.SIGTERM and former == now and not first and not self._killing:
            self._end_gently(number, now)

    def _conclude(self) -> int:
        self._catch_up()
        failed = bool(self._endings or self._verdict or self._signals)
        if self._driver is not None and (text := self._driver.summary(failed=failed)):
            self._output.say(text)
        if self._verdict:
            return self._verdict
        if self._endings:
            self.cause = first_cause([*self._endings, *self._slow])
            return self._report(self.cause)
        return 128 + next(iter(self._signals)) if self._signals else 0

    def _report(self, ending: Ending) -> int:
        later = [item for item in self._later if item.rank != ending.rank]
        for line in others([*self._endings, *later], ending):
            self._output.say(line)
        self._output.say(describe(ending), alarm=True)
        self._output.quote(ending.rank, trim(traceback_lines(ending.tail)))
        return exit_status(ending)
