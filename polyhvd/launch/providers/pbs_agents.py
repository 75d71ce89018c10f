"""Allocations of PBS (OpenPBS, PBS Professional) and Torque, whose other hosts are reached by ssh.

pbsdsh and pbs_tmrsh start programs there as well, but write what those print to the job's files, and give
them no input, so that they cannot carry an agent's frames: PBS Professional's Reference Guide, "pbs_tmrsh".
Variables: PBS Professional's User's Guide, "Environment Variables Available to Job".
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from polyhvd.config import ConfigError
from polyhvd.launch.hosts.lists import HostsError, parse_hostfile
from polyhvd.launch.providers.allocation import Allocation, Reach
from polyhvd.launch.providers.provider import number, shown

__all__ = ["Pbs"]


class Pbs:
    """See :class:`polyhvd.launch.providers.allocation.Allocator`."""

    name = "PBS"

    def find(self, environ: Mapping[str, str]) -> Allocation | None:
        """The hosts of the job around a batch script or a shell: a line of a file for each slot."""
        job, path = environ.get("PBS_JOBID", ""), environ.get("PBS_NODEFILE", "")
        if not job or not path:
            return None
        try:
            hosts = parse_hostfile(path)
        except HostsError as error:
            raise ConfigError(f"PBS_NODEFILE: {error}; name hosts and slots with -H instead") from None
        stated, slots = number(environ, "PBS_NP"), sum(host.slots for host in hosts)
        if stated is not None and stated != slots:
            raise ConfigError(
                f"PBS_NODEFILE={path} has {slots} lines, but PBS_NP={stated}; is the file cut off? -H names "
                "hosts and slots instead"
            )
        return Allocation(
            self,
            job,
            tuple(hosts),
            shown(environ, "PBS_NODEFILE"),
            "request more from qsub with mpiprocs, as in "
            "-l select=2:ncpus=8:mpiprocs=8 (Torque: nodes=2:ppn=8)",
        )

    def reach(self, allocation: Allocation, used: Sequence[str], options: argparse.Namespace) -> Reach:
        """Return that of ``--hosts``: this host directly, others by ssh."""
        return Reach()
