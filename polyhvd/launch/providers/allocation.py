"""Allocations: the hosts that a batch system has given this job, in which polyhvdrun starts the ranks.

Which hosts they are is read of the environment, purely but for files that the batch system names; recorded
environments test it. How agents get onto them differs: Slurm's srun, LSF's blaunch, or ssh.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from polyhvd.launch.hosts.lists import Host, HostsError
from polyhvd.launch.providers.starting import AgentProvider

__all__ = ["Allocation", "Allocator", "Reach", "find"]


@dataclass(frozen=True)
class Reach:
    """How polyhvdrun gets onto the hosts of an allocation."""

    #: The program that does it: "srun"; empty: what ``--hosts`` would use.
    program: str = ""
    #: For hosts other than this one.
    remote: AgentProvider | None = None
    #: For all hosts, this one included; None: agents of this host are started directly.
    everywhere: AgentProvider | None = None
    #: Of the rendezvous; empty: of the interface that the user names, or one towards the first other host.
    address: str = ""


@dataclass(frozen=True)
class Allocation:
    """The resources that a batch system has given a job."""

    allocator: Allocator
    job: str  # its number
    hosts: tuple[Host, ...]
    seen: str  # the variables with their values, for messages
    more: str  # how a user gets more slots
    here: str = ""  # this host, as the list names it; empty: the list need not have it
    restarts: int = 0  # how often the batch system has restarted the job

    def __str__(self) -> str:
        listed = ",".join(f"{host.name}:{host.slots}" for host in self.hosts)
        return f"{self.allocator.name} job {self.job}: {listed} ({self.seen})"

    def sized(self, size: int | None, slots_per_host: int | None) -> list[Host]:
        """The hosts with as many slots as ranks ask for.

        Ranks that are asked for on one host need no slot each: there is no question where they go.

        Raises:
            HostsError: there are too few slots.
        """
        hosts = [Host(host.name, slots_per_host or host.slots) for host in self.hosts]
        slots = sum(host.slots for host in hosts)
        if size is None or size <= slots:
            return hosts
        if len(hosts) == 1 and slots_per_host is None:
            return [Host(hosts[0].name, size)]
        listed = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        raise HostsError(
            f"{size} ranks were requested, but {self.allocator.name} job {self.job} has {slots} slots "
            f"({listed}; {self.seen}); {self.more}, or give each host N with --slots-per-host N"
        )


class Allocator(Protocol):
    """A batch system, as the launcher sees it."""

    #: As users call it: "Slurm".
    name: str

    def find(self, environ: Mapping[str, str]) -> Allocation | None:
        """The allocation that this process is in; None: it is in none of this batch system's.

        Raises:
            ConfigError: it is in one, and its variables cannot be read or contradict each other; or this
                process is one of several that the batch system has started.
        """

    def reach(self, allocation: Allocation, used: Sequence[str], options: argparse.Namespace) -> Reach:
        """How to start agents on those of its hosts that are used.

        Raises:
            ValueError: there is no way.
            OSError: the program for it cannot be run.
        """


def find(environ: Mapping[str, str]) -> Allocation | None:
    """The allocation that this process is in; raises ConfigError as :meth:`Allocator.find` does.

    Example::

        found = find({"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"})
        found.hosts  # (Host("n1", 2), Host("n2", 2))
    """
    from polyhvd.launch.providers.lsf_agents import Lsf  # all of them stand on this module
    from polyhvd.launch.providers.pbs_agents import Pbs
    from polyhvd.launch.providers.slurm_agents import Slurm

    allocators: tuple[Allocator, ...] = (Slurm(), Lsf(), Pbs())
    return next(filter(None, (allocator.find(environ) for allocator in allocators)), None)
