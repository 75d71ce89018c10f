"""``polyhvd doctor``: what polyhvd finds on this host, or on several; and which job ``init()`` would join."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from polyhvd.config import ConfigError
from polyhvd.installed import is_installed
from polyhvd.launch.providers.choice import choose, explain, seen
from polyhvd.launch.providers.precedence import PROVIDERS

__all__ = ["add_options", "doctor", "main", "report"]

#: For a cluster of Ray to answer.
_RAY_S = 30.0


def report() -> list[str]:
    """The findings on this host, as lines of text."""
    return _examine_here()[0]


def doctor() -> None:
    """Print what was found on this host, and for what is missing why, and what to do.

    Raises:
        ConfigError: an environment variable cannot be used.

    Example::

        import polyhvd
        polyhvd.doctor()
    """
    print("\n".join(report()))


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of ``polyhvd doctor``, which are polyhvdrun's."""
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument("-H", "--hosts", metavar="H1,H2", help="hosts to check over ssh; default: this host")
    hosts.add_argument("--hostfile", metavar="FILE", help="file of hosts, one in each line")
    parser.add_argument("-p", "--ssh-port", type=int, metavar="PORT", help="port of ssh on the other hosts")
    parser.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="private key for ssh")
    parser.add_argument(
        "--ssh-option", action="append", default=[], metavar="OPTION", help="as ssh -o; may be repeated"
    )
    parser.add_argument(
        "--remote-python",
        metavar="PATH",
        default=sys.executable,
        help="path of Python on the hosts; default: the path of this Python",
    )
    parser.add_argument(
        "--network-interface", metavar="NAME", default="", help="interface, or network, of all connections"
    )
    parser.add_argument(
        "--start-timeout",
        type=float,
        metavar="S",
        default=30.0,
        help="seconds for hosts to answer; default: 30",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the report as JSON; see: polyhvd docs doctor"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; returns 0: nothing is wrong, 1: something is, 2: the command line is."""
    parser = argparse.ArgumentParser(
        prog="polyhvd doctor",
        description="Check this host or several hosts, and report installed software, problems and remedies.",
    )
    add_options(parser)
    options = parser.parse_args(arguments)
    try:
        if options.hosts is None and options.hostfile is None:
            lines, healthy = _examine_here(as_json=options.json)
        else:
            lines, healthy = _examine_hosts(options)
    except (ValueError, OSError) as error:
        parser.exit(2, f"polyhvd doctor: {error}\n")
    except KeyboardInterrupt:
        return 130
    print("\n".join(lines))
    return 0 if healthy else 1


def _examine_here(*, as_json: bool = False) -> tuple[list[str], bool]:
    from polyhvd.launch.hosts import diagnosis, survey  # which take a while to import
    from polyhvd.launch.hosts.checks import Problem
    from polyhvd.observe import doctor as host

    found = survey.here(_packages())
    local = found.name
    kinds = host.examine()
    found.problems += [
        Problem(local, item.name, "ranks cannot use it", item.note)
        for item in kinds["Transports"]
        if not item.found
    ]
    try:
        joinable = seen(PROVIDERS, os.environ)
        launcher = [*explain(joinable), *_allocation()]
        choose(joinable)
    except ConfigError as error:
        launcher = [str(error)]
        found.problems.append(
            Problem(local, "launcher", str(error), "unset the variables that do not belong to this job")
        )
    line, is_usable = _cluster_of_ray()
    launcher += [line] if line else []
    if not is_usable:
        cure = "start the cluster, or install the same versions here and there; or unset RAY_ADDRESS"
        found.problems.append(Problem(local, "Ray", line, cure))
    problems = diagnosis.problems_of([found])
    if as_json:
        findings = [
            {"kind": kind, "name": item.name, "found": item.found, "version": item.version}
            | {"path": item.path, "note": item.note}
            for kind, items in kinds.items()
            for item in items
        ]
        report = diagnosis.as_json([found], {"findings": findings, "launcher": launcher})
        return [json.dumps(report, indent=2)], not problems
    lines = [*host.lines(kinds), "", "Limits:", *diagnosis.resources_of(found)]
    lines += ["", "Launcher:", *(f"  {line}" for line in launcher)]
    return [*lines, "", *diagnosis.problem_lines(problems, 1)], not problems


def _allocation() -> list[str]:
    """Return a line about where polyhvdrun would start ranks, in a job of a batch system."""
    from polyhvd.launch.providers.allocation import find  # which ranks do not need

    try:
        found = find(os.environ)
    except ValueError as error:
        return [f"polyhvdrun, without -H: {error}"]
    return [] if found is None else [f"polyhvdrun, without -H, starts ranks in {found}"]


def _cluster_of_ray() -> tuple[str, bool]:
    """A line about the cluster of Ray that a program here would join, if any; and whether it can."""
    address = os.environ.get("RAY_ADDRESS", "")
    current = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    if not is_installed("ray") or not (address or current.exists()):
        return "", True
    command = [sys.executable, "-m", "polyhvd.ray.cluster"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_RAY_S
        )
    except subprocess.TimeoutExpired:
        return f"Ray: the cluster {address} has not answered within {_RAY_S:g} s", not address
    if done.returncode == 0:
        return done.stdout.strip(), True
    reason = done.stdout.strip() or "the program that connects to it was killed"
    if "ersion mismatch" not in reason and not address:
        return "", True  # the file is left of a cluster that has ended
    return f"Ray: the cluster {address} cannot be used: {reason}", False


def _examine_hosts(options: argparse.Namespace) -> tuple[list[str], bool]:
    from polyhvd.launch.hosts import diagnosis
    from polyhvd.launch.hosts.lists import parse_hostfile, parse_hosts
    from polyhvd.launch.hosts.survey import Survey, SurveyOptions
    from polyhvd.launch.providers.ssh import SshAgents, SshOptions

    timeout_s = options.start_timeout
    if not 0 < timeout_s < float("inf"):
        raise ValueError(f"--start-timeout {timeout_s:g}: must be above 0")
    hosts = parse_hosts(options.hosts) if options.hostfile is None else parse_hostfile(options.hostfile)
    ssh = SshOptions(
        port=options.ssh_port,
        identity_file=options.ssh_identity_file,
        options=tuple(options.ssh_option),
        python=options.remote_python,
        connect_timeout_s=timeout_s,
    )
    wanted = SurveyOptions(
        packages=_packages(),
        ssh=SshAgents(ssh),
        python=options.remote_python,
        interface=options.network_interface,
        timeout_s=timeout_s,
    )
    with Survey(hosts, wanted) as survey:
        found = survey.run()
    healthy = not diagnosis.problems_of(found)
    if options.json:
        return [json.dumps(diagnosis.as_json(found), indent=2)], healthy
    return diagnosis.text(found), healthy


def _packages() -> dict[str, Sequence[str]]:
    from polyhvd.observe.doctor import distributions

    return {"polyhvd": ("polyhvd",), **distributions()}
