"""``polyhvd parity --scripts``: a user's own programs as one job, with ``compare`` and ``watch`` in them."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from polyhvd.parity.folders import WorkFolder
from polyhvd.parity.jobs import Job, launcher, run_all
from polyhvd.parity.report import Check, Report
from polyhvd.parity.report.terminal import Progress
from polyhvd.parity.statuses import STATUSES

__all__ = ["run"]

#: In what a rank prints when it finds that models are not alike, or that others compare something else.
_UNLIKE = "models are not alike"
_OTHERS = "the ranks compare different things"
#: For ranks to call init(), from the first to the last one.
_START_S = 120.0
_ADVICE = "Compare earlier: call parity.compare on what this was computed from, or parity.watch the models."


def run(paths: Sequence[str], ranks: int, timeout_s: float, work: WorkFolder) -> Report:
    """Run programs, and report what they have compared.

    Args:
        paths: of programs of Python, each of them alone or with arguments, as a shell has them.
        ranks: of each.
        timeout_s: for all of it.
        work: for what is written.
    """
    programs = [_words(path) for path in paths]
    names = [Path(program[0]).name for program in programs]
    report = Report(" : ".join(names), 0, "agree", "", [], ranks=ranks * len(paths))
    for program in programs:
        if not Path(program[0]).is_file():
            return _failed(report, "bad-case", f"{program[0]}: there is no such program")
    log = work.path / "compared"
    words = launcher(ranks, min(timeout_s, _START_S))
    for number, program in enumerate(programs):
        words += [":", "-np", str(ranks)] if number else ["-x", f"POLYHVD_PARITY_LOG={log}"]
        words += [sys.executable, str(Path(program[0]).absolute()), *program[1:]]
    progress = Progress(1)
    try:
        job = Job("scripts", words, work)
        run_all([job], timeout_s, lambda: progress.show(0, f"{_lines(log)} comparisons"))
    finally:
        progress.close()
    entries = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    of_rank = [name for name in names for _ in range(ranks)]
    report = replace(report, checks=_checks(entries, of_rank))
    return _concluded(report, entries, job, of_rank)


def _words(path: str) -> list[str]:
    """A program and its arguments."""
    if Path(path).is_file():
        return [path]
    try:
        return shlex.split(path) or [path]
    except ValueError:  # a quotation mark without its other
        return [path]


def _named(text: str, of_rank: Sequence[str]) -> str:
    """A text about ranks, with the names of their programs."""

    def name(match: re.Match[str]) -> str:
        rank = int(match[1])
        return f"rank {rank} ({of_rank[rank]}, {match[2]})" if rank < len(of_rank) else match[0]

    return re.sub(r"\brank (\d+) \((\w+)\)", name, text)


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _failed(report: Report, outcome: str, message: str) -> Report:
    return replace(report, status=STATUSES[outcome], outcome=outcome, message=message)


def _checks(entries: Sequence[dict[str, Any]], of_rank: Sequence[str]) -> list[Check]:
    """One for each name, in the order of the first call; it tells of the first difference."""
    found: dict[str, Check] = {}
    for entry in entries:
        before = found.get(entry["name"])
        first = {} if entry["agree"] else {**entry["first"], "advice": entry["first"].get("advice", _ADVICE)}
        worst = entry["relative"]
        text = _named(entry["text"], of_rank)
        check = Check(entry["name"], "compare", entry["agree"], first, text, worst={"values": worst})
        if before is not None:
            keeps = before if not before.agree else check
            most = max(before.worst["values"], worst)
            check = replace(keeps, times=before.times + 1, worst={"values": most})
        found[entry["name"]] = check
    return list(found.values())


def _concluded(report: Report, entries: Sequence[dict[str, Any]], job: Job, of_rank: Sequence[str]) -> Report:
    differing = report.differing
    if differing:
        kinds = {check.first.get("kind") for check in differing}
        text = f"{len(differing)} of {len(report.checks)} comparisons differ; {differing[0].text}"
        if "not finite" in kinds:
            return _failed(report, "nan", text)
        if "batch" in kinds:
            return _failed(report, "batches", text)
        return _failed(report, "differ", f"{len(differing)} of {len(report.checks)} comparisons differ")
    if job.status != 0:
        return _ended(report, job, of_rank)
    if not entries:
        return _failed(
            report,
            "bad-case",
            f"{report.case}: the programs have compared nothing; call polyhvd.parity.compare in them",
        )
    count = sum(check.times for check in report.checks)
    return replace(report, message=f"{report.case}: all {count} comparisons agree")


def _ended(report: Report, job: Job, of_rank: Sequence[str]) -> Report:
    """Of programs that have failed, or were late."""
    said, lines = job.said(), job.tail(200)
    # The launcher tells the traceback of who failed first once more, last of all.
    last = max((place for place, line in enumerate(lines) if line.startswith("polyhvdrun: ")), default=-1)
    shown = lines[last + 1 :] or [line for line in lines if not line.startswith("polyhvdrun: ")]
    outcome = "rank-died"
    reason = said[-1] if said else f"the launcher has ended with status {job.status}"
    if job.is_late:
        shown = [line for line in lines if not line.startswith("polyhvdrun: ")]
        reason = f"{report.case}: the programs were not ready in time; raise --timeout"
    elif any(_UNLIKE in line for line in lines):
        outcome = "models"
    elif any(_OTHERS in line for line in lines):
        outcome = "bad-case"
    ranks = ", ".join(f"rank {rank} is {name}" for rank, name in enumerate(of_rank))
    return _failed(
        report, outcome, "\n".join([reason, f"  ({ranks})", *(f"  {line}" for line in shown[-30:])])
    )
