"""The report on a terminal: a table and a progress bar, by rich where that is installed and wanted."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import Any

from polyhvd.installed import is_installed
from polyhvd.parity.report.findings import Check, Report, in_digits

__all__ = ["Progress", "print_report"]

_BAR = 24


class Progress:
    """How far the jobs are, in one line of a terminal; nothing where standard error is none.

    Args:
        total: steps of all of them.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._stream = sys.stderr
        self._shows = self._stream.isatty()
        self._rich: Any = None
        if self._shows and is_installed("rich"):
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as RichProgress

            columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
            self._rich = RichProgress(*columns, console=Console(file=self._stream), transient=True)
            self._task = self._rich.add_task("starting", total=self._total)
            self._rich.start()

    def show(self, done: int, text: str) -> None:
        """Show so many steps, and a text."""
        if self._rich is not None:
            self._rich.update(self._task, completed=done, description=text)
        elif self._shows:
            filled = _BAR * min(done, self._total) // self._total
            line = f"[{'#' * filled}{'.' * (_BAR - filled)}] {text}"
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r{line[:width]:<{width}}")
            self._stream.flush()

    def close(self) -> None:
        """Take the line away."""
        if self._rich is not None:
            self._rich.stop()
        elif self._shows:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write("\r" + " " * width + "\r")
            self._stream.flush()


def print_report(report: Report) -> None:
    """Print the table, where checks part, and what to do.

    Args:
        report: of one case.
    """
    if sys.stdout.isatty() and is_installed("rich"):
        _print_rich(report)
    else:
        _print_plain(report)


def _columns(check: Check) -> tuple[str, ...]:
    worst = in_digits(max(check.worst.values(), default=None))
    result = "agree" if check.agree else "DIFFER"
    if check.question == "compare":
        return check.name, f"{check.times} x", worst, in_digits(check.margin), result
    return check.name, in_digits(check.loss), worst, result


def _heads(report: Report) -> tuple[str, ...]:
    if report.is_of_scripts:
        return "comparison", "compared", "worst", "by its limit", "result"
    return "comparison", "loss", "worst", "result"


def _details(report: Report) -> list[str]:
    lines = []
    for check in report.differing:
        lines += [f"{check.name}:", f"  {check.text}"]
        if advice := check.first.get("advice"):
            lines.append(f"  {advice}")
    for check in report.suspected:
        lines += [f"{check.name}:", f"  {check.suspicious['text']}", f"  {check.suspicious['advice']}"]
    without = [name for name in report.left_out if name not in report.cannot_compute]
    if without:
        lines.append(f"The case has no model for {', '.join(without)}, which was left out.")
    for name, why in report.cannot_compute.items():
        lines.append(f"{name} was left out, as it cannot compute the case in {report.precision}: {why}.")
    return [*lines, report.message]


def _print_plain(report: Report) -> None:
    rows = [_heads(report), *map(_columns, report.checks)]
    if report.checks:
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        for row in rows:
            print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
        print()
    for line in _details(report):
        indent = line[: len(line) - len(line.lstrip())]
        for part in line.splitlines() if "\n" in line else textwrap.wrap(line, 100, subsequent_indent=indent):
            print(part)


def _print_rich(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if report.checks:
        table = Table()
        for head in _heads(report):
            table.add_column(head, overflow="fold")  # a figure that is cut off is a wrong one
        for check in report.checks:
            *texts, result = _columns(check)
            style = "green" if check.agree else "bold red"
            table.add_row(*map(Text, texts), Text(result, style))
        console.print(table)
    for line in _details(report):
        console.print(Text(line))
