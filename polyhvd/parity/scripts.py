"""``polyhvd parity --scripts``: a user's own programs as one job, with ``compare`` and ``watch`` in them."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from polyhvd.parity.folders import WorkFolder
from polyhvd.parity.jobs import Job, launcher, run_all
from polyhvd.parity.report import Check, Report
from polyhvd.parity.report.terminal import Progress
from polyhvd.parity.statuses import STATUSES

__all__ = ["run"]

#: In the output of a rank that finds that models do not match, or that others compare something else.
_UNLIKE = "models do not match"
_OTHERS = "the ranks compare different things"
#: For ranks to call init(), from the first to the last one.
_START_S = 120.0
#: In the output of a rank whose model or optimizer cannot be watched or compared.
_REFUSED = "InvalidArgumentError: parity."
#: Where to look, by what parity.compare has found.
_ADVICE = {
    "shape": "Compare the shapes of its inputs. If only the order of the axes differs, pass layout=.",
    "batch": "Compare what the data pipelines return in this step: the batches differ in size.",
    "dtype": "Compute and compare it in one type on all ranks, or convert it before parity.compare.",
    "not finite": "Look at earlier computations: the logarithm of 0, a division by 0, an overflow in a half "
    "type, or a learning rate that is too large.",
    "values": "Compare earlier: call parity.compare on the inputs of this computation, or watch the models "
    "with parity.watch.",
}
#: Steps of a watch whose layers are in the report.
_STEPS_MAX = 200


def run(paths: Sequence[str], ranks: int, timeout_s: float, work: WorkFolder, stream: IO[str]) -> Report:
    """Run programs, and report what they have compared.

    Args:
        paths: of Python programs, each with or without arguments, as in a shell.
        ranks: of each.
        timeout_s: for all of it.
        work: for what is written.
        stream: where to print what programs that have succeeded have printed.
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
    lines = log.read_text().split("\n")[:-1] if log.exists() else []  # a full disk may have cut off the last
    entries = [json.loads(line) for line in lines]
    of_rank = [name for name in names for _ in range(ranks)]
    layers = {entry["name"]: entry["layers"] for entry in entries if entry.get("layers")}
    report = replace(report, checks=_checks(entries, of_rank), layers=layers)
    if job.status == 0:
        for line in job.printed():
            print(line, file=stream)
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
    """One for each name, in the order of the first call; it reports the first difference."""
    found: dict[str, Check] = {}
    for entry in entries:
        first = {} if entry["agree"] else entry["first"]
        if first and "advice" not in first:
            first = first | {"advice": _ADVICE[first["kind"]]}
        check = Check(
            entry["name"],
            "compare",
            entry["agree"],
            first,
            _named(entry["text"], of_rank),
            worst=entry["worst"],
            margin=entry["margin"],
            cells=[entry["cells"]] if entry.get("cells") else [],
            suspicious=entry.get("suspicious", {}),
        )
        before = found.get(entry["name"])
        found[entry["name"]] = check if before is None else _joined(before, check)
    return list(found.values())


def _joined(before: Check, check: Check) -> Check:
    """Combine two calls of one name: the first difference, and the largest of both."""
    worst = dict(before.worst)
    for kind, value in check.worst.items():
        worst[kind] = max(value, worst.get(kind, value))
    margins = [each.margin for each in (before, check) if each.margin is not None]
    return replace(
        check if before.agree else before,
        times=before.times + 1,
        worst=worst,
        margin=max(margins, default=None),
        cells=[*before.cells, *check.cells][:_STEPS_MAX],
        suspicious=before.suspicious or (check.suspicious if before.agree else {}),
    )


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
            f"{report.case}: the programs have compared nothing; call polyhvd.parity.compare in each of them",
        )
    if not_finite := next(filter(None, (entry.get("not_finite") for entry in entries)), ""):
        return _failed(report, "nan", f"{report.case}: {not_finite}")
    count = sum(check.times for check in report.checks)
    return replace(report, message=f"{report.case}: all {count} comparisons agree")


def _ended(report: Report, job: Job, of_rank: Sequence[str]) -> Report:
    """Return the report of programs that failed or exceeded the time limit."""
    launcher_lines, lines = job.launcher_lines(), job.tail(200)
    # The launcher prints the traceback of the rank that failed first again, at the end.
    last = max((place for place, line in enumerate(lines) if line.startswith("polyhvdrun: ")), default=-1)
    shown = lines[last + 1 :] or [line for line in lines if not line.startswith("polyhvdrun: ")]
    outcome = "rank-died"
    reason = launcher_lines[-1] if launcher_lines else f"the launcher has ended with status {job.status}"
    if job.is_late:
        shown = [line for line in lines if not line.startswith("polyhvdrun: ")]
        reason = f"{report.case}: the programs were not ready in time; increase --timeout"
    elif any(_UNLIKE in line for line in lines):
        outcome = "models"
    elif refused := next((line for line in lines if _REFUSED in line), ""):
        outcome, shown = "bad-case", []
        reason = refused.partition("InvalidArgumentError: ")[2]
    elif any(_OTHERS in line for line in lines):
        outcome = "bad-case"
    ranks = ", ".join(f"rank {rank} is {name}" for rank, name in enumerate(of_rank))
    return _failed(
        report, outcome, "\n".join([reason, f"  ({ranks})", *(f"  {line}" for line in shown[-30:])])
    )
