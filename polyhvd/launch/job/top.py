"""The ``polyhvd top`` command: the metrics of all ranks of this user's jobs on this host, live."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from polyhvd.launch.job import control, status
from polyhvd.observe.terminal import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["add_options", "main", "page"]

#: Ranks of a job that are shown; ``--json`` has all.
_ROWS_MAX = 64
_JOBS_MAX = 32
#: Ranks without a report that are named.
_NAMED_MAX = 8
#: A report of this age, in seconds and in intervals between reports, shows that the rank is frozen.
_OLD_S, _OLD_INTERVALS = 10.0, 3.0
#: States of slots whose ranks report.
_RUNNING = ("running", "training")
_INVALID = (KeyError, TypeError, ValueError, AttributeError, OverflowError)

#: The title of each column, and how its text is made of a report.
_COLUMNS: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("rank", lambda report: str(int(report["rank"]))),
    ("host", lambda report: printable(str(report["host"]))),
    ("gen", lambda report: str(int(report["generation"]))),
    ("steps", lambda report: _whole(report, "steps_total")),
    ("step", lambda report: _milliseconds(report, "step_seconds")),
    ("own", lambda report: _milliseconds(report, "own_step_seconds")),
    ("wait", lambda report: _percent(_value(report, "wait_ratio"))),
    ("data", lambda report: _percent(_value(report, "data_wait_ratio"))),
    ("bytes/s", lambda report: _bytes(_value(report, "bytes_per_second"))),
    ("cached", lambda report: _cached(report)),
    ("stalls", lambda report: _whole(report, "stalls_total")),
    ("remark", lambda report: _remark(report)),
)


def main(arguments: Sequence[str]) -> int:
    """Run it; returns the exit status: 1 when there is no such job, or none answers."""
    parser = argparse.ArgumentParser(
        prog="polyhvd top",
        description="Show step time, waits, bytes and stalls of every rank of this user's jobs on this host, "
        "until Ctrl-C. If standard output is not a terminal, print them once.",
        epilog="example: polyhvd top --once",
    )
    add_options(parser)
    options = parser.parse_args(arguments)
    if options.once or options.json or not sys.stdout.isatty():
        return _print_once(options)
    try:
        from rich.live import Live
    except ImportError:
        parser.error("needs rich: pip install 'polyhvd[launcher]'; or print once with --once")
    with suppress(KeyboardInterrupt), Live(screen=True, auto_refresh=False) as live:
        while True:
            live.update(_shown(_ask_all(options)), refresh=True)
            time.sleep(options.interval_s)
    return 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--job", type=int, metavar="PID", help="process id of polyhvdrun; default: all jobs on this host")
    add("--once", action="store_true", help="print the metrics once, as text")
    add("--json", action="store_true", help="print a JSON object for each job, once")
    add(
        "--interval-s",
        type=control.limit_s,
        default=2.0,
        metavar="S",
        help="seconds between two updates; default: 2, as often as ranks report",
    )
    add(
        "--timeout-s",
        type=control.limit_s,
        default=5.0,
        metavar="S",
        help="seconds to wait for the answer of a job; default: 5",
    )


def _print_once(options: argparse.Namespace) -> int:
    def ask(job: int) -> None:
        found = status.query(job, options.timeout_s, metrics=True)
        print(json.dumps(found) if options.json else "\n".join(page(job, found, time.time())))

    if options.job is not None or len(jobs := control.jobs(fixed=True)) < 2:
        return control.converse("polyhvd top", options.job, ask, fixed=True)
    # Each job answers or has a line on standard error.
    return max([control.converse("polyhvd top", job, ask, fixed=True) for job in jobs[:_JOBS_MAX]])


def _ask_all(options: argparse.Namespace) -> list[tuple[int, dict[str, Any] | str]]:
    """The answer of each job, or why there is none."""
    found = control.jobs(fixed=True)
    jobs = [job for job in found if options.job in (None, job)][:_JOBS_MAX]

    def ask(job: int) -> tuple[int, dict[str, Any] | str]:
        try:
            return job, status.query(job, options.timeout_s, metrics=True)
        except TimeoutError:
            return job, "no answer in time; is its polyhvdrun stopped?"
        except OSError as error:
            return job, error.strerror or str(error)

    if not jobs:
        return []
    with ThreadPoolExecutor(len(jobs)) as threads:
        return list(threads.map(ask, jobs))


def page(job: int, found: Mapping[str, Any], now: float) -> list[str]:
    """An answer as lines of text.

    Args:
        job: process id of its launcher.
        found: the answer, as of :func:`polyhvd.launch.job.status.query`.
        now: the time by ``time.time()``.

    Raises:
        OSError: the answer is invalid.
    """
    head, rows = _read(job, found, now)
    table = [[title for title, _ in _COLUMNS], *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(_COLUMNS))]
    lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in table]
    return [*head, *(map(str.rstrip, lines) if rows else ["no rank has reported yet"])]


def _read(job: int, found: Mapping[str, Any], now: float) -> tuple[list[str], list[list[str]]]:
    try:
        reports = found["reports"]
        head = [printable(line) for line in status.head(found, now)]
        rows = [[text(report) for _, text in _COLUMNS] for report in reports[:_ROWS_MAX]]
        silent = _silent(found["slots"], reports)
    except _INVALID:
        raise OSError(f"job {job} has sent an invalid answer") from None
    if len(reports) > len(rows):
        head.append(f"{len(reports) - len(rows)} more ranks: --json has all")
    if rows and silent:
        named = ", ".join(map(str, silent[:_NAMED_MAX]))
        more = f", and {len(silent) - _NAMED_MAX} more" if len(silent) > _NAMED_MAX else ""
        head.append(f"no report yet: {'rank' if len(silent) == 1 else 'ranks'} {named}{more}")
    return head, rows


def _silent(slots: Sequence[Mapping[str, Any]], reports: Sequence[Mapping[str, Any]]) -> list[int]:
    """The ranks that run and have not reported."""
    running = {int(slot["rank"]) for slot in slots if slot["state"] in _RUNNING and slot["rank"] is not None}
    return sorted(running - {int(report["rank"]) for report in reports})


def _shown(answers: Sequence[tuple[int, dict[str, Any] | str]]) -> RenderableType:
    """The live page."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = []
    for job, found in answers:
        try:
            if isinstance(found, str):
                raise OSError(found)
            head, rows = _read(job, found, time.time())
        except OSError as error:
            parts.append(Text(f"job {job}: {printable(str(error))}", style="red"))
            continue
        parts += [Text(line, no_wrap=True, overflow="ellipsis") for line in head]
        table = Table(box=None, header_style="bold", pad_edge=False)
        for title, _ in _COLUMNS:
            table.add_column(title, justify="left" if title in ("host", "remark") else "right", no_wrap=True)
        for row in rows:
            table.add_row(*map(Text, row), style="yellow" if row[-1] else None)
        parts += [table if rows else Text("no rank has reported yet"), Text()]
    return Group(
        *(parts or [Text("no job of this user runs on this host")]), Text("Ctrl-C: quit", style="dim")
    )


def _value(report: Mapping[str, Any], name: str) -> float | None:
    value = report["values"].get(name)
    return None if value is None else float(value)


def _whole(report: Mapping[str, Any], name: str) -> str:
    value = _value(report, name)
    return "" if value is None else f"{value:.0f}"


def _milliseconds(report: Mapping[str, Any], name: str) -> str:
    value = _value(report, name)
    return "" if not value else f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.3g} s"


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.0%}"


def _bytes(value: float | None) -> str:
    if value is None:
        return ""
    units = iter(("B", "kB", "MB", "GB"))
    while value >= 1000 and next(units, ""):
        value /= 1000
    return f"{value:.3g} {next(units, 'TB')}"


def _cached(report: Mapping[str, Any]) -> str:
    operations, hits = _value(report, "operations_total"), _value(report, "cache_hits_total")
    return _percent(min(1.0, hits / operations)) if operations and hits is not None else ""


def _remark(report: Mapping[str, Any]) -> str:
    age_s = float(report["age_s"])
    old_s = max(_OLD_S, _OLD_INTERVALS * float(report["interval_s"]))
    parts: Iterator[str] = filter(
        None,
        (
            "slow" if _value(report, "slow") else "",
            f"no report for {age_s:.0f} s" if age_s >= old_s else "",
        ),
    )
    return ", ".join(parts)
