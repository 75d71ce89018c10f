"""Hosts that join an elastic job one after another: each is checked before anything is started there.

See :mod:`polyhvd.launch.hosts.checks`, which decides for one host at a time. A host that cannot take part is
refused, and the job continues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import TYPE_CHECKING

from polyhvd.launch.job.spec import JobSpec
from polyhvd.launch.providers.starting import HostAgent
from polyhvd.rendezvous.server import Server

if TYPE_CHECKING:
    from polyhvd.launch.hosts.checks import HostChecks, Problem

__all__ = ["Admission"]


class Admission:
    """See the module. The loop that drives the agents passes on what they send.

    Args:
        spec: the job.
        rendezvous: which each host has to reach.
        secret: of the job.
    """

    def __init__(self, spec: JobSpec, rendezvous: Server, secret: str) -> None:
        self._spec = spec
        self._rendezvous = rendezvous
        self._secret = secret
        self._made: HostChecks | None = None  # for the first host that is not this one
        self._waiting: dict[HostAgent, list[Callable[[], None]]] = {}  # what is to be started there
        self._numbers: dict[HostAgent, int] = {}
        self._endpoints: dict[int, str] = {}  # of the rendezvous, as other hosts reach it
        self._refused: set[HostAgent] = set()

    def expect(self, process: HostAgent, number: int) -> None:
        """An agent on another host was started."""
        self._numbers[process] = number
        self._waiting[process] = []
        self._checks.add(process, [self._spec.argv], {**process.environment, **self._spec.env})

    def when_fit(self, process: HostAgent, start: Callable[[], None]) -> None:
        """Call ``start`` once the host of this agent has passed: now, where it has, or is this one."""
        waiting = self._waiting.get(process)
        if waiting is None:
            start()
        else:
            waiting.append(start)

    def awaits(self, process: HostAgent) -> bool:
        """Return whether it is not known yet if the host of this agent can take part."""
        return process in self._waiting

    def refuses(self, process: HostAgent) -> bool:
        """Return whether the host of this agent could not take part."""
        return process in self._refused

    def forget(self, process: HostAgent) -> None:
        """An agent that is not awaited has ended."""
        self._refused.discard(process)
        self._numbers.pop(process, None)
        if self._made is not None:
            self._made.forget(process)

    def look(self, process: HostAgent) -> None:
        """Send the checks to a host whose agent has answered, once."""
        if self._spec.check_hosts and process in self._waiting:
            self._checks.look(process)

    def take(self, process: HostAgent, number: int, payload: bytes) -> None:
        """Take a part of a host's reply."""
        if process in self._waiting:
            self._checks.take(process, number, payload)

    def lost(self, process: HostAgent, status: int, reason: str = "") -> None:
        """An agent has ended before it was known whether its host can take part."""
        self._checks.lost(process, status, reason)

    def give_up(self, late: Iterable[HostAgent]) -> None:
        """The time of these agents is over."""
        for process in late:
            if process in self._waiting:
                self._checks.give_up(process)

    def settle(self) -> list[tuple[HostAgent, list[Problem]]]:
        """Start what has waited for hosts that have passed; returns the agents of those that have not."""
        refused = []
        for process in list(self._waiting):
            problems = self._checks.problems_of(process)
            if problems:
                del self._waiting[process]
                self._refused.add(process)
                refused.append((process, problems))
            elif self._checks.has_passed(process) or (process.ready and not self._spec.check_hosts):
                endpoint = self._checks.route_of(process).endpoint
                self._endpoints[self._numbers[process]] = endpoint or self._checks.serve(process.host)
                for start in self._waiting.pop(process):
                    start()
        return refused

    def abandon(self) -> list[HostAgent]:
        """Start nothing more; returns the agents of the hosts that have not passed yet."""
        waiting, self._waiting = list(self._waiting), {}
        self._refused.update(waiting)
        return waiting

    def endpoint(self, number: int, numbers: Set[int]) -> str:
        """Return where ranks of a host meet the others; after commas, other endpoints, if hosts differ."""
        used = dict.fromkeys(self._endpoints[other] for other in sorted(numbers) if other in self._endpoints)
        if not used:
            return self._rendezvous.endpoint
        own = self._endpoints.get(number) or next(iter(used))
        return ",".join([own, *(other for other in used if other != own)])

    @property
    def _checks(self) -> HostChecks:
        if self._made is None:
            from polyhvd.launch.hosts.checks import HostChecks  # takes a while to import

            fixed = bool(self._spec.interface or self._spec.address)
            timeout_s = self._spec.start_timeout_s
            self._made = HostChecks(
                self._rendezvous, self._secret, timeout_s, fixed=fixed, folder=self._spec.cwd
            )
        return self._made
