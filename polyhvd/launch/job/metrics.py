"""The metrics of a job's ranks, as they have last reported them, and their page for Prometheus."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from polyhvd.launch.hosts.lists import Host
from polyhvd.runtime.metrics import JOB_METRICS, METRICS, PREFIX

__all__ = ["JobMetrics", "RankReport"]

#: Reports in one answer; a line of an answer has a limit, see control.py.
_REPORTS_MAX = 20
_INVALID = (ValueError, TypeError, AttributeError, IndexError, KeyError, OverflowError, RecursionError)


@dataclass(frozen=True)
class RankReport:
    """The last report of a rank."""

    rank: int
    host: str  #: as a rank sends it, its number
    generation: int
    values: Mapping[str, float]  #: by the names of :data:`polyhvd.runtime.metrics.METRICS`
    at: float  #: when it was received, by ``time.monotonic()``

    @classmethod
    def decoded(cls, data: bytes, at: float) -> RankReport:
        """Read what a rank has sent; raises one of ``_INVALID``."""
        content = json.loads(data)
        found = {metric.name: float(content["values"].get(metric.name, math.nan)) for metric in METRICS}
        values = {name: value for name, value in found.items() if math.isfinite(value)}
        return cls(int(content["rank"]), str(content["host"]), int(content["generation"]), values, at)


class JobMetrics:
    """See the module. Reports are written by the thread of the rendezvous, and read by any thread.

    Args:
        running: numbers of the processes that have not ended. Another thread changes it.
        hosts: of the job; ranks name them by number.
        interval_s: seconds between two reports of a rank.
    """

    def __init__(self, running: Set[int], hosts: Sequence[Host] = (), interval_s: float = 2.0) -> None:
        self._running = running
        self._hosts = hosts
        self._interval_s = interval_s
        self._reports: dict[int, RankReport] = {}  # by number of the process; copied as a whole by readers
        self._started_at = time.time()

    def observe(self, number: int, value: bytes) -> None:
        """Take the report of a process; one that is invalid is ignored."""
        if number not in self._running:
            return
        try:
            report = RankReport.decoded(value, time.monotonic())
            self._reports[number] = replace(report, host=self._hosts[int(report.host)].name)
        except _INVALID:
            return

    def reports(self) -> list[RankReport]:
        """The last report of each process that runs, in the order of ranks."""
        found = [report for number, report in self._reports.copy().items() if number in self._running]
        return sorted(found, key=lambda report: (report.rank, report.generation))

    def answers(self) -> Iterator[dict[str, Any]]:
        """The messages that carry the reports, in parts, for ``polyhvd top``."""
        now = time.monotonic()
        items = [
            {
                "rank": report.rank,
                "host": report.host,
                "generation": report.generation,
                "age_s": round(now - report.at, 3),
                "interval_s": self._interval_s,
                "values": dict(report.values),
            }
            for report in self.reports()
        ]
        for first in range(0, len(items), _REPORTS_MAX):
            yield {"reports": items[first : first + _REPORTS_MAX]}

    def page(self) -> str:
        """All metrics in Prometheus' text format, version 0.0.4."""
        now, found = time.monotonic(), self.reports()
        labels = [
            f'{{rank="{report.rank}",host="{_escaped(report.host)}",generation="{report.generation}"}}'
            for report in found
        ]
        lines: list[str] = []
        for metric in METRICS:
            lines += _head(metric.name, metric.kind, metric.help)
            lines += [
                f"{PREFIX}{metric.name}{label} {report.values[metric.name]!r}"
                for label, report in zip(labels, found, strict=True)
                if metric.name in report.values
            ]
        job = {
            "job_start_time_seconds": self._started_at,
            "job_reporting_ranks": len(found),
            "job_running_processes": len(self._running),
        }
        for name, text in JOB_METRICS.items():
            lines += _head(name, "gauge", text)
            if name in job:
                lines.append(f"{PREFIX}{name} {job[name]!r}")
                continue
            lines += [
                f"{PREFIX}{name}{label} {now - report.at:.3f}"
                for label, report in zip(labels, found, strict=True)
            ]
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP {PREFIX}{name} {text}", f"# TYPE {PREFIX}{name} {kind}"]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
