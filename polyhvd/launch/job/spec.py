"""The description of a job: the program, the hosts, and what to do in which case."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from polyhvd.launch.elastic.driven import HEARTBEAT_TIMEOUT_S, Elastic
from polyhvd.launch.hosts.lists import Host
from polyhvd.launch.job import agent
from polyhvd.launch.job.policy import FailurePolicy, StopAtFirstFailure
from polyhvd.launch.job.programs import Program, argv_of
from polyhvd.launch.providers.ssh import SshAgents
from polyhvd.launch.providers.starting import AgentProvider
from polyhvd.rendezvous import network
from polyhvd.runtime.placement import Placement

if TYPE_CHECKING:
    from polyhvd.config import Settings
    from polyhvd.launch.providers.allocation import Allocation

__all__ = ["JobSpec", "address_of", "working_directory"]

_INTERVAL = "POLYHVD_METRICS_INTERVAL_S"
#: Of the rank or user that has started the launcher, and not for its ranks. A job that has them sets its own.
_NOT_PASSED_ON = (
    "POLYHVD_SECRET_FILE",
    "HOROVOD_SECRET_FILE",
    "POLYHVD_MEMBER",
    "POLYHVD_LAUNCHER_TIMEOUT_S",
)


@dataclass
class JobSpec:
    """The program to run, and the hosts."""

    argv: list[str]
    hosts: list[Host]
    placements: list[Placement]  # as of polyhvd.launch.hosts.lists.place
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
    elastic: Elastic | None = None  # then no rank is placed yet, and ``policy`` is not asked
    found: str = ""  # for messages: the allocation with the hosts, if the user has named none
    way: str = ""  # for messages: the program that starts agents; empty: none, and ssh for other hosts
    verbose: bool = False
    metrics_port: int | None = None  # of the page for Prometheus; 0: any free one; None: no page
    metrics_address: str = "127.0.0.1"
    cwd: str = field(default_factory=lambda: working_directory())  # of the ranks; it may be removed later

    @property
    def command(self) -> str:
        """The program with its arguments, or all programs, for messages."""
        return " : ".join(" ".join(argv) for argv in [item.argv for item in self.programs] or [self.argv])

    @property
    def heartbeat_timeout_s(self) -> float:
        """How long an agent may be silent, as the ranks' setting says, or else the launcher's; 0: for ever.

        Raises:
            ConfigError: it is no such number.
        """
        default = agent.HEARTBEAT_TIMEOUT_S if self.elastic is None else HEARTBEAT_TIMEOUT_S
        settings = self._settings("HEARTBEAT_TIMEOUT_S")
        return default if settings is None else settings.heartbeat_timeout_s

    @property
    def stopped_s(self) -> float:
        """After how long an agent ends a rank that is stopped by a signal; 0: never.

        Raises:
            ConfigError: the setting is no such number.
        """
        settings = self._settings("STALL_SHUTDOWN_TIME_SECONDS")
        return 0.0 if settings is None else settings.stall_shutdown_s

    def _settings(self, name: str) -> Settings | None:
        """The ranks' settings with this one, or else the launcher's; None if it is not set."""
        rows = [f"{prefix}_{name}" for prefix in ("POLYHVD", "HOROVOD")]
        given = {name: value for name, value in {**os.environ, **self.env}.items() if name in rows}
        if not given:
            return None
        from polyhvd.config import Settings  # takes long to import

        return Settings.from_environment(given)

    def within(self, allocation: Allocation, options: argparse.Namespace) -> JobSpec:
        """This job, in an allocation: with the way in which the batch system starts agents.

        Args:
            allocation: that has the hosts.
            options: ``mpi``, ``jsrun``, ``network_interface`` and ``remote_python`` of polyhvdrun.

        Raises:
            ValueError: there is no way.
        """
        spec = self
        if allocation.restarts:
            spec = replace(spec, env={**spec.env, "POLYHVD_RESTART_COUNT": str(allocation.restarts)})
        if options.mpi or options.jsrun:
            return spec
        used = sorted({int(item.host) for item in spec.placements}) or range(len(spec.hosts))
        reach = allocation.allocator.reach(allocation, [spec.hosts[number].name for number in used], options)
        return replace(
            spec,
            remote=reach.remote or spec.remote,
            agents=[reach.everywhere] * len(spec.hosts) if reach.everywhere is not None else None,
            address=reach.address,
            found=str(allocation),
            way=reach.program,
        )

    @property
    def metrics_interval_s(self) -> float:
        """The value of POLYHVD_METRICS_INTERVAL_S for ranks; by default reports cost the launcher little.

        Raises:
            ConfigError: the setting is no such number.
        """
        if (given := self.env.get(_INTERVAL, os.environ.get(_INTERVAL))) is not None:
            from polyhvd.config import Launched  # takes long to import

            return Launched.from_environment({_INTERVAL: given}).metrics_interval_s
        size = len(self.placements) if self.elastic is None else self.elastic.limits.max_size
        return min(max(2.0, size / 200), 60.0)

    def argv_of(self, ranks: Sequence[int]) -> list[str]:
        """The command that runs these ranks' programs."""
        return argv_of(self.programs, ranks) if self.programs else self.argv

    def order(
        self,
        ranks: list[tuple[int, dict[str, str]]],
        inherited: Mapping[str, str],
        variables: Mapping[str, str],
    ) -> dict[str, Any]:
        """The processes that an agent has to start, see :class:`polyhvd.launch.providers.starting.HostAgent`.

        Args:
            ranks: each with the variables that only it has.
            inherited: what they have of the launcher's environment.
            variables: of the job, for all of them.
        """
        passed_on = {name: value for name, value in inherited.items() if name not in _NOT_PASSED_ON}
        return {
            "argv": self.argv_of([rank for rank, _ in ranks]),
            "cwd": self.cwd,
            "env": {**passed_on, "PYTHONUNBUFFERED": "1", **self.env, **variables},
            "grace_s": self.term_grace_s,
            "stopped_s": self.stopped_s,
            "unset": _NOT_PASSED_ON,
            "ranks": ranks,
        }


def working_directory() -> str:
    """The directory in which ranks start; raises ValueError if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise ValueError(
            "the working directory, in which ranks would start, was removed; cd to another one"
        ) from None


def address_of(spec: JobSpec, local: Sequence[bool]) -> str:
    """Return the first address of a job's rendezvous; ``local``: whether each host is this one.

    Raises:
        ValueError: there is no such interface, or the ranks of this host could not reach the rendezvous.
    """
    if spec.address:
        return spec.address
    if spec.interface:
        return network.address_of(spec.interface)
    others = [host.name for host, is_local in zip(spec.hosts, local, strict=True) if not is_local]
    if others:
        return network.address_for(others[0].rpartition("@")[2])
    address = network.loopback()
    if not network.has_route(address):
        raise ValueError(
            f"ranks of this host could not reach polyhvdrun at {address}: the loopback interface is down; "
            "bring it up with 'ip link set lo up'"
        )
    return address
