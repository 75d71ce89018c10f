"""Whether the hosts of a job can run it, judged before anything is started on any of them.

Each agent has :mod:`polyhvd.launch.hosts.facts` look at its host, over the connection that it has anyway. All
hosts that cannot take part are reported at once, in a table.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyhvd.launch.hosts import facts as host_facts
from polyhvd.launch.job import agent
from polyhvd.launch.job.agent_program import examination
from polyhvd.launch.providers.starting import HostAgent
from polyhvd.observe.terminal import printable
from polyhvd.rendezvous import auth, network
from polyhvd.rendezvous.server import Server

__all__ = [
    "HostChecks",
    "HostsUnfitError",
    "Problem",
    "Route",
    "columns",
    "judge",
    "own_version",
    "table",
    "unreachable",
]

#: Clocks that differ by more make logs, certificates and files' times useless.
CLOCK_OFFSET_MAX_S = 60.0
#: Less than that is not enough room: a checkpoint's lock file or a loader's semaphore would fail in the
#: midst.
ROOM_BYTES_MIN = 1 << 20
_PYTHON_MIN = (3, 8)
_REACH_TIMEOUT_S = 10.0  # at most, for a host to connect to the launcher
_ADDRESSES_MAX = 16
_LINES_MAX = 3

#: Error text of ssh, its name in a table, and what to do.
_SSH = (
    (r"exec: ssh:", "no ssh here", "install an ssh client on this host"),
    (r"Could not resolve|Name or service not known", "unknown name", "check the name, DNS and ~/.ssh/config"),
    (
        r"No route to host|Network is unreachable",
        "no route",
        "is the host up, and are both in one network?",
    ),
    (r"Connection refused", "refused", "is sshd running there, and on that port (-p)?"),
    (
        r"Host key verification failed|HOST IDENTIFICATION HAS CHANGED",
        "host key",
        "connect once by hand and compare the key, or put it into ~/.ssh/known_hosts",
    ),
    (
        r"Permission denied \(|Too many authentication failures",
        "key",
        "have the host accept your key (ssh-copy-id), or name it with -i; no password can be typed here",
    ),
    (r"timed out|no answer within", "no answer", "is the host up, or a firewall in the way?"),
    (r"Connection (closed|reset)|kex_exchange", "ssh cut off", "see the log of sshd there"),
)


class HostsUnfitError(OSError):
    """Some hosts cannot run the job; the text is the table of them. ``problems`` are its rows."""

    def __init__(self, problems: Sequence[Problem], hosts: int) -> None:
        self.problems = list(problems)
        count = len({problem.host for problem in problems})
        noun = "host" if hosts == 1 else "hosts"
        super().__init__(
            f"{count} of {hosts} {noun} cannot take part, and nothing was started:\n{table(problems)}"
        )


@dataclass(frozen=True)
class Problem:
    """Why a host cannot take part."""

    host: str
    what: str  # in a word or two
    found: str
    cure: str


def table(problems: Iterable[Problem]) -> str:
    """Problems as aligned lines of text, without a line's end at the end.

    Example::

        print(table([Problem("node3", "refused", "ssh: ... Connection refused", "is sshd running?")]))
    """
    rows = [["host", "problem", "found, and what to do"]]
    rows += [[item.host, item.what, f"{item.found}; {item.cure}"] for item in problems]
    return "\n".join(columns(rows))


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of equally many cells as aligned lines of text."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        ("  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in cells
    ]


def unreachable(
    host: str, program: str, status: int, complaints: Sequence[str], python: str | None = None
) -> Problem:
    """Why there is no agent on a host, from the status and output of the program that should start it.

    Args:
        host: as users name it.
        program: that has ended: "ssh".
        status: its exit status, negative for a signal.
        complaints: its last lines, and those of the shell and the Python there.
        python: that was to run there, where it is known.
    """
    for pattern, what, cure in _SSH:
        if found := [line for line in complaints if re.search(pattern, line)]:
            return Problem(host, what, found[-1].strip(), cure)
    last = "; ".join(line.strip() for line in complaints[-_LINES_MAX:])
    if status in (126, 127):
        missing = last or f"{python or 'Python'}: cannot be run there"
        return Problem(host, "no Python", missing, "name one of that host's with --remote-python")
    old = [line for line in complaints if "SyntaxError" in line or "Unknown option: -I" in line]
    if old:
        cure = f"Python {_PYTHON_MIN[0]}.{_PYTHON_MIN[1]} or newer is needed: --remote-python"
        return Problem(host, "old Python", f"{python or 'Python'} there: {old[-1].strip()}", cure)
    how = f"{program} ended with status {status}"
    return Problem(host, "no agent", f"{how}: {last}" if last else how, "run ssh by hand, with -v")


def judge(
    host: str, facts: Mapping[str, Any], asked: float, answered: float, version: str, folder: str
) -> list[Problem]:
    """The problems of a host, from its own report. Pure.

    Args:
        host: as users name it.
        facts: of ``host_facts.main``.
        asked: by this host's clock, and ``answered`` likewise.
        version: of polyhvd here.
        folder: of the ranks.
    """
    problems = []
    clock = float(facts["clock"])
    ahead = max(clock - answered, 0.0) - max(asked - clock, 0.0)  # whatever the answer took
    if abs(ahead) > CLOCK_OFFSET_MAX_S:
        text = f"its clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this host's"
        problems.append(Problem(host, "clock", text, "synchronize the clocks (chrony, ntpd)"))
    for path, found in facts["room"].items():
        if (path != "/dev/shm" or "free" in found) and (text := _lack_of_room(found)):
            problems.append(Problem(host, "no room", f"{path}: {text}", "remove files there, or enlarge it"))
    if facts["cwd"]:
        text = f"{folder}: {facts['cwd']}"
        problems.append(Problem(host, "folder", text, "ranks work in this folder on every host"))
    for program in facts["programs"]:
        problems += _program_problems(host, program, version)
    return problems


def _lack_of_room(found: Mapping[str, Any]) -> str:
    if found["problem"]:
        return str(found["problem"])
    if found["free"] < ROOM_BYTES_MIN:
        return f"{found['free'] >> 10} KB are free of {found['size'] >> 10} KB"
    return "no further file can be made" if found["files"] == 0 else ""


def _program_problems(host: str, program: Mapping[str, Any], version: str) -> list[Problem]:
    name, path = program["name"], program["path"]
    if not path:
        cure = "install it there, or specify a program that exists there"
        return [Problem(host, "no program", f"{name}: not found, or not executable there", cure)]
    if "is_python" not in program:
        return []
    if program.get("problem"):
        return [Problem(host, "Python", f"{path}: {program['problem']}", "run it there by hand")]
    other = program["polyhvd"]
    if not other:
        cure = f"pip install polyhvd=={version} there, or name a Python that has it"
        return [Problem(host, "no polyhvd", f"{path} has none", cure)]
    if other not in (version, "unknown") and version != "unknown":
        text = f"{path} has {other}, this polyhvdrun is {version}"
        return [Problem(host, "version", text, "install the same polyhvd everywhere")]
    return []


@dataclass(frozen=True)
class Route:
    """How a host has reached the rendezvous; empty: it has not."""

    endpoint: str
    own_address: str  # of the host, where its ranks will listen
    failed: Sequence[Sequence[str]]  # addresses that it has tried before, and why they did not do


@dataclass
class _Host:
    """The check of one host."""

    process: HostAgent
    request: dict[str, Any]
    endpoints: list[str] = field(default_factory=list)  # that it was asked to try
    asked: float = -1.0  # by the wall clock; below 0: not yet
    number: int = 0  # of the last request, counted down
    reply: bytearray = field(default_factory=bytearray)  # to that request
    route: Route = field(default_factory=lambda: Route("", "", []))
    problems: list[Problem] = field(default_factory=list)
    done: bool = False


class HostChecks:
    """Checks the hosts of one job. The loop that drives the agents passes on what they send.

    Args:
        rendezvous: which each host has to reach. Where it does not, at another address of this host.
        secret: of the job. It goes to a host over the agent's connection, if it has to try several addresses.
        start_timeout_s: until when all hosts have to answer.
        fixed: the address of the rendezvous was chosen by the user.
        folder: of the ranks; empty: that of this process.
    """

    def __init__(
        self, rendezvous: Server, secret: str, start_timeout_s: float, *, fixed: bool, folder: str = ""
    ) -> None:
        self._rendezvous = rendezvous
        self._secret = secret
        self._start_timeout_s = start_timeout_s
        self._timeout_s = min(_REACH_TIMEOUT_S, start_timeout_s / 2)
        self._fixed = fixed
        self._folder = folder or os.getcwd()
        self._hosts: dict[HostAgent, _Host] = {}
        self._served = {network.parse_endpoint(rendezvous.endpoint)[0]: rendezvous.endpoint}
        self._all_served = fixed
        self._version = own_version()

    @property
    def pending(self) -> bool:
        """Whether a host has not answered yet."""
        return not all(host.done for host in self._hosts.values())

    def add(self, process: HostAgent, programs: Iterable[Sequence[str]], env: Mapping[str, str]) -> None:
        """Check a host, once its agent answers.

        Args:
            process: the agent.
            programs: command lines of its ranks.
            env: of them, above the agent's own.
        """
        different = {argv[0]: list(argv) for argv in programs}
        request = {"cwd": self._folder, "env": dict(env), "programs": list(different.values())}
        request["version"] = self._version
        self._hosts[process] = _Host(process, request)

    def forget(self, process: HostAgent) -> None:
        """Drop what is known of a host whose agent has ended."""
        self._hosts.pop(process, None)

    def look(self, process: HostAgent) -> None:
        """Send the checks to a host whose agent has answered, once."""
        host = self._hosts[process]
        if process.ready and host.asked < 0:
            self._ask(host, [self.serve(process.host), *self._served.values()], "")

    def take(self, process: HostAgent, number: int, payload: bytes) -> None:
        """Take a part of a host's reply to a request; empty: its end."""
        host = self._hosts[process]
        if host.done or number != host.number:
            return
        host.reply += payload
        if payload and b"\n" not in payload:
            return
        try:
            facts = json.loads(bytes(host.reply))
        except ValueError:  # the program has failed, with its reason on standard error
            last = "; ".join([*process.complaints][-_LINES_MAX:]) or "its agent cannot look around"
            host.problems.append(Problem(process.host, "no answer", last, "does that Python work?"))
            host.done = True
            return
        if facts["reached"] < 0 and self._serve_everywhere(host):
            return
        host.done = True
        now = time.time()
        host.problems += judge(process.host, facts, host.asked, now, self._version, host.request["cwd"])
        if facts["reached"] >= 0:
            host.route = Route(host.endpoints[facts["reached"]], facts["from"], facts["unreached"])
        else:
            host.problems.append(self._out_of_reach(process.host, facts["unreached"]))

    def lost(self, process: HostAgent, status: int, reason: str = "") -> None:
        """An agent has ended, or was given up."""
        host = self._hosts[process]
        if host.done and host.problems:
            return
        host.done = True
        if reason:
            host.problems.append(Problem(process.host, "lost", reason, "try again"))
        else:
            host.problems.append(unreachable(process.host, process.program, status, [*process.complaints]))

    def give_up(self, process: HostAgent | None = None) -> None:
        """The time is over: hosts that have not answered by now, or that of one agent, do not take part."""
        for host in self._hosts.values():
            if not host.done and host.process.ready and process in (None, host.process):
                host.done = True
                text = f"its agent runs, but has not completed its checks within {self._start_timeout_s:g} s"
                cure = "does a file system hang there? --start-timeout sets the limit"
                host.problems.append(Problem(host.process.host, "no answer", text, cure))

    def conclude(self) -> None:
        """Raise HostsUnfitError where hosts cannot take part."""
        if problems := self.problems():
            raise HostsUnfitError(problems, len(self._hosts))

    def problems(self) -> list[Problem]:
        """Why hosts cannot take part."""
        return [problem for host in self._hosts.values() for problem in host.problems]

    def problems_of(self, process: HostAgent) -> list[Problem]:
        """Why the host of this agent cannot take part; none: it can, or it is not known yet."""
        return self._hosts[process].problems

    def has_passed(self, process: HostAgent) -> bool:
        """Return whether the host of this agent can take part."""
        return self._hosts[process].done and not self._hosts[process].problems

    def awaits(self, process: HostAgent) -> bool:
        """Return whether the reply of this agent's host is for these checks."""
        return process in self._hosts

    def route_of(self, process: HostAgent) -> Route:
        """How a host has reached the rendezvous."""
        return self._hosts[process].route

    def endpoint(self, process: HostAgent) -> str:
        """Return where a host's ranks reach the rendezvous; after commas, other endpoints if hosts differ."""
        used = dict.fromkeys(host.route.endpoint for host in self._hosts.values())
        own = self._hosts[process].route.endpoint
        return ",".join([own, *(other for other in used if other != own)])

    def _ask(self, host: _Host, endpoints: Iterable[str], secret: str) -> None:
        host.endpoints = list(dict.fromkeys(endpoints))
        host.reply.clear()
        host.number -= 1
        host.asked = time.time()
        reach = {
            "endpoints": [network.parse_endpoint(endpoint) for endpoint in host.endpoints],
            "secret": secret,
            "timeout_s": self._timeout_s,
        }
        modules = [auth, host_facts] if secret else [host_facts]
        program = examination(modules, {**host.request, **reach})
        host.process.send(agent.EXAMINE, program, host.number)

    def serve(self, host: str) -> str:
        """Make the rendezvous listen where a host reaches it by the kernel's route; returns the endpoint."""
        if self._fixed or network.is_local(host):
            return next(iter(self._served.values()))
        return self._serve(network.address_for(host.rpartition("@")[2]))

    def _serve(self, address: str) -> str:
        """Make the rendezvous listen on an address, too; if it cannot, return the first one."""
        if address not in self._served:
            try:
                self._served[address] = self._rendezvous.listen(address)
            except OSError:
                return next(iter(self._served.values()))
        return self._served[address]

    def _serve_everywhere(self, host: _Host) -> bool:
        """The kernel's route does not lead here: make the host try all addresses of this host, once."""
        if not self._all_served:
            self._all_served = True
            for address in network.own_addresses()[:_ADDRESSES_MAX]:
                self._serve(address)
        if set(host.endpoints) >= set(self._served.values()):
            return False
        self._ask(host, self._served.values(), self._secret)
        return True

    def _out_of_reach(self, host: str, unreached: Sequence[Sequence[str]]) -> Problem:
        tried = ", ".join(f"{address}: {reason}" for address, reason in unreached)
        return Problem(
            host,
            "no way back",
            f"it cannot connect to polyhvdrun ({tried})",
            "open the firewall between them, or name their network with --network-interface",
        )


def own_version() -> str:
    """The version of polyhvd that runs here, or "unknown"."""
    beside = list(Path(__file__).parents[2].glob("polyhvd-*.dist-info"))
    if len(beside) == 1:
        return beside[0].name[len("polyhvd-") : -len(".dist-info")]
    import importlib.metadata  # takes longer to import than all else here

    try:
        return importlib.metadata.version("polyhvd")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
