"""Runs a Python function as a job. Function, results and errors travel through the rendezvous.

This file is both sides: :func:`run_function` in the launcher, :func:`main` in each rank.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import IO, Any, TextIO

import cloudpickle

from polyhvd.config import Launched, Settings, mpi_launch
from polyhvd.errors import HorovodInternalError
from polyhvd.launch.elastic.driven import Elastic
from polyhvd.launch.hosts.lists import Host, HostsError, parse_hostfile, parse_hosts, place
from polyhvd.launch.job.blame import describe, traceback_lines
from polyhvd.launch.job.job import Job, JobSpec
from polyhvd.launch.job.output import Output
from polyhvd.launch.job.processes import await_killed
from polyhvd.launch.job.spec import address_of, working_directory
from polyhvd.launch.providers.allocation import find
from polyhvd.launch.providers.mpirun import find_launcher
from polyhvd.launch.providers.ssh import SshAgents, SshOptions
from polyhvd.rendezvous import network
from polyhvd.rendezvous.auth import new_secret, parse_secret
from polyhvd.rendezvous.client import Client
from polyhvd.rendezvous.server import Server
from polyhvd.rendezvous.store import VALUE_BYTES_MAX

__all__ = [
    "ERROR",
    "FUNCTION",
    "RESULT",
    "TRACEBACK",
    "in_a_line",
    "kill_rank",
    "last_place",
    "load_error",
    "load_result",
    "main",
    "payload_of",
    "run_function",
    "start_rank",
    "too_few_results",
]

_BY_MPI = "--mpi"
#: Option of this module's program: the id of the process that has started it, and with which it ends.
_UNDER = "--under"
#: Scopes in the store: the function, the result of each rank, and the error of rank N in ERROR/N. Its
#: traceback is in TRACEBACK/N where _UNDER is given; polyhvdrun has it from what the rank prints.
FUNCTION, RESULT, ERROR, TRACEBACK = "run/function", "run/result", "run/error", "run/traceback"
_PR_SET_PDEATHSIG = 1
#: How long a rank that has failed tries to send its exception.
_ERROR_TIMEOUT_S = 10.0
#: For the last output of a program that has ended: a process that it has left may hold the pipe for ever.
_OUTPUT_S = 5.0
_INTERRUPTED_STATUS = 130
_SECONDS_MAX = 1e6  # as of settings

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def run_function(
    call: Call,
    *,
    np: int | None,
    elastic: Mapping[str, Any],
    slots: int | None,
    mpi_args: str | None,
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
    """:func:`polyhvd.run`, with all arguments given."""
    if hosts and hostfile:
        raise HostsError("give hosts or hostfile, not both")
    start_timeout_s, term_grace_s = min(start_timeout_s, _SECONDS_MAX), min(term_grace_s, _SECONDS_MAX)
    allocation = None
    if hosts or hostfile:
        listed = parse_hosts(hosts, slots or 1) if hosts else parse_hostfile(hostfile or "", slots or 1)
    elif elastic["host_discovery_script"] is None and (allocation := find(os.environ)):
        listed = allocation.sized(np, slots)
    else:
        listed = []
    changes = None
    if any(value is not None for value in elastic.values()):
        if mpi_args is not None:
            raise ValueError("run(): use_mpi and mpi_args are not for elastic jobs")
        changes = _elastic(elastic, np, slots, listed, hostfile)
        listed = changes.hosts
    elif not listed:
        listed = [Host("localhost", slots or (1 if np is None else max(np, 1)))]
    working_directory()
    # Ranks import what the function refers to from where this process would.
    path = os.pathsep.join(os.path.abspath(item) for item in sys.path)
    settings = {"PYTHONPATH": path, "POLYHVD_START_TIMEOUT": f"{start_timeout_s:g}"}
    if interface:
        settings["POLYHVD_GLOO_IFACE"] = interface
    ssh = SshOptions(port=ssh_port, identity_file=ssh_identity_file, connect_timeout_s=start_timeout_s)
    spec = JobSpec(
        argv=[python or sys.executable, "-m", "polyhvd.launch.job.function"],
        hosts=listed,
        placements=[] if changes else place(listed, np),
        elastic=changes,
        env={**settings, **env},
        interface=interface,
        remote=SshAgents(ssh),
        start_timeout_s=start_timeout_s,
        term_grace_s=term_grace_s,
        verbose=verbose,
    )
    if allocation is not None and mpi_args is None:
        chosen = {"network_interface": interface, "remote_python": python or sys.executable}
        spec = spec.within(allocation, argparse.Namespace(**chosen, mpi=False, jsrun=False))
    payload = _checked(payload_of(call, "run()"), "run(): the function with its arguments")
    stdout, stderr = _stream(sys.stdout, 1), _stream(sys.stderr, 2)
    if mpi_args is not None:
        return _run_by_mpi(spec, ssh, payload, mpi_args, (stdout, stderr))
    count = changes.limits.size if changes else len(spec.placements)
    output = Output(count, directory=directory, stdout=stdout, stderr=stderr)
    with contextlib.closing(output), Job(spec, output) as job:
        job.rendezvous.post(FUNCTION, 0, payload)
        _check(job, job.run())
        if changes:
            return _results_of_last_world(job.rendezvous, output.size, changes.limits.min_size)
        return _results(job.rendezvous, len(spec.placements))


def payload_of(call: Call, caller: str) -> bytes:
    """A function with its arguments as the bytes that ranks read.

    Raises:
        TypeError: they cannot be pickled; the message begins with ``caller``.
    """
    try:
        return bytes(cloudpickle.dumps(call))
    except Exception as error:
        name = getattr(call[0], "__qualname__", call[0])
        raise TypeError(
            f"{caller}: {name} and its arguments cannot be sent to the ranks: {in_a_line(error)}"
        ) from error


def _checked(value: bytes, what: str) -> bytes:
    """Return pickled bytes; raise ValueError if they are more than the rendezvous takes."""
    if len(value) > VALUE_BYTES_MAX:
        raise ValueError(
            f"{what} has {len(value)} bytes when pickled, and at most {VALUE_BYTES_MAX} can be sent; write "
            "large data to a file, and send its path"
        )
    return value


def start_rank(
    python: str | None,
    variables: Mapping[str, str],
    outputs: Sequence[IO[bytes] | None],
    descriptors: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start this module's program, which is a rank and ends with this process.

    Args:
        python: None: that of this process.
        variables: of its environment, beside those of this process.
        outputs: files for what it prints and for its errors; None: those of this process.
        descriptors: that it inherits.

    Raises:
        OSError: it cannot be started.
    """
    path = os.pathsep.join(os.path.abspath(item) for item in sys.path)
    return subprocess.Popen(
        [python or sys.executable, "-m", "polyhvd.launch.job.function", _UNDER, str(os.getpid())],
        env={**os.environ, "PYTHONPATH": path, **variables},
        stdin=subprocess.DEVNULL,
        stdout=outputs[0],
        stderr=outputs[1],
        start_new_session=True,  # a group, with its children
        pass_fds=descriptors,
    )


def kill_rank(process: subprocess.Popen[bytes]) -> None:
    """Kill a process of :func:`start_rank`, if it is running, and those of its group.

    Waits for its end, but no more than a few seconds.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await_killed(process, "a rank")


def _results(server: Server, size: int) -> list[Any]:
    found = server.values(RESULT)
    if missing := sorted(set(range(size)) - found.keys()):
        ranks = ", ".join(map(str, missing))
        raise RuntimeError(f"no result of rank {ranks}: the function has ended the process")
    return [load_result(rank, found[rank]) for rank in range(size)]


def _run_by_mpi(
    spec: JobSpec, ssh: SshOptions, payload: bytes, mpi_args: str, outputs: Sequence[int | TextIO]
) -> list[Any]:
    """Start the ranks with MPI's launcher, which also ends the job when one of them fails."""
    launcher = find_launcher()
    local = [network.is_local(host.name) for host in spec.hosts]
    secret, size = new_secret(), len(spec.placements)
    with Server(parse_secret(secret), address_of(spec, local)) as server:
        server.post(FUNCTION, 0, payload)
        settings = {**spec.env, "POLYHVD_RENDEZVOUS": server.endpoint, "POLYHVD_SECRET": secret}
        given = [name for name in spec.env if not name.startswith(("POLYHVD_", "HOROVOD_", "PYTHONPATH"))]
        extra = [word for name in given for word in ("-x", name)] if launcher.open_mpi else []
        command, env = launcher.command(
            [*spec.argv, _BY_MPI],
            spec.hosts,
            size,
            settings,
            ssh,
            [*extra, *shlex.split(mpi_args)],
        )
        if status := _run_program(command, env, spec.term_grace_s, outputs):
            failure = RuntimeError(f"{launcher.path} ended with status {status}")
            errors = [error for rank in range(size) if (error := _error_of(rank, server))]
            # The others' are what that of the first has led to.
            errors.sort(key=lambda error: isinstance(error, HorovodInternalError))
            if errors and isinstance(errors[0], Exception):
                raise errors[0] from failure
            raise RuntimeError(f"{failure}\n({errors[0]})") if errors else failure
        return _results(server, size)


def _run_program(
    command: list[str], env: dict[str, str], grace_s: float, outputs: Sequence[int | TextIO]
) -> int:
    """Run a program that prints to these outputs, and return its exit status."""
    pipes = [output if isinstance(output, int) else subprocess.PIPE for output in outputs]
    process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=pipes[0], stderr=pipes[1])
    with contextlib.ExitStack() as stack:
        pumps = [
            threading.Thread(target=_pump, args=(stack.enter_context(pipe), output), daemon=True)
            for pipe, output in zip((process.stdout, process.stderr), outputs, strict=True)
            if pipe is not None
        ]
        for pump in pumps:
            pump.start()
        try:
            status = process.wait()
        except BaseException:
            process.terminate()
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(grace_s)
            finally:
                process.kill()
                await_killed(process, command[0])
            raise
        deadline = time.monotonic() + _OUTPUT_S
        for pump in pumps:
            pump.join(max(0.0, deadline - time.monotonic()))
    return status


def _pump(pipe: IO[bytes], output: TextIO) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with contextlib.suppress(ValueError):  # the pipe was closed, since the program has ended
        while data := os.read(pipe.fileno(), 65536):
            with contextlib.suppress(OSError, ValueError):  # it was closed: the program continues
                output.write(decoder.decode(data))
                output.flush()


def _elastic(
    given: Mapping[str, Any], np: int | None, slots: int | None, hosts: list[Host], hostfile: str | None
) -> Elastic:
    """The settings of an elastic job, as polyhvdrun would read them from its options."""
    from polyhvd.launch.cli.elastic_options import elastic_of  # no other job needs it
    from polyhvd.launch.cli.options import make_parser

    options = make_parser().parse_args(["true"])
    for name, value in {**given, "num_proc": np, "slots_per_host": slots, "hostfile": hostfile}.items():
        setattr(options, name, value)
    return elastic_of([options], hosts or None)


def _results_of_last_world(server: Server, processes: int, least: int) -> list[Any]:
    """The results of an elastic job, in rank order; those of ranks of worlds before are dropped."""
    found: dict[int, dict[int, Any]] = {}
    sizes = {}
    for process in range(processes):
        for value in server.values(f"{RESULT}/{process}").values():  # none: it was lost, or left
            generation, rank, sizes[generation], result = cloudpickle.loads(value)
            found.setdefault(generation, {})[rank] = result
    last = max(found, default=0)
    missing = [rank for rank in range(sizes.get(last, 1)) if rank not in found.get(last, {})]
    if missing:
        ranks = ", ".join(map(str, missing))
        raise RuntimeError(f"no result of rank {ranks}: the function has ended the process")
    if last == 0 and len(found[last]) < least:  # a world may be smaller when ranks have finished
        raise too_few_results(len(found[last]), f"min_np={least}")
    return [load_result(rank, value) for rank, value in sorted(found[last].items())]


def too_few_results(count: int, setting: str) -> RuntimeError:
    """The error of an elastic job that has lost processes that were in no world, and were not replaced."""
    return RuntimeError(
        f"the function has returned on {count} processes without calling hvd.init(), fewer than {setting}: "
        "the others were lost. Call hvd.init() in the function, so that lost processes are replaced"
    )


def _stream(file: TextIO | None, descriptor: int) -> int | TextIO:
    """Return the object that a notebook or a test uses as a standard stream, or else the descriptor."""
    if file is None:
        return descriptor
    try:
        file.flush()  # what is printed before the job stands before its output
        return descriptor if file.fileno() == descriptor else file
    except (AttributeError, OSError, ValueError):  # ValueError: it is closed, or has none
        return file


def load_result(rank: int, value: bytes) -> Any:
    """The result of a rank; raises RuntimeError where it cannot be unpickled."""
    # Written by ranks of this job: only processes with the job's secret can write here.
    try:
        return cloudpickle.loads(value)
    except Exception as error:
        raise RuntimeError(
            f"the result of rank {rank} cannot be read here: {in_a_line(error)}; return what this process "
            "can import, or plain values"
        ) from error


def _check(job: Job, status: int) -> None:
    """Raise what the rank has raised that is to blame, if there is one."""
    if job.cause is not None:
        text = b"\n".join(traceback_lines(job.cause.tail)).decode("utf-8", "replace")
        failure = RuntimeError(f"{describe(job.cause)}\n{text}".rstrip())
        error = _error_of(job.cause.rank, job.rendezvous)
        if isinstance(error, Exception):
            raise error from failure
        if error:
            raise RuntimeError(f"{failure}\n({error})")
        raise failure
    if status == _INTERRUPTED_STATUS:
        raise KeyboardInterrupt
    if status != 0:
        raise RuntimeError(f"the job ended with status {status}")


def _error_of(rank: int, server: Server) -> Exception | str:
    """The exception of a rank, why it is not available, or an empty text if it has sent none."""
    value = server.values(f"{ERROR}/{rank}").get(0)
    return "" if value is None else load_error(value)  # None: it was killed, or has left by sys.exit()


def load_error(value: bytes) -> Exception | str:
    """The exception that a rank has sent, or why it is not available."""
    try:
        error = cloudpickle.loads(value)
    except Exception as reason:
        return f"its exception cannot be raised here: {in_a_line(reason)}"
    if isinstance(error, (Exception, str)):
        return error
    return f"its exception cannot be raised here, only as {type(error).__name__}"


def in_a_line(error: BaseException) -> str:
    """Class and first line of an error."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def main() -> None:
    """Call the function on this rank and hand its result in, or what it has raised."""
    if sys.argv[1:2] == [_UNDER]:
        _end_with(int(sys.argv[2]))
    launched = Launched.from_environment()
    if sys.argv[1:] == [_BY_MPI] and (launch := mpi_launch()) is not None:
        launched = replace(launched, rank=launch.rank)
        for name in ("POLYHVD_RENDEZVOUS", "POLYHVD_SECRET"):  # init() meets through MPI
            del os.environ[name]
    try:
        _call(launched)
    except Exception as error:
        with contextlib.suppress(Exception):  # the launcher has the traceback, if not this
            if sys.argv[1:2] == [_UNDER]:
                text = traceback.format_exc().encode("utf-8", "replace")
                _hand_in(launched, f"{TRACEBACK}/{_number(launched)}", 0, text, _ERROR_TIMEOUT_S)
            _hand_in(launched, f"{ERROR}/{_number(launched)}", 0, _pickled(error), _ERROR_TIMEOUT_S)
        raise


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when the one that has started it is dead."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _call(launched: Launched) -> None:
    start_timeout_s = Settings.from_environment().start_timeout_s
    deadline = time.monotonic() + start_timeout_s
    secret = parse_secret(launched.secret)
    number = _number(launched)
    with Client(launched.rendezvous, secret, rank=number, generation=0, deadline=deadline) as client:
        (payload,) = client.gather(FUNCTION, 1, start_timeout_s)
    func, args, kwargs = cloudpickle.loads(payload)
    value = func(*args, **kwargs)
    try:
        result = cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"rank {launched.rank}: a result of type {type(value).__name__} cannot be sent to polyhvd.run: "
            f"{in_a_line(error)}"
        ) from error
    _checked(result, f"rank {launched.rank}: the result")
    if launched.member is None:
        _hand_in(launched, RESULT, launched.rank, result, start_timeout_s)
    else:
        value = cloudpickle.dumps((*last_place(launched.member), result))
        _hand_in(launched, f"{RESULT}/{launched.member}", 0, value, start_timeout_s)


def _number(launched: Launched) -> int:
    """The launcher's name for this process: its rank, or its number in an elastic job."""
    return launched.rank if launched.member is None else launched.member


def last_place(member: int) -> tuple[int, int, int]:
    """Generation, rank and size of the last world of this process; without one, 0, its number and 0."""
    from polyhvd.elastic import process

    found = process.find()
    if found is None or member not in found.launcher.reply.members:
        return 0, member, 0
    answer = found.launcher.reply
    return answer.generation, answer.members.index(member), len(answer.members)


def _pickled(error: Exception) -> bytes:
    try:
        return bytes(cloudpickle.dumps(error))
    except Exception as reason:
        return bytes(cloudpickle.dumps(f"its exception cannot be sent: {in_a_line(reason)}"))


def _hand_in(launched: Launched, key: str, number: int, value: bytes, timeout_s: float) -> None:
    """Give a value to the launcher, and return when it has arrived."""
    deadline = time.monotonic() + timeout_s
    secret = parse_secret(launched.secret)
    rank = _number(launched)
    with Client(launched.rendezvous, secret, rank=rank, generation=0, deadline=deadline) as client:
        client.put(key, number, value)
        client.gather(f"run/arrived/{rank}", 1, 60.0, own=(0, b""))  # answered after it has arrived


if __name__ == "__main__":
    main()
