"""Runs a Python function as a job. Function, results and errors travel through the rendezvous.

This file is both sides: :func:`run_function` in the launcher, :func:`main` in each rank.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

import cloudpickle

from polyhvd.config import Launched, Settings
from polyhvd.launch.blame import describe, traceback_lines
from polyhvd.launch.hosts import Host, HostsError, parse_hostfile, parse_hosts, place
from polyhvd.launch.job import Job, JobSpec
from polyhvd.launch.job_spec import working_directory
from polyhvd.launch.output import Output
from polyhvd.launch.providers.allocation import find
from polyhvd.launch.providers.ssh import SshAgents, SshOptions
from polyhvd.rendezvous.auth import NO_RANK, parse_secret
from polyhvd.rendezvous.client import Client
from polyhvd.rendezvous.store import GatherTimeoutError, StoreError

__all__ = ["main", "run_function"]

_FUNCTION, _RESULT, _ERROR = "run/function", "run/result", "run/error"
#: How long a rank that has failed tries to say what with.
_ERROR_TIMEOUT_S = 10.0
_INTERRUPTED_STATUS = 130
_SECONDS_MAX = 1e6  # as of settings

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
    start_timeout_s, term_grace_s = min(start_timeout_s, _SECONDS_MAX), min(term_grace_s, _SECONDS_MAX)
    allocation = None
    if hosts or hostfile:
        listed = parse_hosts(hosts) if hosts else parse_hostfile(hostfile or "")
    elif allocation := find(os.environ):
        listed = allocation.sized(np, None)
    else:
        listed = [Host("localhost", 1 if np is None else max(np, 1))]
    working_directory()
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
    if allocation is not None:
        chosen = {"network_interface": interface, "remote_python": python or sys.executable}
        spec = spec.within(allocation, argparse.Namespace(**chosen, mpi=False, jsrun=False))
    try:
        payload = cloudpickle.dumps(call)
    except Exception as error:
        name = getattr(call[0], "__qualname__", call[0])
        raise TypeError(
            f"run(): {name} and its arguments cannot be sent to the ranks: {_in_a_line(error)}"
        ) from error
    stdout, stderr = _stream(sys.stdout, 1), _stream(sys.stderr, 2)
    output = Output(len(spec.placements), directory=directory, stdout=stdout, stderr=stderr)
    with contextlib.closing(output), Job(spec, output) as job, _client(job) as client:
        client.put(_FUNCTION, 0, payload)
        _check(job, job.run(), client)
        try:
            values = client.gather(_RESULT, len(spec.placements), wait_s=0.0)
        except GatherTimeoutError as error:
            ranks = ", ".join(map(str, error.missing))
            raise RuntimeError(f"no result of rank {ranks}: the function has ended the process") from None
    return [_load_result(rank, value) for rank, value in enumerate(values)]


def _stream(file: TextIO | None, descriptor: int) -> int | TextIO:
    """Where to print: what a notebook or a test has put in the place of a standard stream, or the stream."""
    if file is None:
        return descriptor
    try:
        file.flush()  # what is printed before the job stands before its output
        return descriptor if file.fileno() == descriptor else file
    except (AttributeError, OSError, ValueError):  # ValueError: it is closed, or has none
        return file


def _load_result(rank: int, value: bytes) -> Any:
    # Written by our own ranks: everybody who can write here knows the job's secret.
    try:
        return cloudpickle.loads(value)
    except Exception as error:
        raise RuntimeError(
            f"the result of rank {rank} cannot be read here: {_in_a_line(error)}; return what this process "
            "can import, or plain values"
        ) from error


def _check(job: Job, status: int, client: Client) -> None:
    """Raise what the rank has raised that is to blame, if there is one."""
    if job.cause is not None:
        text = b"\n".join(traceback_lines(job.cause.tail)).decode("utf-8", "replace")
        told = RuntimeError(f"{describe(job.cause)}\n{text}".rstrip())
        error = _error_of(job.cause.rank, client)
        if isinstance(error, Exception):
            raise error from told
        if error:
            raise RuntimeError(f"{told}\n({error})")
        raise told
    if status == _INTERRUPTED_STATUS:
        raise KeyboardInterrupt
    if status != 0:
        raise RuntimeError(f"the job ended with status {status}")


def _error_of(rank: int, client: Client) -> Exception | str:
    """The exception of a rank; why it cannot be had; or nothing, where it has said nothing."""
    try:
        (value,) = client.gather(f"{_ERROR}/{rank}", 1, 0.0)
    except StoreError:
        return ""  # it was killed, or has left by sys.exit()
    try:
        error = cloudpickle.loads(value)
    except Exception as reason:
        return f"its exception cannot be raised here: {_in_a_line(reason)}"
    if isinstance(error, (Exception, str)):
        return error
    return f"its exception cannot be raised here: it came as {type(error).__name__}"


def _in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _client(job: Job) -> Client:
    deadline = time.monotonic() + 10
    secret = parse_secret(job.secret)
    return Client(job.rendezvous.endpoint, secret, rank=NO_RANK, generation=0, deadline=deadline)


def main() -> None:
    """Call the function on this rank and hand its result in, or what it has raised."""
    try:
        _call()
    except Exception as error:
        with contextlib.suppress(Exception):  # the launcher has the traceback, if not this
            _hand_in(f"{_ERROR}/{Launched.from_environment().rank}", 0, _pickled(error), _ERROR_TIMEOUT_S)
        raise


def _call() -> None:
    launched, start_timeout_s = Launched.from_environment(), Settings.from_environment().start_timeout_s
    deadline = time.monotonic() + start_timeout_s
    secret = parse_secret(launched.secret)
    with Client(launched.rendezvous, secret, rank=launched.rank, generation=0, deadline=deadline) as client:
        (payload,) = client.gather(_FUNCTION, 1, start_timeout_s)
    func, args, kwargs = cloudpickle.loads(payload)
    value = func(*args, **kwargs)
    try:
        result = cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"rank {launched.rank}: a result of type {type(value).__name__} cannot be sent to polyhvd.run: "
            f"{_in_a_line(error)}"
        ) from error
    _hand_in(_RESULT, launched.rank, result, start_timeout_s)


def _pickled(error: Exception) -> bytes:
    try:
        return bytes(cloudpickle.dumps(error))
    except Exception as reason:
        return bytes(cloudpickle.dumps(f"its exception cannot be sent: {_in_a_line(reason)}"))


def _hand_in(key: str, number: int, value: bytes, timeout_s: float) -> None:
    """Give a value to the launcher, and return when it has arrived."""
    launched = Launched.from_environment()
    deadline = time.monotonic() + timeout_s
    secret = parse_secret(launched.secret)
    with Client(launched.rendezvous, secret, rank=launched.rank, generation=0, deadline=deadline) as client:
        client.put(key, number, value)
        client.gather(f"run/arrived/{launched.rank}", 1, 60.0, own=(0, b""))  # answered after it has arrived


if __name__ == "__main__":
    main()
