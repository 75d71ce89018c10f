"""The ``polyhvd leave`` command: makes ranks or hosts leave a running elastic job, without a loss."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from polyhvd.launch.job import control
from polyhvd.observe.terminal import printable

__all__ = ["add_options", "main"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser of this command or of a subcommand."""
    add = parser.add_argument
    add(
        "--job",
        type=int,
        metavar="PID",
        help="process id of polyhvdrun; default: that of the only job on this host",
    )
    add(
        "--host",
        action="append",
        default=[],
        metavar="HOST",
        help="remove all ranks of a host, and do not use it again",
    )
    add("--rank", type=int, action="append", default=[], metavar="N", help="current rank")
    add(
        "--process",
        type=int,
        action="append",
        default=[],
        metavar="N",
        help="process number, as in the prefix [N] of its output",
    )
    add(
        "--timeout-s",
        type=control.limit_s,
        default=600.0,
        metavar="S",
        help="seconds to wait for them; default: 600",
    )
    add("--no-wait", action="store_true", help="return when the job has received the request")


def main(arguments: Sequence[str]) -> int:
    """Run it; returns the exit status: 1 when no rank leaves, or the job has ended meanwhile."""
    parser = argparse.ArgumentParser(
        prog="polyhvd leave",
        description="Have ranks or hosts leave an elastic job at its next commit, without a loss. "
        "Runs on the launcher's host, and returns when they have left.",
        epilog="example: polyhvd leave --host algo-2",
    )
    add_options(parser)
    options = parser.parse_args(arguments)
    if not (options.host or options.rank or options.process):
        parser.error("name what leaves: --host, --rank or --process")
    return control.converse("polyhvd leave", options.job, lambda job: _ask(job, options))


def _ask(job: int, options: argparse.Namespace) -> None:
    begun = time.monotonic()
    reply: dict[str, Any] = {}

    def on_reply(content: dict[str, Any]) -> None:
        reply.update(content)
        leaving = content.get("leaving", ())
        for line in leaving if isinstance(leaving, list) else ():
            print(f"{printable(str(line))} leaves", flush=True)

    content = {"hosts": options.host, "ranks": options.rank, "processes": options.process}
    control.request(job, {**content, "wait": not options.no_wait}, on_reply, options.timeout_s)
    if "error" in reply:
        raise OSError(str(reply["error"]))
    if options.no_wait:
        return
    if not reply.get("left"):
        raise OSError(f"job {job} has ended meanwhile")
    print(f"left after {time.monotonic() - begun:.2f} s")
