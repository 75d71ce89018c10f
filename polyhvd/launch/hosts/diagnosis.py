"""Turns the doctor's findings into problems with their cures, tables for people, and JSON. Pure.

``polyhvd docs doctor`` describes the JSON. Existing keys do not change; an incompatible change increases
``schema``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from polyhvd.launch.hosts.checks import Problem, columns, table
from polyhvd.launch.hosts.survey import HostFindings

__all__ = ["as_json", "problem_lines", "problems_of", "resources_of", "text"]

SCHEMA = 1
CLOCK_OFFSET_MAX_S = 1.0
OPEN_FILES_MIN = 1024
SHARED_MEMORY_BYTES_MIN = 64 << 20
CGROUP_SHARE_MAX = 0.95
_MB = 1 << 20
_RESOURCES = ("cores", "affinity", "open files", "locked memory", "/dev/shm free", "memory", "huge pages")


def problems_of(hosts: Sequence[HostFindings]) -> list[Problem]:
    """Everything that is wrong: of each host, of its ways to the others, and where hosts disagree."""
    found = [problem for host in hosts for problem in [*host.problems, *_of_host(host)]]
    return [*found, *_of_links(hosts), *_same_machines(hosts), *_disagreements(hosts)]


def _of_host(host: HostFindings) -> list[Problem]:
    facts, found = host.facts, []
    known = {problem.what for problem in host.problems}
    if host.clock is not None and "clock" not in known:
        ahead, exact = host.clock
        if abs(ahead) - exact > CLOCK_OFFSET_MAX_S:
            side = "ahead of" if ahead > 0 else "behind"
            text = f"its clock is {abs(ahead):.1f} s {side} this host's"
            found.append(Problem(host.name, "clock", text, "synchronize the clocks (chrony, ntpd)"))
    if not facts:
        return found
    if facts["packages_problem"]:
        text = f"{facts['python']['path']}: {facts['packages_problem']}"
        found.append(Problem(host.name, "Python", text, "run it there by hand"))
    files = facts["limits"]["open_files"]
    if files is not None and files < OPEN_FILES_MIN:
        cure = f"ulimit -n {OPEN_FILES_MIN} or more: a rank needs one for each other rank and each file"
        found.append(Problem(host.name, "open files", f"only {files} may be open", cure))
    shared = facts["shared_memory"]
    if "no room" not in known and "free" in shared and shared["free"] < SHARED_MEMORY_BYTES_MIN:
        text = f"{shared['path']} has {shared['free'] // _MB} MB of {shared['size'] // _MB} MB free"
        cure = "enlarge it (docker --shm-size): data loaders and NCCL need it"
        found.append(Problem(host.name, "shared memory", text, cure))
    memory = facts["memory"]
    limit, used = memory["cgroup_limit"], memory["cgroup_used"]
    if limit and used > CGROUP_SHARE_MAX * limit:
        text = f"the control group uses {used // _MB} MB of {limit // _MB} MB"
        found.append(Problem(host.name, "memory", text, "end what uses it, or ask for more"))
    return found


def _of_links(hosts: Sequence[HostFindings]) -> list[Problem]:
    found = []
    for host in hosts:
        for link in host.links:
            if not link["reached"]:
                tried = ", ".join(f"{address}: {reason}" for address, reason in link["tried"]) or "no address"
                text = f"it cannot connect to {link['to']} ({tried})"
                cure = "open the firewall between them, or choose a network with --network-interface"
                found.append(Problem(host.name, "unreachable", text, cure))
    return found


def _same_machines(hosts: Sequence[HostFindings]) -> list[Problem]:
    """Hosts that are one, under several names: ranks of each would take all of its cores and GPUs."""
    names: dict[str, list[str]] = {}
    for host in hosts:
        if identity := host.facts.get("identity"):
            names.setdefault(identity, []).append(host.name)
    return [
        Problem(
            ", ".join(same[1:]),
            "one machine",
            f"{same[0]} is this machine under another name, which calls itself {identity.partition(' ')[0]}",
            "name it once, with all its slots",
        )
        for identity, same in names.items()
        if len(same) > 1
    ]


def _disagreements(hosts: Sequence[HostFindings]) -> list[Problem]:
    """Packages that hosts have in different versions; a row lists all hosts with theirs."""
    asked = [host for host in hosts if host.facts and not host.facts["packages_problem"]]
    names = dict.fromkeys(name for host in asked for name in host.facts["packages"])
    found = []
    sides: dict[str, list[str]] = {}
    for host in asked:
        version = ".".join(host.facts["python"]["version"].split(".")[:2])
        sides.setdefault(version, []).append(host.name)
    if len(sides) > 1:
        found.append(_disagreement("Python", sides))
    for name in names:
        sides = {}
        for host in asked:
            sides.setdefault(host.facts["packages"].get(name, "none"), []).append(host.name)
        if len(sides) > 1:
            found.append(_disagreement(name, sides))
    return found


def _disagreement(name: str, sides: Mapping[str, Sequence[str]]) -> Problem:
    most = max(sides, key=lambda version: len(sides[version]))
    odd = [host for version, hosts in sides.items() if version != most for host in hosts]
    text = "; ".join(f"{version} on {', '.join(hosts)}" for version, hosts in sides.items())
    return Problem(", ".join(odd), "versions", f"{name}: {text}", "install the same everywhere")


def as_json(hosts: Sequence[HostFindings], local: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The report for programs.

    Args:
        hosts: that were examined.
        local: of this host, where it is the only one: what was looked for, and its launcher.
    """
    problems = problems_of(hosts)
    return {
        "schema": SCHEMA,
        "healthy": not problems,
        "problems": [asdict(problem) for problem in problems],
        "hosts": [_host_json(host) for host in hosts],
        "links": [{"from": host.name, **_link_json(link)} for host in hosts for link in host.links],
        **(local or {}),
    }


def _host_json(host: HostFindings) -> dict[str, Any]:
    facts = host.facts
    clock = host.clock
    return {
        "name": host.name,
        "examined": bool(facts),
        "clock": None if clock is None else {"ahead_s": round(clock[0], 6), "exact_s": round(clock[1], 6)},
        "chosen": {"address": host.chosen, "interface": interface_of(host), "why": host.why},
        **{name: value for name, value in facts.items() if name != "packages_problem"},
    }


def _link_json(link: Mapping[str, Any]) -> dict[str, Any]:
    wanted = ("to", "reached", "address", "from_address", "latency_us", "bandwidth_mb_s")
    tried = [{"address": address, "reason": reason} for address, reason in link["tried"]]
    return {**{name: link.get(name) for name in wanted}, "failed": tried}


def interface_of(host: HostFindings) -> str:
    """The interface with the address that ranks of a host listen on; empty: not known."""
    found = [name for name, address in host.facts.get("interfaces", ()) if address == host.chosen]
    return found[0] if found else ""


def text(hosts: Sequence[HostFindings]) -> list[str]:
    """The report for people, of several hosts."""
    examined = [host for host in hosts if host.facts]
    lines = []
    if examined:
        lines += ["Versions:", *_versions(examined), "", "Hosts:", *_resources(examined)]
        lines += ["", "Network:", *_network(examined)]
    if any(host.links for host in hosts):
        lines += ["", "Latency in microseconds, from row to column:", *_matrix(hosts, "latency_us")]
        lines += ["", "Bandwidth in MB/s, of one connection:", *_matrix(hosts, "bandwidth_mb_s")]
    return [*lines, *([""] if lines else []), *problem_lines(problems_of(hosts), len(hosts))]


def problem_lines(problems: Sequence[Problem], count: int) -> list[str]:
    """The problems as a table, or that there are none."""
    if not problems:
        return [f"No problems on {'this host' if count == 1 else f'{count} hosts'}."]
    return [f"Problems: {len(problems)}", *table(problems).splitlines()]


def _versions(hosts: Sequence[HostFindings]) -> list[str]:
    names = dict.fromkeys(name for host in hosts for name in host.facts["packages"])
    rows = [["host", "Python", *names]]
    for host in hosts:
        packages = host.facts["packages"]
        rows.append(
            [host.name, host.facts["python"]["version"], *(packages.get(name, "-") for name in names)]
        )
    return columns(rows)


def _resources(hosts: Sequence[HostFindings]) -> list[str]:
    rows = [["host", "clock", *_RESOURCES]]
    rows += [[host.name, clock_text(host), *resource_cells(host.facts)] for host in hosts]
    return columns(rows)


def resources_of(host: HostFindings) -> list[str]:
    """Cores, limits and memory of one host, a line each."""
    return columns([list(pair) for pair in zip(_RESOURCES, resource_cells(host.facts), strict=True)])


def clock_text(host: HostFindings) -> str:
    """How far a clock is ahead, and how exact that is."""
    return "-" if host.clock is None else f"{1000 * host.clock[0]:+.1f} ms (±{1000 * host.clock[1]:.1f})"


def resource_cells(facts: Mapping[str, Any]) -> list[str]:
    """The cells of a row, in the order of :data:`_RESOURCES`."""
    cores, limits, memory, shared = facts["cores"], facts["limits"], facts["memory"], facts["shared_memory"]
    quota = "" if cores["quota"] is None else f", quota {cores['quota']:g}"
    limit = memory["cgroup_limit"]
    group = "" if not limit else f", {memory['cgroup_used'] // _MB} of {limit // _MB} MB of its control group"
    return [
        f"{cores['usable']} of {cores['installed']}{quota}",
        cores["affinity"],
        "unlimited" if limits["open_files"] is None else str(limits["open_files"]),
        _size(limits["locked_memory"]),
        f"{shared['free'] // _MB} MB" if "free" in shared else shared["problem"],
        f"{memory['available'] // _MB} of {memory['total'] // _MB} MB free{group}",
        facts["huge_pages"] or "-",
    ]


def _size(count: int | None) -> str:
    if count is None:
        return "unlimited"
    return f"{count // _MB} MB" if count >= _MB else f"{count >> 10} KB"


def _network(hosts: Sequence[HostFindings]) -> list[str]:
    rows = [["host", "interface", "address", "why"]]
    rows += [[host.name, interface_of(host) or "-", host.chosen or "-", host.why or "-"] for host in hosts]
    return columns(rows)


def _matrix(hosts: Sequence[HostFindings], what: str) -> list[str]:
    members = [host for host in hosts if host.links]
    names = [host.name for host in members]
    rows = [["", *names]]
    for host in members:
        links = {link["to"]: link for link in host.links}
        cells = ["." if name == host.name else _cell(links.get(name), what) for name in names]
        rows.append([host.name, *cells])
    return columns(rows)


def _cell(link: Mapping[str, Any] | None, what: str) -> str:
    if link is None:
        return "?"
    return f"{link[what]:.0f}" if link["reached"] else "none"
