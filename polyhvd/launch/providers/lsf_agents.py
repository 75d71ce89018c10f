"""LSF's allocations, agents that blaunch starts in them, and the command line of ``polyhvdrun --jsrun``.

Variables: https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=variables-environment-set-job-execution.
blaunch: https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=reference-blaunch; like rsh, it carries the
standard streams. jsrun: https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=jsm-jsrun.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from polyhvd.config import ConfigError
from polyhvd.launch.hosts.lists import Host, HostsError
from polyhvd.launch.job.agent_process import AgentProcess
from polyhvd.launch.job.agent_program import READER, agent_source
from polyhvd.launch.providers.allocation import Allocation, Reach
from polyhvd.launch.providers.provider import number, shown
from polyhvd.launch.providers.ssh import forwarded_environment
from polyhvd.rendezvous import network
from polyhvd.runtime.placement import Placement

__all__ = ["BlaunchAgent", "BlaunchAgents", "Lsf", "hosts_of_jsrun", "jsrun_command", "jsrun_path"]


class Lsf:
    """See :class:`polyhvd.launch.providers.allocation.Allocator`."""

    name = "LSF"

    def find(self, environ: Mapping[str, str]) -> Allocation | None:
        """The hosts of the job around a batch script or an interactive shell."""
        job = environ.get("LSB_JOBID", "")
        variable = next((name for name in _LISTS if environ.get(name)), "")
        if not job or not variable:
            return None
        tasks = number(environ, "JSM_NAMESPACE_SIZE")
        if tasks is not None and tasks > 1:
            raise ConfigError(
                f"jsrun has started this polyhvdrun as one of {tasks} "
                f"({shown(environ, 'JSM_NAMESPACE_RANK', 'JSM_NAMESPACE_SIZE')}), and each would start "
                "a separate job. Either `jsrun ... python train.py`, or polyhvdrun without jsrun; or "
                "-H localhost:N for a job in every task"
            )
        hosts = _LISTS[variable](environ[variable])
        stated, slots = number(environ, "LSB_DJOB_NUMPROC"), sum(host.slots for host in hosts)
        if stated is not None and stated != slots:
            raise ConfigError(
                f"{variable}={environ[variable]} has {slots} slots, but LSB_DJOB_NUMPROC={stated}; is the "
                "list cut off? name hosts and slots with -H instead"
            )
        return Allocation(self, job, tuple(hosts), shown(environ, variable), "request more from bsub with -n")

    def reach(self, allocation: Allocation, used: Sequence[str], options: argparse.Namespace) -> Reach:
        """This host directly, others by blaunch."""
        if all(map(network.is_local, used)):
            return Reach()
        if shutil.which("blaunch") is None:
            raise ValueError(
                f"{allocation}: blaunch, which starts ranks on other hosts, is not on PATH; --jsrun has "
                f"jsrun start them, and -H {used[0]}:N,... ssh"
            )
        return Reach("blaunch", remote=BlaunchAgents(options.remote_python))


class BlaunchAgents:
    """See :class:`polyhvd.launch.providers.starting.AgentProvider`."""

    def __init__(self, python: str = sys.executable) -> None:
        self._python = python

    def agent(self, host: Host) -> BlaunchAgent:
        """Start blaunch, and through it an agent."""
        return BlaunchAgent(host.name, self._python)


class BlaunchAgent(AgentProcess):
    """An agent whose pipes blaunch carries; polyhvd lies at the same place on that host."""

    program = "blaunch"

    def __init__(self, host: str, python: str) -> None:
        source = agent_source()
        command = ["blaunch", host, python, "-I", "-S", str(READER), str(len(source))]
        super().__init__(host, command, source)
        self.environment = forwarded_environment()


def hosts_of_jsrun(allocation: Allocation | None, size: int | None, slots_per_host: int | None) -> list[Host]:
    """The hosts on which jsrun starts tasks, with as many slots on each as ranks ask for.

    Where batch scripts run on a launch node, LSF lists that first, with one slot, and then the compute nodes.

    Raises:
        ValueError: this is not a job of LSF's, or the ranks are not as many on each host.
    """
    if allocation is None or not isinstance(allocation.allocator, Lsf):
        raise ValueError("--jsrun is for jobs of LSF, on the hosts of the job (LSB_JOBID, and no -H)")
    hosts = list(allocation.hosts)
    rest = hosts[1:]
    if rest and hosts[0].slots == 1 and all(host.slots > 1 for host in rest):
        hosts = rest
    if size is not None and slots_per_host is None:
        if size % len(hosts):
            raise HostsError(
                f"--jsrun: {size} ranks cannot be distributed equally over {len(hosts)} hosts; give another "
                "-np or fill the hosts in their order with --slots-per-host"
            )
        slots_per_host = size // len(hosts)
    return [Host(host.name, slots_per_host or host.slots) for host in hosts]


def jsrun_command(
    argv: Sequence[str], placements: Sequence[Placement], settings: Mapping[str, str], extra: Sequence[str]
) -> list[str]:
    """The command line of jsrun: a resource set for each host, with all that the host has.

    Raises:
        HostsError: hosts have different numbers of ranks, which takes a rankfile (``--erf_input``).
    """
    tasks = Counter(item.host for item in placements)
    if len(set(tasks.values())) != 1:
        raise HostsError(
            f"--jsrun: {len(placements)} ranks on {len(tasks)} hosts are not as many on each; give another "
            "-np, or start them without polyhvdrun, by a rankfile: jsrun --erf_input FILE python train.py"
        )
    words = ["jsrun", f"--nrs={len(tasks)}", "--rs_per_host=1", f"--tasks_per_rs={tasks[placements[0].host]}"]
    words += ["--cpu_per_rs=ALL_CPUS", "--gpu_per_rs=ALL_GPUS", "--bind=none", "--launch_distribution=packed"]
    words += [word for name, value in sorted(settings.items()) for word in ("--env", f"{name}={value}")]
    return [*words, *extra, *argv]


def jsrun_path() -> str:
    """Return the path of jsrun; raises ValueError if it is not found."""
    path = shutil.which("jsrun")
    if path is None:
        raise ValueError(
            "--jsrun: jsrun is not on PATH; within a job of LSF polyhvdrun starts ranks without it"
        )
    return path


def _pairs(text: str) -> list[Host]:
    """``host1 4 host2 4``."""
    words = text.split()
    counts = words[1::2]
    if len(words) % 2 or not all(word.isascii() and word.isdigit() and int(word) for word in counts):
        raise ConfigError(
            f"LSB_MCPU_HOSTS={text} is not a list of hosts, each with its number of slots; is it cut off? "
            "name hosts and slots with -H instead"
        )
    return [Host(name, int(count)) for name, count in zip(words[::2], counts, strict=True)]


def _file(path: str) -> list[Host]:
    """A file with a line for each slot."""
    try:
        return _words(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"LSB_DJOB_HOSTFILE={path} cannot be read: {error}") from None


def _words(text: str) -> list[Host]:
    """A word for each slot."""
    return [Host(name, count) for name, count in Counter(text.split()).items()]


#: The best first: the others are not set, or not whole, where a job has many slots.
_LISTS = {"LSB_MCPU_HOSTS": _pairs, "LSB_DJOB_HOSTFILE": _file, "LSB_HOSTS": _words}
