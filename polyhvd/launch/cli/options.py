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
    "--heartbeat-timeout-s": (
        "HEARTBEAT_TIMEOUT_S",
        "S",
        "longest silence of a host, by default 30, elastic 4; 0: for ever",
    ),
    "--thread-affinity": ("THREAD_AFFINITY", "C0,C1", "core of the engine's thread, for each local rank"),
    "--gloo-timeout-seconds": ("DATA_TIMEOUT_SECONDS", "S", "longest time of an agreed transfer"),
    "--mpi-threads-disable": ("MPI_THREADS_DISABLE", None, "MPI serves one thread at a time"),
    "--hierarchical-allreduce": ("HIERARCHICAL_ALLREDUCE", None, "NCCL within hosts, CPUs between them"),
}

#: Where the first of several hosts without ssh waits for the others, unless --rdzv-endpoint is given.
RENDEZVOUS_PORT = 16420
#: Each of them makes a job elastic.
ELASTIC_OPTIONS = (
    *("min_np", "max_np", "spares", "host_discovery_script", "reset_limit", "elastic_timeout"),
    *("blacklist_cooldown_range", "slow_rank_policy", "slow_rank_factor", "on_state_lost"),
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
    add("-np", "--num-proc", type=int, metavar="N", help="number of ranks; default: every slot of the hosts")
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument(
        "-H", "--hosts", metavar="H1:N1,H2:N2", help="hosts and how many ranks each takes; default: this host"
    )
    hosts.add_argument(
        "-hostfile",
        "--hostfile",
        metavar="FILE",
        help="the same from a file, with 'host slots=N' in each line",
    )
    add(
        "--slots-per-host",
        "--slots",
        type=_positive,
        metavar="N",
        help="slots of hosts that are named without a number",
    )
    add(
        "-x",
        action="append",
        default=[],
        type=_variable,
        dest="variables",
        metavar="NAME[=VALUE]",
        help="a variable of the ranks; without a value: that of this process. May be repeated",
    )
    add(
        "--huge-pages",
        action="store_true",
        help="have PyTorch ask for transparent huge pages, as NumPy does; sets THP_MEM_ALLOC_ENABLE=1",
    )
    add("-m", "--module", action="store_true", help="the command is a Python module, as of python -m")
    add(
        "--network-interface",
        "--network-interfaces",
        action="append",
        metavar="NAME",
        help="interface (eth0), or network (10.0.0.0/16), of all connections",
    )
    add(
        "--start-timeout",
        type=_seconds,
        metavar="S",
        help="seconds for all ranks to start, and to meet in init(); default: 30",
    )
    add("--config-file", metavar="FILE", help="YAML file with settings; the command line comes before it")
    add("--dry-run", action="store_true", help="say what would run where, and start nothing")
    add(
        "-v",
        "--verbose",
        action="store_true",
        help="say what is started where; -v without a command is --version",
    )
    add(
        "-cb",
        "--check",
        "--check-build",
        action="store_true",
        help="say what was found on this host, and what is missing",
    )
    add(
        "--print-completion",
        metavar="SHELL",
        help="print completions for bash, zsh or another shell; needs shtab",
    )
    add("--version", action=_Version, nargs=0, help="say which polyhvd this is")


def _add_output(parser: Parser) -> None:
    add = parser.add_argument_group("output").add_argument
    add(
        "--output-filename",
        "--log-dir",
        metavar="DIR",
        help="write each rank's output to DIR/rank.N/stdout and stderr as well",
    )
    add(
        "--tee",
        type=int,
        choices=(0, 1, 2, 3),
        help="what of it is written there: 1 standard output, 2 standard error, 3 both (the default), 0 none",
    )
    add("--no-tag", action="store_true", help="do not begin each line with its rank")
    add(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        action="store_true",
        dest="timestamps",
        help="begin each line with the time at which it came",
    )


def _add_ending(parser: Parser) -> None:
    add = parser.add_argument_group("when a rank fails").add_argument
    add("--keep-going", action="store_true", help="a rank that fails does not stop the others")
    add(
        "--max-restarts",
        type=_count,
        metavar="N",
        default=0,
        help="start the whole job again when it has failed, N times at most; default: 0",
    )
    add(
        "--term-grace-s",
        type=_seconds,
        metavar="S",
        default=30.0,
        help="seconds that ranks have from SIGTERM to SIGKILL, for a last checkpoint; default: 30",
    )


def _add_elastic(parser: Parser) -> None:
    add = parser.add_argument_group(
        "elastic jobs", "--min-np makes a job elastic: ranks that are lost are replaced; see docs/elastic.md"
    ).add_argument
    add("--min-np", "--min-num-proc", type=_positive, metavar="N", help="go on with as few ranks as this")
    add(
        "--max-np",
        "--max-num-proc",
        type=_positive,
        metavar="N",
        help="grow to as many, where hosts have slots for them; default: -np",
    )
    add(
        "--spares",
        type=_count,
        metavar="N",
        help="processes on each host that are started ahead, and wait for a place; default: 0",
    )
    add(
        "--host-discovery-script",
        metavar="FILE",
        help="program that prints the hosts that there are now, a line 'host:slots' for each; or "
        "MODULE:NAME, an object of Python that says it",
    )
    add("--reset-limit", type=_count, metavar="N", help="end the job when the world has changed more often")
    add(
        "--elastic-timeout",
        type=_seconds,
        metavar="S",
        help="end the job after so long with fewer than --min-np ranks, and a new process that takes longer "
        "from init() to its elastic function; default: 600",
    )
    add(
        "--blacklist-cooldown-range",
        type=_seconds,
        nargs=2,
        metavar=("MIN", "MAX"),
        help="seconds that a slot rests after a failure, at first and at most; default: 0, then 1 to 60",
    )
    add(
        "--on-state-lost",
        choices=("fail", "restart"),
        help="what follows when all processes that had the state of train() are lost and there is no "
        "checkpoint: fail ends the job, restart starts from step 0; default: fail",
    )
    add(
        "--slow-rank-policy",
        choices=("report", "evict"),
        help="what follows when all wait for one rank in every step: report says so, and evict has a spare "
        "take its place; default: report",
    )
    add(
        "--slow-rank-factor",
        type=_factor,
        metavar="X",
        help="slow is who takes so many times as long as the others; default: 1.5",
    )


def _add_ssh(parser: Parser) -> None:
    add = parser.add_argument_group("other hosts").add_argument
    add("-p", "--ssh-port", type=int, metavar="PORT", help="port of ssh on the other hosts")
    add("-i", "--ssh-identity-file", metavar="FILE", help="private key for ssh")
    add("--ssh-option", action="append", default=[], metavar="OPTION", help="as ssh -o; may be repeated")
    add(
        "--remote-python",
        metavar="PATH",
        default=sys.executable,
        help="Python on the other hosts; default: the path of this one",
    )
    add(
        "--no-host-checks",
        action="store_true",
        help="do not look at other hosts before ranks are started (versions, clocks, room, the way back)",
    )


def _add_mpi(parser: Parser) -> None:
    group = parser.add_argument_group("MPI")
    controllers = group.add_mutually_exclusive_group()
    controllers.add_argument(
        "--mpi",
        "--use-mpi",
        action="store_true",
        help="let MPI's launcher, mpirun or mpiexec, start the ranks",
    )
    controllers.add_argument("--jsrun", action="store_true", help="let LSF's jsrun start the ranks")
    controllers.add_argument("--gloo", "--use-gloo", action="store_true", help=argparse.SUPPRESS)
    group.add_argument(
        "--mpi-args", metavar="ARGS", default="", help="more options of MPI's launcher, as one word"
    )
    group.add_argument(
        "--binding-args", metavar="ARGS", default="", help="the same, for options that bind ranks to cores"
    )


def _add_nodes(parser: Parser) -> None:
    add = parser.add_argument_group(
        "several hosts without ssh", "polyhvdrun is started on each of them; all need one POLYHVD_SECRET"
    ).add_argument
    add("--nnodes", type=int, metavar="N", help="number of hosts")
    add("--node-rank", type=int, metavar="K", help="number of this one, from 0")
    add(
        "--rdzv-endpoint",
        metavar="HOST[:PORT]",
        help=f"host 0, as the others reach it; port: {RENDEZVOUS_PORT}",
    )
    add(
        "--nproc-per-node",
        type=int,
        metavar="N",
        help="ranks of this host; default: one a GPU, or 1. Without --nnodes as --slots-per-host",
    )
    add("--sagemaker", action="store_true", help="hosts and arguments are those of SageMaker's container")


def is_one_of_several(options: argparse.Namespace) -> bool:
    """Whether polyhvdrun is started on every host, and this is one of them."""
    return options.sagemaker or any(
        value is not None for value in (options.nnodes, options.node_rank, options.rdzv_endpoint)
    )


def take_ranks_per_node(programs: list[argparse.Namespace]) -> None:
    """What --nproc-per-node means to one polyhvdrun that starts all ranks: slots of each host, as torchrun's.

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
        raise ValueError(f"--nproc-per-node {count} and -np {options.num_proc} differ, on this host alone")
    options.slots_per_host = count


def interface_of(options: argparse.Namespace) -> str:
    """What --network-interface names, as POLYHVD_GLOO_IFACE has it."""
    return ",".join(options.network_interface or ())


def _add_settings(parser: Parser) -> None:
    settings = parser.add_argument_group(
        "settings", "each sets the POLYHVD_ variable of that meaning on all ranks; see docs/configuration.md"
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
        "--tcp", action="store_true", help="NCCL uses no InfiniBand; between hosts all else is TCP anyway"
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


def _at_least(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"expected a number from {least} on, found {text!r}")
    return value


def _variable(text: str) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    if not _VARIABLE.fullmatch(name):
        raise argparse.ArgumentTypeError(f"expected NAME or NAME=VALUE, found {text!r}")
    if _LAUNCHERS_OWN.fullmatch(name):
        raise argparse.ArgumentTypeError(f"{name} is for polyhvdrun to set")
    return name, value if equals else None


def _version() -> str:
    import importlib.metadata  # takes as long to import as all else here

    try:
        return importlib.metadata.version("polyhvd")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
