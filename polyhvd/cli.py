"""The ``polyhvd`` command: reads what jobs have written about themselves, and measures one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from polyhvd import __version__
from polyhvd.bench import command as bench
from polyhvd.config import Settings
from polyhvd.launch.elastic import leave
from polyhvd.launch.hosts import doctor
from polyhvd.launch.job import status, top
from polyhvd.observe import autotune, documents, flight, terminal, timeline

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 1 when a file cannot be used."""
    with terminal.until_output_fails("polyhvd"):
        return _run(arguments)


def _run(arguments: Sequence[str] | None) -> int:
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["bench"]:  # runs as every rank of a job, and so has its own way to complain
        return bench.main(words[1:])
    if words[:1] == ["doctor"]:  # whose status says what was found
        return doctor.main(words[1:])
    if words[:1] == ["leave"]:
        return leave.main(words[1:])
    if words[:1] == ["status"]:
        return status.main(words[1:])
    if words[:1] == ["top"]:
        return top.main(words[1:])
    if words[:1] == ["parity"]:
        from polyhvd.parity import command as parity  # with what it needs of NumPy, which takes a while

        return parity.main(words[1:])
    parser = _parser()
    options = parser.parse_args(words)
    if options.print_completion:
        return _print_completion(_parser(with_parity=True), options.print_completion)
    if options.run is None:
        parser.error("the following arguments are required: COMMAND")
    try:
        lines: list[str] = options.run(options)
    except (OSError, ValueError) as error:
        print(f"polyhvd: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


def _parser(*, with_parity: bool = False) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="polyhvd", description="Inspect, measure and control polyhvd jobs.")
    parser.add_argument(
        "--print-completion", metavar="SHELL", help="print completions for bash or zsh; needs shtab"
    )
    parser.add_argument(
        "--version", action="version", version=f"polyhvd {__version__}", help="print the version"
    )
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(metavar="COMMAND")

    command = commands.add_parser("timeline", help="merge the ranks' timelines")
    actions = command.add_subparsers(required=True, metavar="ACTION")
    merge = actions.add_parser("merge", help="merge the timelines of all ranks, with aligned clocks")
    merge.add_argument("out", type=Path, metavar="OUT", help="file to write")
    merge.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="timeline files of the ranks of one job"
    )
    merge.set_defaults(run=lambda options: timeline.merge(options.out, options.files))

    compare = commands.add_parser(
        "flight",
        help="compare the ranks' last operations after a failure",
        description="Compare the last operations of all ranks, and show the first difference.",
    )
    compare.add_argument(
        "files",
        type=Path,
        nargs="*",
        metavar="FILE",
        help="flight files of the ranks, or a folder; default: those of the latest job on this host",
    )
    compare.set_defaults(run=_flight)

    text = "list the topics of the documentation, or print a page"
    command = commands.add_parser("docs", help=text, description=f"{text.capitalize()}.")
    command.add_argument(
        "topic",
        nargs="?",
        default="",
        metavar="TOPIC",
        help="page to print, such as elastic; default: list all",
    )
    command.set_defaults(run=lambda o: documents.page(o.topic) if o.topic else documents.listing())

    command = commands.add_parser("autotune", help="show the samples and the result of autotuning")
    command.add_argument("log", type=Path, metavar="LOG", help="file written by POLYHVD_AUTOTUNE_LOG")
    command.add_argument("--plot", type=Path, metavar="FILE.png", help="also plot the search")
    command.set_defaults(run=_autotune)

    # These read their words themselves; the options are for completion.
    doctor.add_options(commands.add_parser("doctor", help="check this host or several for problems"))
    leave.add_options(
        commands.add_parser("leave", help="remove ranks or hosts from an elastic job without a loss")
    )
    status.add_options(
        commands.add_parser("status", help="show the state of a running job, and what it waits for")
    )
    top.add_options(commands.add_parser("top", help="show the metrics of all ranks of running jobs, live"))
    command = commands.add_parser(
        "parity", help="train one network in several frameworks, and report differences"
    )
    if with_parity:
        from polyhvd.parity import command as parity

        parity.add_options(command)
    bench.add_arguments(
        commands.add_parser("bench", help="measure collectives: polyhvdrun -np 4 polyhvd bench")
    )
    return parser


def _print_completion(parser: argparse.ArgumentParser, shell: str) -> int:
    try:
        import shtab

        if shell not in ("bash", "zsh"):
            parser.error(f"--print-completion {shell}: expected one of bash, zsh, found {shell}")
        print(shtab.complete(parser, shell))
    except ImportError:
        parser.error("--print-completion needs shtab: pip install 'polyhvd[launcher]'")
    return 0


def _flight(options: argparse.Namespace) -> list[str]:
    if options.files:
        return flight.explain(flight.load(options.files))
    files, description = flight.latest(Settings.from_environment().flight_folder or "/tmp")
    return [*flight.explain(flight.load(files)), "", description]


def _autotune(options: argparse.Namespace) -> list[str]:
    drawn = autotune.plot(options.log, options.plot) if options.plot else []
    return autotune.summary(options.log) + drawn


if __name__ == "__main__":
    sys.exit(main())
