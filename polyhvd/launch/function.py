"""Runs a Python function as a job. The function and the results travel through the rendezvous.

This file is both sides: :func:`run_function` in the launcher, :func:`main` in each rank.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import cloudpickle

from polyhvd.config import Launched, Settings
from polyhvd.launch.blame import describe, traceback_lines
from polyhvd.launch.hosts import Host, HostsError, parse_hostfile, parse_hosts, place
from polyhvd.launch.job import Job, JobSpec
from polyhvd.launch.output import Output
from polyhvd.launch.providers.ssh import SshAgents, SshOptions
from polyhvd.rendezvous.auth import NO_RANK, parse_secret
from polyhvd.rendezvous.client import Client

__all__ = ["main", "run_function"]

_FUNCTION, _RESULT = "run/function", "run/result"
_INTERRUPTED_STATUS = 130

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def run_function(
    call: Call,
    *,
    np: int | None,
    hosts: str | None,
    hostfile: str | None,
    env: dict[str, str],
    interface: str,
    start_timeout_s: float,
    term_grace_s: float,
    directory: str | None,
    verbose: bool,
    python: str | None,
    ssh_port: int | None,
    ssh_identity_file: str | None,
) -> list[Any]:
    """What :func:`polyhvd.run` does, with everything given."""
    if hosts and hostfile:
        raise HostsError("give hosts or hostfile, not both")
    if hosts or hostfile:
        listed = parse_hosts(hosts) if hosts else parse_hostfile(hostfile or "")
    else:
        listed = [Host("localhost", 1 if np is None else max(np, 1))]
    # Ranks import what the function refers to from where this process would.
    path = os.pathsep.join(os.path.abspath(item) for item in sys.path)
    settings = {"PYTHONPATH": path, "POLYHVD_START_TIMEOUT": f"{start_timeout_s:g}"}
    if interface:
        settings["POLYHVD_GLOO_IFACE"] = interface
    spec = JobSpec(
        argv=[python or sys.executable, "-m", "polyhvd.launch.function"],
        hosts=listed,
        placements=place(listed, np),
        env={**settings, **env},
        interface=interface,
        remote=SshAgents(
            SshOptions(port=ssh_port, identity_file=ssh_identity_file, connect_timeout_s=start_timeout_s)
        ),
        start_timeout_s=start_timeout_s,
        term_grace_s=term_grace_s,
        verbose=verbose,
    )
    payload = cloudpickle.dumps(call)
    output = Output(len(spec.placements), directory=directory)
    with contextlib.closing(output), Job(spec, output) as job, _client(job) as client:
        client.put(_FUNCTION, 0, payload)
        _check(job, job.run())
        values = client.gather(_RESULT, len(spec.placements), wait_s=0.0)
    # Written by our own ranks: everybody who can write here knows the job's secret.
    return [cloudpickle.loads(value) for value in values]


def _check(job: Job, status: int) -> None:
    if job.cause is not None:
        text = b"\n".join(traceback_lines(job.cause.tail)).decode("utf-8", "replace")
        raise RuntimeError(f"{describe(job.cause)}\n{text}".rstrip())
    if status == _INTERRUPTED_STATUS:
        raise KeyboardInterrupt
    if status != 0:
        raise RuntimeError(f"the job ended with status {status}")


def _client(job: Job) -> Client:
    deadline = time.monotonic() + 10
    secret = parse_secret(job.secret)
    return Client(job.rendezvous.endpoint, secret, rank=NO_RANK, generation=0, deadline=deadline)


def main() -> None:
    """Call the function on this rank and hand its result in."""
    launched, start_timeout_s = Launched.from_environment(), Settings.from_environment().start_timeout_s
    deadline = time.monotonic() + start_timeout_s
    secret = parse_secret(launched.secret)
    with Client(launched.rendezvous, secret, rank=launched.rank, generation=0, deadline=deadline) as client:
        (payload,) = client.gather(_FUNCTION, 1, start_timeout_s)
    func, args, kwargs = cloudpickle.loads(payload)
    result = cloudpickle.dumps(func(*args, **kwargs))
    deadline = time.monotonic() + start_timeout_s
    with Client(launched.rendezvous, secret, rank=launched.rank, generation=0, deadline=deadline) as client:
        client.put(_RESULT, launched.rank, result)
        client.gather(f"{_RESULT}/{launched.rank}", 1, 60.0, own=(0, b""))  # answered after it has arrived


if __name__ == "__main__":
    main()
