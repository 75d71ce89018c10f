"""polyhvdrun on every host at once: ``--sagemaker``, and ``--nnodes`` with ``--node-rank``.

The first host leads: it waits for the others, and starts the ranks of all by their agents. Every host ends
with the status of the whole job, after its end.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib.metadata
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from polyhvd.config import ConfigError, Launched, Settings
from polyhvd.elastic.standing import Decision, Doing, Wait
from polyhvd.launch import sagemaker
from polyhvd.launch.cli.options import RENDEZVOUS_PORT, USAGE_STATUS, interface_of
from polyhvd.launch.hosts.lists import Host, place
from polyhvd.launch.job.blame import describe, traceback_lines
from polyhvd.launch.job.control import Control, Request
from polyhvd.launch.job.job import Job, JobSpec
from polyhvd.launch.job.joining import Follower, Result, reach
from polyhvd.launch.job.output import Output
from polyhvd.launch.job.situation import Situation, answers
from polyhvd.launch.providers.arriving import Arrivals, ArrivedAgent, ArrivedAgents, LateError, ranks_secret
from polyhvd.launch.providers.local_agents import LocalAgents
from polyhvd.launch.providers.meeting import exposed_secret, given_secret
from polyhvd.rendezvous import network
from polyhvd.rendezvous.auth import derive_secret

__all__ = ["run"]

_START_TIMEOUT_S = 600.0  # containers come up minutes apart
_NO_SECRET = b"polyhvd: the network is trusted"
_INTERRUPTED_STATUS = 130


@dataclass(frozen=True)
class Nodes:
    """The hosts of a job, and which of them this is."""

    names: tuple[str, ...]  # the first one's leads
    number: int  # of this one
    host: str  # the first one, as the others reach it
    port: int
    interface: str  # to listen on; empty: everywhere
    key: str  # distinguishes the job from other jobs of the same user
    slots: int  # how many ranks this host takes
    secret_hint: str


Specify = Callable[[list[argparse.Namespace]], JobSpec]
Print = Callable[[argparse.Namespace, int], Output]


def run(programs: list[argparse.Namespace], spec_of: Specify, output_of: Print) -> int:
    """Run this host's part of a job, and return the status of the whole.

    Args:
        programs: the options of each program of the command line, of which there must be one.
        spec_of: makes the specification of a job of them.
        output_of: makes the output of so many ranks.
    """
    options = programs[0]
    try:
        _check(programs)
        nodes = _of_sagemaker(options) if options.sagemaker else _of_options(options)
        if options.sagemaker:
            options.command, options.module = _command(options), False
        spec = spec_of(programs)
        secret = _secret(nodes)
    except (ValueError, OSError) as error:
        result = _refused(str(error), USAGE_STATUS)
    else:
        part = _lead if nodes.number == 0 else _follow
        try:
            with _ended_by_sigterm():
                result = part(nodes, spec, secret, options, output_of)
        except _TerminatedError:
            result = Result(128 + signal.SIGTERM, "polyhvdrun was requested to end before the job had begun")
    if options.sagemaker and result.status != 0:
        try:
            sagemaker.write_failure(result.failure or f"polyhvdrun ended with status {result.status}")
        except OSError as error:
            print(f"polyhvdrun: cannot write SageMaker's file of the failure: {error}", file=sys.stderr)
    return result.status


class _TerminatedError(BaseException):
    """SIGTERM was received."""


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """End waits for other hosts on SIGTERM, which the first process of a container ignores by default."""

    def on_sigterm(*_: object) -> None:
        raise _TerminatedError

    former = signal.getsignal(signal.SIGTERM)
    if former == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, on_sigterm)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def _check(programs: list[argparse.Namespace]) -> None:
    options = programs[0]
    others = {
        "-H": options.hosts is not None,
        "--hostfile": options.hostfile is not None,
        "--slots-per-host": options.slots_per_host is not None,
        "--mpi": options.mpi,
        "--max-restarts": options.max_restarts,
        "--dry-run": options.dry_run,
        "':'": len(programs) > 1,
    }
    for name, given in others.items():
        if given:
            raise ValueError(f"{name} is for one polyhvdrun that starts the ranks of all hosts; leave it out")
    if options.sagemaker:
        for name in ("nnodes", "node_rank"):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')}: --sagemaker sets it; leave it out")
    if options.nproc_per_node is not None and options.nproc_per_node < 1:
        raise ValueError(f"--nproc-per-node {options.nproc_per_node}: must be 1 or more")


def _of_options(options: argparse.Namespace) -> Nodes:
    count, number = options.nnodes, options.node_rank
    if count is None or count < 1:
        raise ValueError(f"--nnodes: the number of hosts must be 1 or more; found {count}")
    if number is None and count == 1:
        number = 0
    if number is None or not 0 <= number < count:
        raise ValueError(f"--node-rank: must be 0 to {count - 1}, another one on each host; found {number}")
    if count > 1 and not options.rdzv_endpoint:
        raise ValueError(
            f"--rdzv-endpoint: name host 0, as the others reach it: HOST or HOST:{RENDEZVOUS_PORT}"
        )
    host, port = _endpoint(options.rdzv_endpoint or "localhost")
    return Nodes(
        names=tuple(socket.gethostname() if i == number else f"node {i}" for i in range(count)),
        number=number,
        host=host,
        port=port,
        interface=interface_of(options),
        key="nodes",
        slots=options.nproc_per_node or options.num_proc or max(1, sagemaker.gpu_count()),
        secret_hint="on every host",
    )


def _of_sagemaker(options: argparse.Namespace) -> Nodes:
    here = sagemaker.container()
    os.environ.update(sagemaker.variables(here))
    host, port = _endpoint(options.rdzv_endpoint or here.hosts[0])
    if here.interface:
        options.network_interface = options.network_interface or [here.interface]
    return Nodes(
        names=here.hosts,
        number=here.number,
        host=host,
        port=port,
        interface=interface_of(options),
        key=f"sagemaker {here.job}",
        slots=options.nproc_per_node or max(1, sagemaker.gpu_count()),
        secret_hint=sagemaker.SECRET_HINT,
    )


def _endpoint(text: str) -> tuple[str, int]:
    try:
        return network.parse_endpoint(text)
    except ValueError:
        if ":" in text and not text.endswith("]"):
            raise ValueError(f"--rdzv-endpoint {text!r} is not HOST or HOST:PORT") from None
    return text.removeprefix("[").removesuffix("]"), RENDEZVOUS_PORT


def _command(options: argparse.Namespace) -> list[str]:
    """The script below Python, with the hyperparameters, unless they are there."""
    if options.module:
        return [sys.executable, "-m", *_with_hyperparameters(options.command)]
    command = _with_hyperparameters(options.command)
    if not os.path.exists(command[0]) and (sagemaker.code_dir() / command[0]).exists():
        os.chdir(sagemaker.code_dir())
    return [sys.executable, *command] if command[0].endswith(".py") else command


def _with_hyperparameters(command: list[str]) -> list[str]:
    words = sagemaker.arguments()
    return command if words and command[-len(words) :] == words else [*command, *words]


def _secret(nodes: Nodes) -> bytes:
    launched = Launched.from_environment()
    secret = given_secret(launched)
    if warning := exposed_secret(launched):
        print(f"polyhvdrun: {warning}", file=sys.stderr)
    if len(nodes.names) > 1 and not secret:
        if not Settings.from_environment().trust_network:
            raise ConfigError(
                f"POLYHVD_SECRET: {len(nodes.names)} hosts need a secret to authenticate each other; set "
                f"it {nodes.secret_hint}"
            )
        secret = _NO_SECRET
        print(
            "polyhvdrun: POLYHVD_TRUST_NETWORK=1: any process that reaches this port can join the job",
            file=sys.stderr,
        )
    return derive_secret(secret, nodes.key)


def _version() -> str:
    return importlib.metadata.version("polyhvd")


def _patience_s(options: argparse.Namespace) -> float:
    return options.start_timeout or _START_TIMEOUT_S


# The first host


def _lead(
    nodes: Nodes, spec: JobSpec, secret: bytes, options: argparse.Namespace, output_of: Print
) -> Result:
    nonce = secrets.token_hex(16)
    result = Result(1, "polyhvdrun on the first host has ended early")
    arrivals: Arrivals | None = None
    arrived: list[ArrivedAgent] = []
    try:
        address = network.address_of(nodes.interface) if nodes.interface else ""
        if len(nodes.names) > 1:
            arrivals = Arrivals(
                secret, nodes.names, address, nodes.port, nonce=nonce, version=_version(), report=_print
            )
            with contextlib.closing(arrivals), _status(arrivals, nodes.names, spec.command):
                arrived = arrivals.wait(time.monotonic() + _patience_s(options))
        hosts = [Host(nodes.names[0], nodes.slots), *(Host(item.host, item.slots) for item in arrived)]
        spec = replace(
            spec,
            hosts=hosts,
            placements=place(hosts, options.num_proc),
            agents=[LocalAgents(), *map(ArrivedAgents, arrived)],
            secret=ranks_secret(secret, nonce),
            address=address or (arrived[0].address if arrived else network.loopback()),
        )
        result = _run(spec, output_of(options, len(spec.placements)))
    except LateError as error:
        result = _refused(f"{error} ({_patience_s(options):g} s; --start-timeout sets it)")
    except (ValueError, OSError) as error:
        result = _refused(_why(nodes, error))
    except KeyboardInterrupt:
        result = Result(_INTERRUPTED_STATUS, "polyhvdrun was interrupted")
    finally:
        for item in arrivals.arrived.values() if arrivals is not None else ():
            item.conclude({"status": result.status, "failure": result.failure})
    return result


@contextlib.contextmanager
def _status(arrivals: Arrivals, names: Sequence[str], command: str) -> Iterator[None]:
    """Answer ``polyhvd status`` while other hosts are waited for; not where the system has no such socket."""
    since = time.monotonic()
    job = {"job": os.getpid(), "elastic": False, "command": command, "started": since}

    def answer(request: Request) -> None:
        if "status" not in request.content:
            request.close()
            return
        absent = [name for number, name in enumerate(names) if number and number not in arrivals.arrived]
        waits = tuple(Wait(name, "its polyhvdrun has not connected", since) for name in absent)
        found = Situation(Decision(Doing.STARTS, "" if waits else "starts", waits))
        request.finish(answers(found, job, time.monotonic(), time.time()))

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, RuntimeError):
            stack.enter_context(contextlib.closing(Control(answer, elastic=False)))
        yield


def _print(text: str) -> None:
    print(f"polyhvdrun: {text}", file=sys.stderr, flush=True)


def _refused(reason: str, status: int = 1) -> Result:
    _print(reason)
    return Result(status, reason)


def _why(nodes: Nodes, error: Exception) -> str:
    if len(nodes.names) == 1:
        return str(error)
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return (
            f"another process listens on port {nodes.port} of this host; pass another port on all hosts, "
            "with --rdzv-endpoint HOST:PORT"
        )
    return f"port {nodes.port}: {error}"


def _run(spec: JobSpec, output: Output) -> Result:
    with contextlib.closing(output), Job(spec, output) as job:
        status = job.run()
    if job.cause is None:
        return Result(status, "" if status == 0 else f"the job was requested to end: status {status}")
    traceback = b"\n".join(traceback_lines(job.cause.tail)).decode("utf-8", "replace")
    return Result(status, f"{describe(job.cause)}\n{traceback}".strip())


# The others


def _follow(nodes: Nodes, spec: JobSpec, secret: bytes, options: argparse.Namespace, _: Print) -> Result:
    start_by = time.monotonic() + _patience_s(options)
    name = nodes.names[nodes.number]
    try:
        connection, keys = reach(nodes.host, nodes.port, nodes.number, secret, start_by)
        if spec.verbose:
            print(f"polyhvdrun: {name} has joined; {nodes.host} prints what its ranks write", file=sys.stderr)
        # The first host may wait for others for as long, and has begun to do so later.
        follower = Follower(
            connection, keys, nodes.host, name, secret, time.monotonic() + _patience_s(options) + 60
        )
        result = follower.run(nodes.slots, len(nodes.names), _version())
    except OSError as error:
        result = Result(1, str(error))
    except KeyboardInterrupt:
        result = Result(_INTERRUPTED_STATUS, "polyhvdrun was interrupted")
    if result.status != 0:
        print(f"polyhvdrun: {result.failure.partition(chr(10))[0]}", file=sys.stderr)
    return result
