"""The ``polyhvdrun`` command: reads the command line, runs a job."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import resource
import shlex
import sys
from collections.abc import Sequence
from typing import NoReturn

from polyhvd.config import Settings
from polyhvd.launch import horovodrun
from polyhvd.launch.doctor import report
from polyhvd.launch.hosts import Host, HostsError, parse_hostfile, parse_hosts, place
from polyhvd.launch.job import Job, JobSpec
from polyhvd.launch.output import Output
from polyhvd.launch.policy import LetOthersFinish, StopAtFirstFailure
from polyhvd.launch.providers.mpirun import find_launcher
from polyhvd.launch.providers.ssh import SshAgents, SshOptions

__all__ = ["main"]

#: Options that set a variable of the ranks, under horovodrun's names; None: they take no value.
_SETTINGS: dict[str, tuple[str, str | None, str]] = {
    "--fusion-threshold-mb": ("FUSION_THRESHOLD", "MB", "most MiB of the operations that run as one"),
    "--cycle-time-ms": ("CYCLE_TIME", "MS", "longest batching window"),
    "--cache-capacity": ("CACHE_CAPACITY", "N", "operations that are remembered by number"),
    "--reproducible": ("REPRODUCIBLE", None, "sums do not depend on how ranks are spread over hosts"),
    "--autotune": ("AUTOTUNE", None, "try values for fusion, batching and chunks while the job runs"),
    "--autotune-log-file": ("AUTOTUNE_LOG", "FILE", "CSV file for what was tried"),
    "--autotune-warmup-samples": ("AUTOTUNE_WARMUP_SAMPLES", "N", "samples that are left out"),
    "--autotune-steps-per-sample": ("AUTOTUNE_STEPS_PER_SAMPLE", "N", "steps that are measured as one"),
    "--autotune-bayes-opt-max-samples": ("AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "N", "samples in all"),
    "--autotune-gaussian-process-noise": ("AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "X", "noise of a sample"),
    "--timeline-filename": ("TIMELINE", "FILE", "write a timeline of every rank"),
    "--timeline-mark-cycles": ("TIMELINE_MARK_CYCLES", None, "mark in it when the engine begins new work"),
    "--no-stall-check": ("STALL_CHECK_DISABLE", None, "no stall reports"),
    "--stall-check-warning-time-seconds": ("STALL_CHECK_TIME_SECONDS", "S", "report what waits for so long"),
    "--stall-check-shutdown-time-seconds": ("STALL_SHUTDOWN_TIME_SECONDS", "S", "end the job then"),
    "--log-level": ("LOG_LEVEL", "LEVEL", "what is logged at least"),
    "--log-hide-timestamp": ("LOG_HIDE_TIME", None, "log lines do not begin with the time"),
    "--thread-affinity": ("THREAD_AFFINITY", "C0,C1", "core of the engine's thread, for each local rank"),
    "--gloo-timeout-seconds": ("DATA_TIMEOUT_SECONDS", "S", "longest time of an agreed transfer"),
    "--mpi-threads-disable": ("MPI_THREADS_DISABLE", None, "MPI serves one thread at a time"),
    "--hierarchical-allreduce": ("HIERARCHICAL_ALLREDUCE", None, "NCCL within hosts, CPUs between them"),
}
_USAGE_STATUS = 2
_INTERRUPTED_STATUS = 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="polyhvdrun",
        usage="polyhvdrun [options] command [arguments]",
        description="Run a command as the ranks of one job, on this host or on several.",
        epilog="example: polyhvdrun -np 4 -H algo-1:2,algo-2:2 python train.py",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-np", "--num-proc", type=int, metavar="N", help="number of ranks; default: every slot of the hosts")
    add(
        "-H", "--hosts", metavar="H1:N1,H2:N2", help="hosts and how many ranks each takes; default: this host"
    )
    add(
        "-hostfile",
        "--hostfile",
        metavar="FILE",
        help="the same from a file, with 'host slots=N' in each line",
    )
    add(
        "--network-interface",
        "--network-interfaces",
        metavar="NAME",
        default="",
        help="interface (eth0), or network (10.0.0.0/16), of all connections",
    )
    add(
        "--output-filename",
        metavar="DIR",
        help="write each rank's output to DIR/rank.N/stdout and stderr as well",
    )
    add("--no-tag", action="store_true", help="do not begin each line with its rank")
    add(
        "--start-timeout",
        type=float,
        metavar="S",
        help="seconds for all ranks to start, and to meet in init()",
    )
    add(
        "--term-grace-s",
        type=float,
        metavar="S",
        default=30.0,
        help="seconds that ranks have from SIGTERM to SIGKILL, for a last checkpoint; default: 30",
    )
    add("--keep-going", action="store_true", help="a rank that fails does not stop the others")
    add("-p", "--ssh-port", type=int, metavar="PORT", help="port of ssh on the other hosts")
    add("-i", "--ssh-identity-file", metavar="FILE", help="private key for ssh")
    add("--ssh-option", action="append", default=[], metavar="OPTION", help="as ssh -o; may be repeated")
    add(
        "--remote-python",
        metavar="PATH",
        default=sys.executable,
        help="Python on the other hosts; default: the path of this one",
    )
    settings = parser.add_argument_group(
        "settings", "each sets the POLYHVD_ variable of that meaning on all ranks; see docs/configuration.md"
    )
    for option, (variable, metavar, meaning) in _SETTINGS.items():
        if metavar is None:
            settings.add_argument(option, action="store_const", const="1", dest=variable, help=meaning)
        else:
            settings.add_argument(option, metavar=metavar, dest=variable, help=meaning)
    add("-v", "--verbose", action="store_true", help="say what is started where")
    add(
        "--mpi",
        "--use-mpi",
        action="store_true",
        help="let MPI's launcher, mpirun or mpiexec, start the ranks",
    )
    add("--mpi-args", metavar="ARGS", default="", help="more options of MPI's launcher, as one word")
    add(
        "-cb",
        "--check",
        "--check-build",
        action="store_true",
        help="say what was found on this host, and what is missing",
    )
    horovodrun.add_to(parser)
    add("--version", action="version", version=f"polyhvd {_version()}")
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _version() -> str:
    try:
        return importlib.metadata.version("polyhvd")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``polyhvdrun`` and return its exit status; the first failing rank's, if one fails."""
    _open_standard_streams()
    parser = _parser()
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if options.check:
        print("\n".join(report()))
        return 0
    if not command:
        parser.error("no command to run, such as: polyhvdrun -np 2 python train.py")
    _raise_descriptor_limit()
    try:
        spec = _spec(options, command)
        if options.mpi:
            _become_mpirun(spec, options)
        output = Output(len(spec.placements), tag=not options.no_tag, directory=options.output_filename)
    except (ValueError, OSError) as error:
        parser.exit(_USAGE_STATUS, f"polyhvdrun: {error}\n")
    with contextlib.closing(output):
        try:
            with Job(spec, output) as job:
                return job.run()
        except (ValueError, OSError) as error:
            output.say(str(error), alarm=True)
            return 1
        except KeyboardInterrupt:
            return _INTERRUPTED_STATUS


def _become_mpirun(spec: JobSpec, options: argparse.Namespace) -> NoReturn:
    """Run MPI's launcher in this process's place."""
    if options.output_filename:
        raise ValueError("--output-filename is not for --mpi; give the launcher's own option with --mpi-args")
    if options.keep_going:
        raise ValueError("--keep-going is not for --mpi, whose launchers have their own ways to end a job")
    launcher = find_launcher()
    extra = shlex.split(options.mpi_args)
    ssh = _ssh(options)
    words, env = launcher.command(spec.argv, spec.hosts, len(spec.placements), spec.env, ssh, extra)
    if options.verbose:
        print(f"polyhvdrun: {shlex.join(words)}", file=sys.stderr, flush=True)
    os.execve(words[0], words, env)


def _spec(options: argparse.Namespace, command: list[str]) -> JobSpec:
    if options.hosts and options.hostfile:
        raise HostsError("give -H or --hostfile, not both")
    if options.hosts:
        hosts = parse_hosts(options.hosts)
    elif options.hostfile:
        hosts = parse_hostfile(options.hostfile)
    else:
        hosts = [Host("localhost", options.num_proc or 1)]
    env = {}
    if options.start_timeout is not None:
        if not options.start_timeout > 0:
            raise ValueError(f"--start-timeout {options.start_timeout:g}: must be above 0")
        env["POLYHVD_START_TIMEOUT"] = f"{options.start_timeout:g}"
    if options.network_interface:
        env["POLYHVD_GLOO_IFACE"] = options.network_interface
    if not 0 <= options.term_grace_s < float("inf"):
        raise ValueError(f"--term-grace-s {options.term_grace_s:g}: must not be negative")
    env |= _settings(options)
    return JobSpec(
        argv=command,
        hosts=hosts,
        placements=place(hosts, options.num_proc),
        env=env,
        interface=options.network_interface,
        remote=SshAgents(_ssh(options)),
        start_timeout_s=_start_timeout_s(options),
        term_grace_s=options.term_grace_s,
        policy=LetOthersFinish() if options.keep_going else StopAtFirstFailure(),
        verbose=options.verbose,
    )


def _ssh(options: argparse.Namespace) -> SshOptions:
    return SshOptions(
        port=options.ssh_port,
        identity_file=options.ssh_identity_file,
        options=tuple(options.ssh_option),
        python=options.remote_python,
        connect_timeout_s=_start_timeout_s(options),
    )


def _start_timeout_s(options: argparse.Namespace) -> float:
    return options.start_timeout or 30.0


def _settings(options: argparse.Namespace) -> dict[str, str]:
    """The variables that options set; raises ConfigError where a rank would."""
    values = {variable: getattr(options, variable) for variable, _, _ in _SETTINGS.values()}
    given = {variable: value for variable, value in values.items() if value is not None}
    if "FUSION_THRESHOLD" in given:
        try:
            given["FUSION_THRESHOLD"] = str(round(float(given["FUSION_THRESHOLD"]) * (1 << 20)))
        except (ValueError, OverflowError):
            raise ValueError(
                f"--fusion-threshold-mb {given['FUSION_THRESHOLD']}: expected a number"
            ) from None
    env = {f"POLYHVD_{name}": value for name, value in given.items()}
    Settings.from_environment(env)
    return env


def _open_standard_streams() -> None:
    """Where one is closed open the null device, lest a socket of ours get its number."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


def _raise_descriptor_limit() -> None:
    """Each rank holds a few of our descriptors."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
