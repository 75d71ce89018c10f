"""Slurm's allocations, and agents that srun starts in them: one step of one task on each host.

The step has all that the job has been given on its host: CPUs, memory, GPUs. srun carries the agent's
streams, and the ranks have the environment of a task of that step, with what Slurm sets for its host.
Variables: sbatch(1), "OUTPUT ENVIRONMENT VARIABLES"; srun(1), "INPUT ENVIRONMENT VARIABLES".
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence

from polyhvd.config import ConfigError
from polyhvd.launch.hosts.lists import Host
from polyhvd.launch.job.agent_process import AgentProcess
from polyhvd.launch.job.agent_program import agent_source, reader
from polyhvd.launch.providers.allocation import Allocation, Reach
from polyhvd.launch.providers.nodelist import counts, expand
from polyhvd.launch.providers.provider import number, shown
from polyhvd.rendezvous import network

__all__ = ["Slurm", "SrunAgent", "SrunAgents", "gpus_of_hosts", "srun_command", "srun_environment"]

_SCONTROL_TIMEOUT_S = 20.0
#: These describe the job, and how to find Slurm. All other variables of Slurm describe what a step should be
#: like, or the step around us: SLURM_CPUS_PER_TASK would give the agent the CPUs of one rank.
_KEPT = re.compile(
    r"SLURM_(JOB_.*|JOBID|ARRAY_.*|SUBMIT_.*|CLUSTER_NAME|CLUSTERS|CONF|CONF_SERVER|WORKING_CLUSTER|JWT|"
    r"RESTART_COUNT)"
)
_OF_SLURM = re.compile(r"(SLURM|SLURMD|SRUN|PMI|PMI2|PMIX)_.*")
#: srun has stdout be a terminal where it is not to wait for ends of lines.
_RAW = "import os,tty;os.isatty(1) and tty.setraw(1);"


class Slurm:
    """See :class:`polyhvd.launch.providers.allocation.Allocator`."""

    name = "Slurm"

    def find(self, environ: Mapping[str, str]) -> Allocation | None:
        """The nodes of the job around a batch script, the shell of salloc, or one task of srun's."""
        job = environ.get("SLURM_JOB_ID", "")
        nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
        stated = number(environ, "SLURM_JOB_NUM_NODES")
        if job and not nodes and stated is not None and stated > 1:
            raise ConfigError(
                f"SLURM_JOB_NODELIST is not set, but SLURM_JOB_NUM_NODES={stated}; name hosts with -H instead"
            )
        if not job or not nodes:
            return None
        _refuse_many(environ)
        try:
            names = expand(nodes)
        except ValueError as error:
            raise ConfigError(f"SLURM_JOB_NODELIST: {error}") from None
        if stated is not None and stated != len(names):
            raise ConfigError(
                f"SLURM_JOB_NODELIST={nodes} names {len(names)} hosts, but SLURM_JOB_NUM_NODES={stated}; is "
                "the list cut off? name hosts with -H instead"
            )
        variable, slots = _slots(environ, len(names))
        return Allocation(
            self,
            job,
            tuple(Host(name, count) for name, count in zip(names, slots, strict=True)),
            shown(environ, "SLURM_JOB_NODELIST", variable),
            "request more from sbatch with --ntasks or --ntasks-per-node",
            here=environ.get("SLURMD_NODENAME", ""),
            restarts=number(environ, "SLURM_RESTART_COUNT") or 0,
        )

    def reach(self, allocation: Allocation, used: Sequence[str], options: argparse.Namespace) -> Reach:
        """Use srun, except for a job on only this host, as in a container without Slurm's programs."""
        if shutil.which("srun") is None:
            if list(used) == [allocation.here] or all(map(network.is_local, used)):
                return Reach()
            raise ValueError(
                f"{allocation}: srun, which starts the ranks, is not on PATH; -H {used[0]}:N,... uses ssh"
            )
        others = [name for name in used if name != allocation.here]
        address = ""
        if not options.network_interface:
            address = _address_towards(others[0]) if others else network.loopback()
        gpus = gpus_of_hosts(os.environ, allocation.hosts)
        agents = SrunAgents(allocation.job, options.remote_python, gpus)
        return Reach("srun", everywhere=agents, address=address)


class SrunAgents:
    """See :class:`polyhvd.launch.providers.starting.AgentProvider`."""

    def __init__(self, job: str, python: str, gpus: Mapping[str, str]) -> None:
        """``gpus``: those of a host's step, where Slurm would give it fewer than the job has there."""
        self._job, self._python, self._gpus = job, python, gpus

    def agent(self, host: Host) -> SrunAgent:
        """Start srun, and through it an agent."""
        return SrunAgent(host.name, self._job, self._python, self._gpus.get(host.name, ""))


class SrunAgent(AgentProcess):
    """An agent whose pipes srun carries. Its ranks have the environment of srun's task."""

    program = "srun"

    def __init__(self, host: str, job: str, python: str, gpus: str) -> None:
        source = agent_source()
        command = srun_command(host, job, python, len(source), gpus)
        super().__init__(host, command, source, srun_environment(os.environ))


def srun_command(host: str, job: str, python: str, source_bytes: int, gpus: str = "") -> list[str]:
    """The command of an agent on one host of a job, which reads its program from standard input."""
    return [
        "srun",
        f"--jobid={job}",
        "--job-name=polyhvdrun",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={host}",
        "--overlap",  # beside other steps: the one around this process, or a monitor of the user's
        "--mem=0",  # all that the job has
        "--cpu-bind=none",  # ranks share what the agent has
        "--mpi=none",  # or ranks would take themselves for those of the agent's step
        "--export=ALL",
        "--chdir=/",  # agents enter the folder, and say it where they cannot
        "--unbuffered",  # frames have no ends of lines
        "--kill-on-bad-exit=0",
        *([f"--gpus-per-node={gpus}"] if gpus else []),
        "--",
        python,
        *("-I", "-S", "-c", _RAW + reader(source_bytes)),
    ]


def srun_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """This process's, less the variables by which it would change the step."""
    return {
        name: value
        for name, value in environ.items()
        if _KEPT.fullmatch(name) or not _OF_SLURM.fullmatch(name)
    }


def gpus_of_hosts(environ: Mapping[str, str], hosts: Sequence[Host]) -> dict[str, str]:
    """The value of ``--gpus-per-node`` for an agent, where the job was asked for with ``--gpus-per-task``.

    The step of one task would otherwise have the GPUs of one rank. Asked for in other ways, all GPUs that the
    job has on a host are its step's.
    """
    items = [item.rpartition(":") for item in environ.get("SLURM_GPUS_PER_TASK", "").split(",")]
    if "SLURM_STEP_ID" in environ or not all(count.isascii() and count.isdigit() for _, _, count in items):
        return {}
    return {
        host.name: ",".join(f"{kind}{colon}{int(count) * host.slots}" for kind, colon, count in items)
        for host in hosts
    }


def _refuse_many(environ: Mapping[str, str]) -> None:
    """Raise ConfigError for one of several processes, each of which would start a job."""
    tasks, components = number(environ, "SLURM_STEP_NUM_TASKS"), number(environ, "SLURM_HET_SIZE")
    if tasks is not None and tasks > 1 and "SLURM_STEP_ID" in environ:
        raise ConfigError(
            f"srun has started this polyhvdrun as one of {tasks} "
            f"({shown(environ, 'SLURM_PROCID', 'SLURM_STEP_NUM_TASKS')}), and each would start a separate "
            "job. Either `srun python train.py`, or polyhvdrun without srun; or -H localhost:N for a job in "
            "every task"
        )
    if components is not None and components > 1:
        raise ConfigError(
            f"SLURM_HET_SIZE={components}: polyhvdrun does not know the hosts of a heterogeneous job; name "
            "them with -H"
        )


def _slots(environ: Mapping[str, str], hosts: int) -> tuple[str, list[int]]:
    """How many ranks each host takes, and the variable with these numbers."""
    within_step = "SLURM_STEP_ID" in environ  # whose SLURM_TASKS_PER_NODE is that of the step
    gpus = environ.get("SLURM_GPUS_PER_NODE", "")
    if gpus and "SLURM_NTASKS" not in environ:
        return "SLURM_GPUS_PER_NODE", [_gpus(gpus)] * hosts
    names = ("SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE")
    for variable in names[within_step:]:
        if not environ.get(variable):
            continue
        try:
            found = counts(environ[variable])
        except ValueError as error:
            raise ConfigError(f"{variable}: {error}") from None
        if len(found) != hosts:
            raise ConfigError(
                f"SLURM_JOB_NODELIST={environ.get('SLURM_JOB_NODELIST', '')} names {hosts} hosts, but "
                f"{variable}={environ[variable]} is for {len(found)}; name hosts and slots with -H instead"
            )
        return variable, found
    return names[0], [1] * hosts


def _gpus(text: str) -> int:
    """The number in ``4``, ``a100:4`` or ``a100:2,v100:2``."""
    total = 0
    for item in text.split(","):
        digits = item.rpartition(":")[2]
        if not (digits.isascii() and digits.isdigit()) or int(digits) < 1:
            raise ConfigError(f"SLURM_GPUS_PER_NODE={text}: {item!r} is not a number of GPUs")
        total += int(digits)
    return total


def _address_towards(node: str) -> str:
    """This host's address for a node, whose name may be known only to Slurm."""
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        node = _slurm_address(node) or node
    try:
        return network.address_towards(node)
    except ValueError:
        raise ValueError(
            f"no route to host {node} of the allocation: does `scontrol show node {node}` print its address? "
            "--network-interface names the interface to use instead"
        ) from None


def _slurm_address(node: str) -> str:
    """NodeAddr of a node; empty if Slurm does not report it."""
    command = ["scontrol", "--oneliner", "show", "node", node]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SCONTROL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(r"\bNodeAddr=(\S+)", done.stdout)
    return match[1] if match else ""
