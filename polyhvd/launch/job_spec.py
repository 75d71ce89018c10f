"""What a job is: the program, the hosts, and what to do in which case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from polyhvd.launch.hosts import Host
from polyhvd.launch.policy import FailurePolicy, StopAtFirstFailure
from polyhvd.launch.programs import Program
from polyhvd.launch.providers.ssh import SshAgents
from polyhvd.launch.providers.starting import AgentProvider
from polyhvd.runtime.placement import Placement

__all__ = ["JobSpec"]


@dataclass
class JobSpec:
    """What to run and where."""

    argv: list[str]
    hosts: list[Host]
    placements: list[Placement]  # as of polyhvd.launch.hosts.place
    programs: Sequence[Program] = ()  # where ranks run several; then there is one for each rank
    env: dict[str, str] = field(default_factory=dict)  # on top of the launcher's own
    interface: str = ""
    remote: AgentProvider = field(default_factory=SshAgents)  # for other hosts
    agents: Sequence[AgentProvider] | None = None  # one a host; None: local ones, and ``remote``
    secret: str = ""  # of the ranks; empty: a new one
    address: str = ""  # of the rendezvous; empty: one by which the hosts reach it
    start_timeout_s: float = 30.0
    check_hosts: bool = True  # before anything starts, where some are not this one
    term_grace_s: float = 30.0  # from SIGTERM to SIGKILL
    policy: FailurePolicy = field(default_factory=StopAtFirstFailure)
    found: str = ""  # for messages: the allocation that has the hosts, where nobody has named them
    way: str = ""  # for messages: the program that starts agents; empty: none, and ssh for other hosts
    verbose: bool = False
