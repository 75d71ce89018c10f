"""The command line of ``polyhvd bench``. Every rank reads it; only rank 0 prints."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import polyhvd
from polyhvd.bench import limits
from polyhvd.bench.collectives import OPS, REDOPS, Framework, Plan, measure, measured
from polyhvd.bench.table import Table
from polyhvd.config import Launched
from polyhvd.errors import HorovodInternalError, InvalidArgumentError

__all__ = ["add_arguments", "main"]

_USAGE_STATUS = 2
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)B?", text.upper())
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 4096, 64K, 16M or 1G")
    return int(match[1]) * _UNITS[match[2]]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _ops(text: str) -> list[str]:
    names = list(OPS) if text == "all" else text.split(",")
    if wrong := [name for name in names if name not in OPS]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is not one of all, {', '.join(OPS)}")
    return names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser of this command or of a subcommand."""
    add = parser.add_argument
    add("--op", type=_ops, default=list(OPS), metavar="OP,...", help=f"all (default), {', '.join(OPS)}")
    add(
        "--redop",
        choices=list(REDOPS),
        default="sum",
        help="operation of allreduce and reducescatter; default: sum",
    )
    add("--min-bytes", type=_bytes, default=1 << 10, metavar="SIZE", help="default: 1K")
    add("--max-bytes", type=_bytes, default=64 << 20, metavar="SIZE", help="default: 64M")
    add("--factor", type=_positive, default=4, metavar="N", help="ratio of successive sizes; default: 4")
    add("--dtype", default="float32", metavar="DTYPE", help="float32 (default), float16, bfloat16, int8, ...")
    add(
        "--framework",
        choices=sorted(measured()),
        default="numpy",
        help="framework of the tensors; default: numpy",
    )
    add(
        "--iterations",
        type=_positive,
        metavar="N",
        help="iterations for each size; default: as many as run in half a second",
    )
    add("--warm-up", type=_positive, default=5, metavar="N", help="iterations before measuring; default: 5")
    add(
        "--json",
        metavar="FILE",
        help="also write the figures as JSON to FILE; '-': to standard output, without the table",
    )


class _Parser(argparse.ArgumentParser):
    """Rank 0 says what is wrong; the others end in silence, and leave the job's status to it."""

    def error(self, message: str) -> NoReturn:
        if speaks():
            self.exit(_USAGE_STATUS, f"{self.prog}: {message}; see {self.prog} --help\n")
        self.exit(0)

    def print_help(self, file: Any = None) -> None:
        if speaks():
            super().print_help(file)


def speaks() -> bool:
    """Return whether this process is rank 0, before anything is known to work."""
    try:
        return Launched.from_environment().rank == 0
    except ValueError:
        return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line, measure, print; returns the exit status."""
    parser = _Parser(
        prog="polyhvd bench",
        description="Measure the collectives of this job. Without polyhvdrun, the job has one rank.",
    )
    add_arguments(parser)
    options = parser.parse_args(arguments)
    rank_0 = speaks()
    try:
        framework = Framework(options.framework, options.dtype)
        if options.max_bytes < options.min_bytes:
            raise ValueError("--max-bytes is less than --min-bytes")
        if options.factor == 1 and options.max_bytes != options.min_bytes:
            raise ValueError("--factor 1 never reaches --max-bytes; write 2 or more")
        with open(os.devnull if _to_stdout(options) or not rank_0 else options.json, "w") as file:
            _measure(options, framework, file)
        return 0
    except BrokenPipeError:  # as in "polyhvd bench | head"
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except (ValueError, OSError, InvalidArgumentError, HorovodInternalError) as error:
        if not rank_0:
            return 0
        print(f"polyhvd bench: {error}", file=sys.stderr)
        return _USAGE_STATUS if isinstance(error, ValueError) else 1


def _to_stdout(options: argparse.Namespace) -> bool:
    return options.json in (None, "-")


def _measure(options: argparse.Namespace, framework: Framework, file: Any) -> None:
    polyhvd.init()
    try:
        plan = Plan(
            sizes=_sizes(options),
            redop=options.redop,
            iterations=options.iterations,
            warm_up=options.warm_up,
        )
        speaker = polyhvd.rank() == 0
        table = Table(sys.stdout if speaker and options.json != "-" else None)
        link = limits.link()
        table.head(framework, link)
        for op in options.op:
            table.op(op)
            for row in measure(framework, op, plan):
                table.row(row)
        table.foot()
        if speaker:
            text = json.dumps(table.as_json(framework), indent=1)
            print(text, file=sys.stdout if options.json == "-" else file, flush=True)
    finally:
        polyhvd.shutdown()


def _sizes(options: argparse.Namespace) -> list[int]:
    sizes = [options.min_bytes]
    while options.factor > 1 and sizes[-1] * options.factor <= options.max_bytes:
        sizes.append(sizes[-1] * options.factor)
    return sizes
