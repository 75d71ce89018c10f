"""``polyhvd parity --scripts``: a user's own programs as one job, with ``compare`` and ``watch`` in them."""

from __future__ import annotations

import json
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

#: In what a rank prints when it finds that models are not alike.
_UNLIKE = "models are not alike"
_ADVICE = "Compare earlier: call parity.compare on what this was computed from, or parity.watch the models."


def run(paths: Sequence[str], ranks: int, timeout_s: float, work: WorkFolder) -> Report:
    """Run programs, and report what they have compared.

    Args:
        paths: of programs of Python.
        ranks: of each.
        timeout_s: for all of it.
        work: for what is written.
    """
    name = " : ".join(Path(path).name for path in paths)
    report = Report(name, 0, "agree", "", [], ranks=ranks * len(paths))
    for path in paths:
        if not Path(path).is_file():
            return _failed(report, "bad-case", f"{path}: there is no such program")
    log = work.path / "compared"
    words = launcher(ranks, timeout_s)
    for number, path in enumerate(paths):
        words += [":", "-np", str(ranks)] if number else ["-x", f"POLYHVD_PARITY_LOG={log}"]
        words += [sys.executable, str(Path(path).absolute())]
    progress = Progress(1)
    try:
        job = Job("scripts", words, work)
        run_all([job], timeout_s, lambda: progress.show(0, f"{_lines(log)} comparisons"))
    finally:
        progress.close()
    entries = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    report = replace(report, checks=_checks(entries))
    return _concluded(report, entries, job)


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _failed(report: Report, outcome: str, message: str) -> Report:
    return replace(report, status=STATUSES[outcome], outcome=outcome, message=message)


def _checks(entries: Sequence[dict[str, Any]]) -> list[Check]:
    """One for each name, in the order of the first call; it tells of the first difference."""
    found: dict[str, Check] = {}
    for entry in entries:
        before = found.get(entry["name"])
        first = {} if entry["agree"] else {**entry["first"], "advice": entry["first"].get("advice", _ADVICE)}
        worst = entry["relative"]
        check = Check(entry["name"], "compare", entry["agree"], first, entry["text"], worst={"values": worst})
        if before is not None:
            keeps = before if not before.agree else check
            most = max(before.worst["values"], worst)
            check = replace(keeps, times=before.times + 1, worst={"values": most})
        found[entry["name"]] = check
    return list(found.values())


def _concluded(report: Report, entries: Sequence[dict[str, Any]], job: Job) -> Report:
    differing = report.differing
    if differing:
        kinds = {check.first.get("kind") for check in differing}
        text = f"{len(differing)} of {len(report.checks)} comparisons differ; {differing[0].text}"
        if "not finite" in kinds:
            return _failed(report, "nan", text)
        if "batch" in kinds:
            return _failed(report, "batches", text)
        return _failed(report, "differ", f"{len(differing)} of {len(report.checks)} comparisons differ")
    said, tail = job.said(), job.tail(30)
    if job.status != 0:
        outcome = "models" if any(_UNLIKE in line for line in tail) else "rank-died"
        reason = said[-1] if said else f"the launcher has ended with status {job.status}"
        if job.is_late:
            reason = f"{report.case}: the programs were not ready in time; raise --timeout"
        return _failed(report, outcome, "\n".join([reason, *(f"  {line}" for line in tail)]))
    if not entries:
        return _failed(
            report,
            "bad-case",
            f"{report.case}: the programs have compared nothing; call polyhvd.parity.compare in them",
        )
    count = sum(check.times for check in report.checks)
    return replace(report, message=f"{report.case}: all {count} comparisons agree")
