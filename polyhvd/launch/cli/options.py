"""The options of ``polyhvdrun``: its command line, and how it is parsed.

horovodrun's names are all here; what is peculiar to them stands in :mod:`polyhvd.launch.cli.horovodrun`.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from polyhvd.launch.cli import horovodrun

__all__ = [
    "ELASTIC_OPTIONS",
    "PROGRAM_OPTIONS",
    "SETTINGS",
    "USAGE_STATUS",
    "Parser",
    "make_parser",
    "parse",
    "print_version",
]

USAGE_STATUS = 2

#: Options that set a variable of the ranks, under horovodrun's names; None: they take no value.
SETTINGS: dict[str, tuple[str, str | None, str]] = {
    "--fusion-threshold-mb": ("FUSION_THRESHOLD", "MB", "maximum size of fused operations in MiB"),
    "--cycle-time-ms": ("CYCLE_TIME", "MS", "maximum time to wait for more operations to fuse"),
    "--cache-capacity": ("CACHE_CAPACITY", "N", "maximum number of operations in the response cache"),
    "--reproducible": ("REPRODUCIBLE", None, "make sums independent of the placement of ranks on hosts"),
    "--autotune": ("AUTOTUNE", None, "tune fusion, batching and chunk sizes while the job runs"),
    "--autotune-log-file": ("AUTOTUNE_LOG", "FILE", "CSV file for the samples"),
    "--autotune-warmup-samples": ("AUTOTUNE_WARMUP_SAMPLES", "N", "number of first samples to ignore"),
    "--autotune-steps-per-sample": ("AUTOTUNE_STEPS_PER_SAMPLE", "N", "steps in each sample"),
    "--autotune-bayes-opt-max-samples": ("AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "N", "maximum number of samples"),
    "--autotune-gaussian-process-noise": ("AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "X", "assumed noise of samples"),
    "--timeline-filename": ("TIMELINE", "FILE", "write a timeline of every rank"),
    "--timeline-mark-cycles": (
        "TIMELINE_MARK_CYCLES",
        None,
        "mark in the timeline when the engine begins new work",
    ),
    "--no-stall-check": ("STALL_CHECK_DISABLE", None, "turn off stall reports"),
    "--stall-check-warning-time-seconds": (
        "STALL_CHECK_TIME_SECONDS",
        "S",
        "report operations that wait longer than this",
    ),
    "--stall-check-shutdown-time-seconds": (
        "STALL_SHUTDOWN_TIME_SECONDS",
        "S",
        "end the job if an operation waits longer than this",
    ),
    "--log-level": ("LOG_LEVEL", "LEVEL", "minimum log level (trace, debug, info, warning, error, fatal)"),
    "--log-hide-timestamp": ("LOG_HIDE_TIME", None, "omit the time from log lines"),
    "--heartbeat-timeout-s": (
        "HEARTBEAT_TIMEOUT_S",
        "S",
        "seconds without a heartbeat after which a host is lost; default: 30, elastic jobs 4; 0: never",
    ),
    "--thread-affinity": ("THREAD_AFFINITY", "C0,C1", "CPU core of the engine's thread, for each local rank"),
    "--gloo-timeout-seconds": (
        "DATA_TIMEOUT_SECONDS",
        "S",
        "maximum time of a transfer that ranks have agreed on",
    ),
    "--mpi-threads-disable": ("MPI_THREADS_DISABLE", None, "use MPI from one thread at a time"),
    "--hierarchical-allreduce": (
        "HIERARCHICAL_ALLREDUCE",
        None,
        "on GPUs, use NCCL within hosts and CPUs between them",
    ),
}

#: Where the first of several hosts without ssh waits for the others, unless --rdzv-endpoint is given.
RENDEZVOUS_PORT = 16420
#: Each of them makes a job elastic.
ELASTIC_OPTIONS = (
    *("min_np", "max_np", "spares", "host_discovery_script", "reset_limit", "elastic_timeout"),
    *("blacklist_cooldown_range", "slow_rank_policy", "slow_rank_factor", "on_state_lost"),
    "on_exception",
)
#: Options of each of several programs; every other option is the job's, and precedes the first program.
PROGRAM_OPTIONS = ("num_proc", "hosts", "variables", "module", "command")

_SECONDS_MAX = 1e6  # as of settings
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
#: Set by the launcher, and different on every rank or in every job.
_LAUNCHERS_OWN = re.compile(
    r"(POLYHVD|HOROVOD)_((LOCAL_|CROSS_)?(RANK|SIZE)|HOSTNAME|HOST_ID|RENDEZVOUS|SECRET|SECRET_FILE)"
    r"|POLYHVD_RESTART_COUNT"
)


class Parser(argparse.ArgumentParser):
    """Complains in one line."""

    def error(self, message: str) -> NoReturn:
        """End the program; the message for an unknown option names the one that was probably meant."""
        unknown = message.partition("unrecognized arguments: ")[2].split(" ")[0]
        if unknown:
            import difflib  # which no job needs

            message = f"there is no option {unknown}"
            near = difflib.get_close_matches(unknown.partition("=")[0], list(self._option_string_actions), 1)
            message += f"; was {near[0]} meant?" if near else "; polyhvdrun --help lists them"
        self.exit(USAGE_STATUS, f"polyhvdrun: {message}\n")


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)


def print_version() -> None:
    """Look the version up, which takes a while, and print it."""
    print(f"polyhvd {_version()}")


class _Version(argparse.Action):
    """Has the version looked up where it is asked for, and not before."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        print_version()
        parser.exit(0)


def make_parser() -> Parser:
    """A parser of the options of a job, or of one of several programs in it."""
    parser = Parser(
        prog="polyhvdrun",
        usage="polyhvdrun [options] command [arguments] [: -np N command [arguments] ...]",
        description="Run a command as the ranks of one job, on this host or on several.",
        epilog="examples: polyhvdrun -np 4 -H algo-1:2,algo-2:2 python train.py; "
        "polyhvdrun -np 1 python serve.py : -np 3 python train.py",
        allow_abbrev=False,
        formatter_class=_Help,
    )
    _add_job(parser)
    _add_output(parser)
    _add_metrics(parser)
    _add_ending(parser)
    _add_elastic(parser)
    _add_ssh(parser)
    _add_nodes(parser)
    _add_mpi(parser)
    _add_settings(parser)
    horovodrun.add_to(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _add_job(parser: Parser) -> None:
    add = parser.add_argument
    add("-np", "--num-proc", type=int, metavar="N", help="number of ranks; default: all slots of the hosts")
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument(
        "-H",
        "--hosts",
        metavar="H1:N1,H2:N2",
        help="hosts, with a number of slots for each; default: this host",
    )
    hosts.add_argument(
        "-hostfile",
        "--hostfile",
        metavar="FILE",
        help="file of hosts, with a line 'host slots=N' for each",
    )
    add(
        "--slots-per-host",
        "--slots",
        type=_positive,
        metavar="N",
        help="slots of hosts that are listed without a number",
    )
    add(
        "-x",
        action="append",
        default=[],
        type=_variable,
        dest="variables",
        metavar="NAME[=VALUE]",
        help="set an environment variable on all ranks, by default to its value here; may be repeated",
    )
    add(
        "--huge-pages",
        action="store_true",
        help="let PyTorch use transparent huge pages, as NumPy does; sets THP_MEM_ALLOC_ENABLE=1",
    )
    add("-m", "--module", action="store_true", help="run the command as a Python module, as python -m does")
    add(
        "--network-interface",
        "--network-interfaces",
        action="append",
        metavar="NAME",
        help="network interface (eth0) or network (10.0.0.0/16) for all connections",
    )
    add(
        "--start-timeout",
        type=_seconds,
        metavar="S",
        help="seconds for all ranks to start and to connect in init(); default: 30; with --nnodes or "
        "--sagemaker 600",
    )
    add("--config-file", metavar="FILE", help="YAML file with settings; the command line takes precedence")
    add("--dry-run", action="store_true", help="print the ranks and hosts of the job, and start nothing")
    add(
        "-v",
        "--verbose",
        action="store_true",
        help="print each process that is started; without a command, print the version",
    )
    add(
        "-cb",
        "--check",
        "--check-build",
        action="store_true",
        help="print which frameworks and libraries are available on this host",
    )
    add(
        "--print-completion",
        metavar="SHELL",
        help="print completions for bash, zsh or another shell; needs shtab",
    )
    add("--version", action=_Version, nargs=0, help="print the version")


def _add_output(parser: Parser) -> None:
    add = parser.add_argument_group("output").add_argument
    add(
        "--output-filename",
        "--log-dir",
        metavar="DIR",
        help="also write each rank's output to DIR/rank.N/stdout and stderr",
    )
    add(
        "--tee",
        type=int,
        choices=(0, 1, 2, 3),
        help="streams that --output-filename writes: 1 standard output, 2 standard error, 3 both, 0 none; "
        "default: 3",
    )
    add("--no-tag", action="store_true", help="do not prefix lines of output with the rank")
    add(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        action="store_true",
        dest="timestamps",
        help="prefix lines of output with the time",
    )


def _add_metrics(parser: Parser) -> None:
    add = parser.add_argument_group("metrics").add_argument
    add(
        "--metrics-port",
        type=_port,
        metavar="PORT",
        help="serve the metrics of all ranks for Prometheus, at http://127.0.0.1:PORT/metrics; 0: any free "
        "port",
    )
    add(
        "--metrics-address",
        metavar="ADDRESS",
        default="127.0.0.1",
        help="address for --metrics-port; with 0.0.0.0 other hosts can read the metrics; default: 127.0.0.1",
    )


def _add_ending(parser: Parser) -> None:
    add = parser.add_argument_group("when a rank fails").add_argument
    add("--keep-going", action="store_true", help="do not stop the other ranks when a rank fails")
    add(
        "--max-restarts",
        type=_count,
        metavar="N",
        default=0,
        help="restart a job that has failed up to N times; default: 0",
    )
    add(
        "--term-grace-s",
        type=_seconds,
        metavar="S",
        default=30.0,
        help="seconds between SIGTERM and SIGKILL, for a last checkpoint; default: 30",
    )


def _add_elastic(parser: Parser) -> None:
    add = parser.add_argument_group(
        "elastic jobs",
        "--min-np makes a job elastic: it continues when ranks are lost; see: polyhvd docs elastic",
    ).add_argument
    add("--min-np", "--min-num-proc", type=_positive, metavar="N", help="minimum number of ranks")
    add(
        "--max-np",
        "--max-num-proc",
        type=_positive,
        metavar="N",
        help="maximum number of ranks, if hosts have slots for them; default: -np",
    )
    add(
        "--spares",
        type=_count,
        metavar="N",
        help="processes on each host that are started in advance to replace lost ones; default: 0",
    )
    add(
        "--host-discovery-script",
        metavar="FILE",
        help="program that prints a line 'host:slots' for each available host; or MODULE:NAME, a Python "
        "object with a method find_available_hosts_and_slots()",
    )
    add(
        "--reset-limit",
        type=_count,
        metavar="N",
        help="end the job when the world has changed more than N times",
    )
    add(
        "--elastic-timeout",
        type=_seconds,
        metavar="S",
        help="seconds after which a job with fewer than --min-np ranks ends, and a new process that has not "
        "reached its elastic function is killed; default: 600",
    )
    add(
        "--blacklist-cooldown-range",
        type=_seconds,
        nargs=2,
        metavar=("MIN", "MAX"),
        help="minimum and maximum seconds for which a slot is not used after a failure; default: 0 after "
        "the first failure, then 1 to 60",
    )
    add(
        "--on-state-lost",
        choices=("fail", "restart"),
        help="action if all processes with the state of train() are lost and there is no checkpoint: fail "
        "ends the job, restart starts from step 0; default: fail",
    )
    add(
        "--on-exception",
        choices=("end", "replace"),
        help="action if the elastic function of a rank fails with an exception or a nonzero status: end ends "
        "the job, replace continues as if the rank had been lost; default: end",
    )
    add(
        "--slow-rank-policy",
        choices=("report", "evict"),
        help="action for a rank that all others wait for in every step: report prints it, evict replaces it "
        "with a spare; default: report",
    )
    add(
        "--slow-rank-factor",
        type=_factor,
        metavar="X",
        help="a rank is slow if its steps take X times as long as those of the others; default: 1.5",
    )


def _add_ssh(parser: Parser) -> None:
    add = parser.add_argument_group("other hosts").add_argument
    add("-p", "--ssh-port", type=int, metavar="PORT", help="ssh port of the other hosts")
    add("-i", "--ssh-identity-file", metavar="FILE", help="private key for ssh")
    add(
        "--ssh-option",
        action="append",
        default=[],
        metavar="OPTION",
        help="option for ssh, as ssh -o; may be repeated",
    )
    add(
        "--remote-python",
        metavar="PATH",
        default=sys.executable,
        help="path of Python on the other hosts; default: the path of this Python",
    )
    add(
        "--no-host-checks",
        action="store_true",
        help="do not check other hosts before ranks are started (versions, clocks, space, connection back)",
    )


def _add_mpi(parser: Parser) -> None:
    group = parser.add_argument_group("MPI")
    controllers = group.add_mutually_exclusive_group()
    controllers.add_argument(
        "--mpi",
        "--use-mpi",
        action="store_true",
        help="start ranks with MPI's launcher, mpirun or mpiexec",
    )
    controllers.add_argument("--jsrun", action="store_true", help="start ranks with LSF's jsrun")
    controllers.add_argument("--gloo", "--use-gloo", action="store_true", help=argparse.SUPPRESS)
    group.add_argument(
        "--mpi-args",
        metavar="ARGS",
        default="",
        help="additional options for MPI's launcher, as one quoted argument",
    )
    group.add_argument(
        "--binding-args",
        metavar="ARGS",
        default="",
        help="options for MPI's launcher that bind ranks to cores, as one quoted argument",
    )


def _add_nodes(parser: Parser) -> None:
    add = parser.add_argument_group(
        "several hosts without ssh", "start polyhvdrun on each host, with the same POLYHVD_SECRET"
    ).add_argument
    add("--nnodes", type=int, metavar="N", help="number of hosts")
    add("--node-rank", type=int, metavar="K", help="number of this host, from 0")
    add(
        "--rdzv-endpoint",
        metavar="HOST[:PORT]",
        help=f"address of host 0 for the other hosts; default port: {RENDEZVOUS_PORT}",
    )
    add(
        "--nproc-per-node",
        type=int,
        metavar="N",
        help="ranks on this host; default: one per GPU, or 1. Without --nnodes, the same as --slots-per-host",
    )
    add("--sagemaker", action="store_true", help="take hosts and arguments from SageMaker's container")


def is_one_of_several(options: argparse.Namespace) -> bool:
    """Return whether polyhvdrun is started on every host, and this is one of them."""
    return options.sagemaker or any(
        value is not None for value in (options.nnodes, options.node_rank, options.rdzv_endpoint)
    )


def take_ranks_per_node(programs: list[argparse.Namespace]) -> None:
    """Slots of each host for --nproc-per-node, where one polyhvdrun starts all ranks; as torchrun's.

    Raises:
        ValueError: another option contradicts it.
    """
    options = programs[0]
    count = options.nproc_per_node
    if count is None:
        return
    if count < 1:
        raise ValueError(f"--nproc-per-node {count}: must be 1 or more")
    if len(programs) > 1:
        raise ValueError(f"--nproc-per-node {count}: each of several programs has its -np; leave it out")
    if options.slots_per_host not in (None, count):
        raise ValueError(f"--nproc-per-node {count} and --slots-per-host {options.slots_per_host} differ")
    if options.hosts is None and options.hostfile is None and options.num_proc not in (None, count):
        raise ValueError(f"--nproc-per-node {count} and -np {options.num_proc} differ on a single host")
    options.slots_per_host = count


def interface_of(options: argparse.Namespace) -> str:
    """The value of --network-interface, in the form of POLYHVD_GLOO_IFACE."""
    return ",".join(options.network_interface or ())


def _add_settings(parser: Parser) -> None:
    settings = parser.add_argument_group(
        "settings", "each option sets a POLYHVD_ variable on all ranks; see: polyhvd docs configuration"
    )
    for option, (variable, metavar, meaning) in SETTINGS.items():
        if metavar is not None:
            settings.add_argument(option, metavar=metavar, dest=variable, help=meaning)
            continue
        group = settings.add_mutually_exclusive_group()
        group.add_argument(option, action="store_const", const="1", dest=variable, help=meaning)
        for other, (of, value) in horovodrun.OPPOSITES.items():
            if of == variable:
                group.add_argument(other, action="store_const", const=value, dest=of, help=argparse.SUPPRESS)
    settings.add_argument(
        "--tcp",
        action="store_true",
        help="do not use InfiniBand for NCCL; all other traffic between hosts always uses TCP",
    )


def parse(parser: Parser, words: Sequence[str] | None = None) -> list[argparse.Namespace]:
    """Take a command line apart; several programs are separated by a word that is a colon.

    After ``--`` a colon is a word of the program, which is then the last one.

    Returns:
        The options of each program; those of the job are in the first.
    """
    programs: list[argparse.Namespace] = []
    rest: Sequence[str] | None = sys.argv[1:] if words is None else words
    while rest is not None:
        words, options = rest, parser.parse_args(rest)
        command, rest = options.command, None
        if command[:1] == ["--"]:
            options.command = command[1:]
        elif ":" in command:
            colon = command.index(":")
            options.command, rest = command[:colon], command[colon + 1 :]
        programs.append(options)
        if rest is not None or len(programs) > 1:
            _check_program(parser, options, len(programs), words)
    return programs


def _check_program(parser: Parser, options: argparse.Namespace, number: int, words: Sequence[str]) -> None:
    """One of several programs: it is whole, and leaves to the first what concerns the job."""
    hint = "write -- before the last program if ':' is one of its arguments"
    if not options.command:
        parser.error(f"program {number} of those that ':' separates is empty; {hint}")
    if options.num_proc is None:
        parser.error(
            f"program {number} ({options.command[0]}) has no -np, which each needs of several; {hint}"
        )
    if number == 1:
        return
    for action in parser._actions:
        if action.dest in PROGRAM_OPTIONS or not action.option_strings:
            continue
        if getattr(options, action.dest, action.default) != action.default:
            # Another option may set the same.
            given = [word.partition("=")[0] for word in words if word.startswith("-")]
            same = [other.option_strings for other in parser._actions if other.dest == action.dest]
            name = next(word for word in given if any(word in names for names in same))
            parser.error(
                f"program {number} ({options.command[0]}): {name} is for the whole job; "
                "give it before the first program"
            )


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        return min(float(text), _SECONDS_MAX)
    raise argparse.ArgumentTypeError(f"expected a number of seconds, found {text!r}")


def _factor(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 1.0 < (value := float(text)) < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"expected a number above 1, found {text!r}")


def _positive(text: str) -> int:
    return _at_least(text, 1)


def _count(text: str) -> int:
    return _at_least(text, 0)


def _port(text: str) -> int:
    value = _count(text)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, found {text}")
    return value


def _at_least(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"expected a number, {least} or more, found {text!r}")
    return value


def _variable(text: str) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    if not _VARIABLE.fullmatch(name):
        raise argparse.ArgumentTypeError(f"expected NAME or NAME=VALUE, found {text!r}")
    if _LAUNCHERS_OWN.fullmatch(name):
        raise argparse.ArgumentTypeError(f"{name} is set only by polyhvdrun")
    return name, value if equals else None


def _version() -> str:
    import importlib.metadata  # takes as long to import as all else here

    try:
        return importlib.metadata.version("polyhvd")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
