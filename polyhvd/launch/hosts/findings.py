"""Facts about a host for the doctor: a program that an agent runs, or the doctor itself where it is.

It goes to the host as text, so it uses only the standard library, and nothing newer than Python 3.8. It
judges nothing; that is for :mod:`polyhvd.launch.hosts.diagnosis`.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import socket
import subprocess
import sys
from typing import Any

from polyhvd.launch.hosts.facts import report, room
from polyhvd.rendezvous.network import host_identity, interfaces

__all__ = ["huge_pages", "main", "survey"]

_ASK_TIMEOUT_S = 60.0
_UNLIMITED = 1 << 60  # control groups of version 1 report more than this if there is no limit
#: Asks a Python for the versions of packages, without importing any.
_VERSIONS_PROGRAM = """
import json, sys
from importlib import metadata
found = {}
for name, packages in json.loads(sys.argv[1]).items():
    for package in packages:
        try:
            found[name] = metadata.version(package)
            break
        except metadata.PackageNotFoundError:
            pass
print("polyhvd-packages", json.dumps(found))
"""


def main(request: dict[str, Any]) -> None:
    """Say what was found."""
    report(survey(request["packages"], request["env"]))


def survey(packages: dict[str, list[str]], env: dict[str, str]) -> dict[str, Any]:
    """Look at this host.

    Args:
        packages: of each name the packages of which the first that is installed counts.
        env: of the ranks' Python, above this process's.
    """
    found, problem = _versions(packages, env)
    return {
        "hostname": socket.gethostname(),
        "identity": host_identity(),
        "platform": platform.platform(),
        "python": {"version": platform.python_version(), "path": sys.executable},
        "packages": found,
        "packages_problem": problem,
        "cores": _cores(),
        "limits": {
            "open_files": _limit(resource.RLIMIT_NOFILE),
            "locked_memory": _limit(resource.RLIMIT_MEMLOCK),
        },
        "shared_memory": {"path": "/dev/shm", **room("/dev/shm")},
        "memory": _memory(),
        "huge_pages": huge_pages(),
        "interfaces": interfaces(),
    }


def huge_pages() -> str:
    """Return when the kernel uses transparent huge pages: "always", "madvise" or "never"; empty: unknown."""
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled", encoding="ascii") as file:
            return file.read().partition("[")[2].partition("]")[0]
    except (OSError, UnicodeDecodeError):
        return ""


def _versions(packages: dict[str, list[str]], env: dict[str, str]) -> tuple[dict[str, str], str]:
    environment = {**os.environ, **env}
    environment.pop("POLYHVD_SECRET", None)
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _VERSIONS_PROGRAM, json.dumps(packages)],
            env=environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ASK_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {}, str(error)
    for line in asked.stdout.decode("utf-8", "replace").splitlines():
        name, _, text = line.partition(" ")
        if name == "polyhvd-packages":
            return dict(json.loads(text)), ""
    lines = asked.stderr.decode("utf-8", "replace").strip().splitlines()
    return {}, lines[-1] if lines else f"status {asked.returncode}"


def _cores() -> dict[str, Any]:
    usable = sorted(os.sched_getaffinity(0))
    spans: list[list[int]] = []
    for core in usable:
        if spans and spans[-1][1] == core - 1:
            spans[-1][1] = core
        else:
            spans.append([core, core])
    return {
        "installed": os.cpu_count(),
        "usable": len(usable),
        "affinity": ",".join(f"{a}-{b}" if b > a else str(a) for a, b in spans),
        "quota": _quota(),
    }


def _quota() -> float | None:
    """How many cores' time the control group may take; None: no limit."""
    shares = []
    for folder in _groups("cpu"):
        text = _read(f"{folder}/cpu.max").split()
        if len(text) == 2 and text[0] != "max":
            shares.append(int(text[0]) / int(text[1]))
        quota, period = _read(f"{folder}/cpu.cfs_quota_us"), _read(f"{folder}/cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():
            shares.append(int(quota) / int(period))
    return min(shares, default=None)


def _memory() -> dict[str, Any]:
    """In bytes; the control group is the one of those above this process that leaves least."""
    system = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    kilobytes = {name: int(text.split()[0]) for name, text in system.items()}
    limits = []
    for folder in _groups("memory"):
        for limit, used in (("max", "current"), ("limit_in_bytes", "usage_in_bytes")):
            most, now = _read(f"{folder}/memory.{limit}"), _read(f"{folder}/memory.{used}")
            if most.isdigit() and now.isdigit() and int(most) < _UNLIMITED:
                limits.append((int(most) - int(now), int(most), int(now)))
    _, most_bytes, used_bytes = min(limits, default=(0, None, None))
    return {
        "total": kilobytes.get("MemTotal", 0) << 10,
        "available": kilobytes.get("MemAvailable", 0) << 10,
        "cgroup_limit": most_bytes,
        "cgroup_used": used_bytes,
    }


def _groups(controller: str) -> list[str]:
    """The folders of this process's control group and of those above it, of both versions."""
    folders = []
    for line in _read("/proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names == "":
            base = "/sys/fs/cgroup"
        elif controller in names.split(","):
            base = f"/sys/fs/cgroup/{controller}"
        else:
            continue
        while True:
            folders.append(base + path.rstrip("/"))
            if path in ("", "/"):
                break
            path = os.path.dirname(path)
    return folders


def _limit(which: int) -> int | None:
    """The soft limit; None: unlimited."""
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""
