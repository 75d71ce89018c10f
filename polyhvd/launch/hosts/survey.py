"""Examines hosts for the doctor: over ssh, by agents that start no ranks, all hosts at a time.

A host that cannot be reached, or where a part fails, is a finding like others; the rest continues.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from polyhvd.launch.hosts import facts as host_facts
from polyhvd.launch.hosts import findings as host_findings
from polyhvd.launch.hosts import links as host_links
from polyhvd.launch.hosts.checks import HostChecks, Problem, Route
from polyhvd.launch.hosts.lists import Host
from polyhvd.launch.job import agent
from polyhvd.launch.job.agent_program import examination
from polyhvd.launch.providers.local_agents import LocalAgents
from polyhvd.launch.providers.ssh import SshAgents
from polyhvd.launch.providers.starting import HostAgent
from polyhvd.rendezvous import auth, network
from polyhvd.rendezvous.server import Server

__all__ = ["HostFindings", "Survey", "SurveyOptions", "here"]

_STEP_S = 90.0  # of one examination at most
_CLOCK_READINGS = 5
_LINK_S = 0.25  # of each of latency and bandwidth
_LINKS_S = 30.0  # of all rounds together
_LINK_BYTES = 64 << 20
_REACH_S = 3.0  # until a host counts as out of another one's reach
_TICK_S = 1.0


@dataclass
class HostFindings:
    """The findings on a host."""

    name: str
    problems: list[Problem] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)  # of host_findings; empty: it could not be asked
    clock: tuple[float, float] | None = None  # seconds that it is ahead of this host, and how exact that is
    chosen: str = ""  # its address towards the launcher, which init() takes
    why: str = ""  # that one
    links: list[dict[str, Any]] = field(default_factory=list)  # of host_links, "to" being a host's name


@dataclass(frozen=True)
class SurveyOptions:
    """How to examine."""

    packages: Mapping[str, Sequence[str]]  # whose versions are wanted, see host_findings
    ssh: SshAgents
    python: str  # of the hosts
    interface: str = ""
    timeout_s: float = 30.0


class Survey:
    """One examination of some hosts. ``run`` it within a with statement, which leaves no process behind."""

    def __init__(self, hosts: Sequence[Host], options: SurveyOptions) -> None:
        """Start an agent on each host; raises ValueError for an interface that is not here."""
        self._options = options
        self._secret = auth.new_secret()
        names = [host.name for host in hosts]
        far = [name for name in names if not network.is_local(name)]
        if options.interface:
            address = network.address_of(options.interface)
        else:
            address = network.address_for(far[0].rpartition("@")[2]) if far else network.loopback()
        self._server = Server(auth.parse_secret(self._secret), address)
        self._checks = HostChecks(
            self._server, self._secret, options.timeout_s, fixed=bool(options.interface)
        )
        self._selector = selectors.DefaultSelector()
        self.findings = {name: HostFindings(name) for name in names}
        self._agents: dict[HostAgent, HostFindings] = {}
        self._number = -1000  # of the last examination, counted down; HostChecks counts from -1
        self._environments: dict[HostAgent, dict[str, str]] = {}
        for host in hosts:
            provider = options.ssh if host.name in far else LocalAgents()
            process = provider.agent(host)
            self._agents[process] = self.findings[host.name]
            self._environments[process] = dict(process.environment)
            self._checks.add(process, [[options.python]], process.environment)
            self._selector.register(process.stdout, selectors.EVENT_READ, (process, "receive"))
            self._selector.register(process.stderr, selectors.EVENT_READ, (process, "complain"))

    def __enter__(self) -> Survey:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for process in self._agents:
            (process.cut if process.ready else process.kill)()
        for process in self._agents:
            process.close()
        self._selector.close()
        self._server.close()

    def run(self) -> list[HostFindings]:
        """Examine all hosts, and return what was found, in their order."""
        self._check()
        self._look_at_hosts()
        self._read_clocks()
        self._measure_links()
        return list(self.findings.values())

    # The parts

    def _check(self) -> None:
        """Make the checks that polyhvdrun makes before it starts a job."""
        deadline = time.monotonic() + self._options.timeout_s
        while self._checks.pending:
            self._turn(deadline, self._checks.take)
            if time.monotonic() >= deadline:
                self._checks.give_up()
                for process in self._agents:
                    if not process.ready and not process.ended:
                        process.complaints.append(f"no answer within {self._options.timeout_s:g} s")
                        process.kill()
                        process.ended = True  # what it has started may hold its output
                        self._bury(process)
                deadline = time.monotonic() + _TICK_S
        for problem in self._checks.problems():
            self.findings[problem.host].problems.append(problem)
        for process, findings in self._agents.items():
            route = self._checks.route_of(process)
            findings.chosen, findings.why = route.own_address, self._why(route)

    def _why(self, route: Route) -> str:
        if not route.own_address:
            return ""
        if self._options.interface:
            return f"it leads to {route.endpoint}, which --network-interface {self._options.interface} chose"
        failed = [f"{address} failed: {reason}" for address, reason in route.failed]
        return "; ".join([f"it is the route to polyhvdrun at {route.endpoint}", *failed])

    def _look_at_hosts(self) -> None:
        packages = {name: list(of) for name, of in self._options.packages.items()}
        programs = {
            process: examination(
                [auth, network, host_facts, host_findings],
                {"packages": packages, "env": self._environments[process]},
            )
            for process in self._living()
        }
        for process, facts in self._ask(programs).items():
            self._agents[process].facts = facts[0]

    def _read_clocks(self) -> None:
        """The host's time lies half of a round trip before the answer, by half of one at most."""
        program = b"import os, time\nos.write(1, b'%r\\n' % time.time())\n"
        for _ in range(_CLOCK_READINGS):
            sent: dict[HostAgent, float] = {}
            received: dict[HostAgent, float] = {}
            answers = self._ask(dict.fromkeys(self._living(), program), sent=sent, received=received)
            for process, (read, *_) in answers.items():
                exact = (received[process] - sent[process]) / 2
                known = self._agents[process].clock
                if known is None or exact < known[1]:
                    self._agents[process].clock = (float(read) - received[process] + exact, exact)

    def _measure_links(self) -> None:
        """Every host to every other one; each is one client and one server at a time."""
        common = {"secret": self._secret, "timeout_s": _REACH_S}
        modules = [auth, network, host_facts, host_links]
        serve = examination(modules, {**common, "do": "serve"})
        living = self._living()
        if len(self._agents) < 2:
            return
        places = {
            process: replies[0]["listening"]
            for process, replies in self._ask(dict.fromkeys(living, serve), to_the_end=False).items()
        }
        members = list(places)
        seconds = min(_LINK_S, _LINKS_S / (2 * max(1, len(members))))
        for distance in range(1, len(members)):
            programs = {}
            for number, process in enumerate(members):
                peer = members[(number + distance) % len(members)]
                target = {"to": peer.host, "listening": places[peer]}
                measure = {"do": "measure", "targets": [target], "seconds": seconds, "bytes": _LINK_BYTES}
                programs[process] = examination(modules, {**common, **measure})
            for process, replies in self._ask(programs).items():
                self._agents[process].links += replies

    # The agents

    def _living(self) -> list[HostAgent]:
        return [process for process in self._agents if process.ready and not process.ended]

    def _ask(
        self,
        programs: Mapping[HostAgent, bytes],
        *,
        to_the_end: bool = True,
        sent: dict[HostAgent, float] | None = None,
        received: dict[HostAgent, float] | None = None,
    ) -> dict[HostAgent, list[Any]]:
        """Run programs by agents, and return their output, in lines of JSON; nothing for those that fail.

        Args:
            programs: of each agent.
            to_the_end: wait for the ends of the programs, and not for one line of each.
            sent: is filled with the wall clock time of each request; ``received``: of its first output.
        """
        self._number -= 1
        output: dict[HostAgent, bytearray] = {process: bytearray() for process in programs}
        open_ones = set(programs)

        def take(process: HostAgent, number: int, payload: bytes) -> None:
            if number != self._number:
                return
            if payload and received is not None:
                received.setdefault(process, time.time())
            output[process] += payload
            if not payload or (not to_the_end and b"\n" in payload):
                open_ones.discard(process)

        for process, program in programs.items():
            if sent is not None:
                sent[process] = time.time()
            process.send(agent.EXAMINE, program, self._number)
        deadline = time.monotonic() + _STEP_S
        while open_ones and time.monotonic() < deadline:
            self._turn(deadline, take)
            open_ones -= {process for process in open_ones if process.ended}
        found = {}
        for process, data in output.items():
            lines = bytes(data).splitlines()
            if lines and process not in open_ones:
                with contextlib.suppress(ValueError):
                    found[process] = [json.loads(line) for line in lines]
            if process not in found:
                self._fail(process)
        return found

    def _fail(self, process: HostAgent) -> None:
        last = "; ".join([*process.complaints][-3:]) or f"no answer within {_STEP_S:g} s"
        problem = Problem(process.host, "not examined", last, "run it again; is the host overloaded?")
        findings = self._agents[process]
        if all(known.what != problem.what for known in findings.problems):
            findings.problems.append(problem)

    def _turn(self, deadline: float, take: Callable[[HostAgent, int, bytes], None]) -> None:
        for process in self._agents:
            process.flush()
        wait_s = max(0.0, min(_TICK_S, deadline - time.monotonic()))
        for key, _ in self._selector.select(wait_s):
            process, what = key.data
            if process.ended:  # in this very turn
                continue
            if what == "complain":
                if not process.complain():
                    self._selector.unregister(process.stderr)
                continue
            try:
                frames = process.receive()
            except ValueError as error:
                process.complaints.append(str(error))
                process.kill()
                continue
            self._checks.look(process)
            for kind, number, payload in frames:
                if kind == agent.FACTS:
                    take(process, number, payload)
            if process.ended:
                self._bury(process)

    def _bury(self, process: HostAgent) -> None:
        self._selector.unregister(process.stdout)
        with contextlib.suppress(KeyError):
            self._selector.unregister(process.stderr)
            while process.complain():
                pass
        self._checks.lost(process, process.close())


def here(packages: Mapping[str, Sequence[str]]) -> HostFindings:
    """The findings of the same program on this host, without an agent."""
    facts = host_findings.survey({name: list(of) for name, of in packages.items()}, dict(os.environ))
    return HostFindings(str(facts["hostname"]), facts=facts, clock=(0.0, 0.0))
