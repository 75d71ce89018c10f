"""Makes one trace of the timelines of several ranks, on rank 0's clock."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

__all__ = ["Clock", "Trace", "TraceError", "merge", "read"]

_WINDOW_US = 10e6  # clocks drift apart: each stretch of this length is aligned by itself

Event = dict[str, Any]


class TraceError(ValueError):
    """A file is no timeline of polyhvd, or not of the same job as the others."""


@dataclass
class Trace:
    """One rank's file, read line by line as often as needed."""

    path: Path
    header: dict[str, Any] = field(default_factory=dict)
    dropped: int = 0  # events that the file says are missing

    @property
    def rank(self) -> int:
        """World rank of the process that wrote it."""
        return int(self.header["rank"])

    def events(self) -> Iterator[Event]:
        """All events; of a file without its end, since the process was killed, those that are whole."""
        with self.path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, 1):
                text = line.strip().removesuffix(",")
                if text in ("[", "]", ""):
                    continue
                try:
                    event = json.loads(text)
                except json.JSONDecodeError as error:
                    if line.endswith("\n"):
                        raise TraceError(f"{self.path}:{number}: expected an event a line: {error}") from None
                    return  # cut off in the middle
                if not isinstance(event, dict):
                    raise TraceError(f"{self.path}:{number}: expected an event, found {text[:40]!r}")
                yield event


def read(path: Path) -> Trace:
    """Look at a file's header; raises :class:`TraceError` when polyhvd has not written it."""
    trace = Trace(path)
    for event in trace.events():
        if event.get("name") in ("polyhvd", "polyhvd_end") and event.get("ph") == "M":
            trace.header = event["args"].get("header", trace.header)
            trace.dropped = event["args"]["events_dropped"]
    if "rank" not in trace.header:
        raise TraceError(f"{path}: expected a timeline of polyhvd, found none of its headers")
    return trace


class Clock:
    """How far a rank's clock is ahead of the reference's, over time."""

    def __init__(self, offset_us: float) -> None:
        self._offset_us = offset_us
        self._starts: list[float] = []
        self._offsets: list[float] = []

    @classmethod
    def by_batches(cls, own: dict[int, _Stay], other: dict[int, _Stay], otherwise_us: float) -> Clock:
        """Align by the allreduces that both ran: none is left before all have entered it.

        That bounds the offset from both sides, again and again; see ``tracing.clock_offset``.
        """
        bounds: dict[int, tuple[float, float]] = {}
        for batch in own.keys() & other.keys():
            here, there = own[batch], other[batch]
            window = int(here.entered // _WINDOW_US)
            least, most = bounds.get(window, (-float("inf"), float("inf")))
            bounds[window] = max(least, here.entered - there.left), min(most, here.left - there.entered)
        clock = cls(otherwise_us)
        for window, (least, most) in sorted(bounds.items()):
            clock._starts.append(window * _WINDOW_US)
            clock._offsets.append((least + most) / 2)
        return clock

    def ahead_us(self, time_us: float) -> float:
        """Microseconds to take from a time of this clock."""
        if not self._starts:
            return self._offset_us
        return self._offsets[max(bisect_right(self._starts, time_us) - 1, 0)]


@dataclass(frozen=True)
class _Stay:
    """When a rank entered and left a batch, in microseconds."""

    entered: float
    left: float


def _stays(traces: Sequence[Trace]) -> dict[int, _Stay]:
    found: dict[int, _Stay] = {}
    for trace in traces:
        for event in trace.events():
            if event.get("name") == "ALLREDUCE" and event["args"]["bytes"] and event["args"]["batch"]:
                stay = _Stay(event["ts"], event["ts"] + event["dur"])
                found.setdefault(int(event["args"]["batch"]), stay)
    return found


def _clocks(by_rank: dict[int, list[Trace]]) -> dict[int, Clock]:
    reference = min(by_rank)
    base = by_rank[reference][0].header
    reference_stays: dict[int, _Stay] | None = None
    clocks = {}
    for rank, traces in by_rank.items():
        header = traces[0].header
        if rank == reference or (header["boot"] and header["boot"] == base["boot"]):
            clocks[rank] = Clock(0.0)  # the same clock
            continue
        if reference_stays is None:
            reference_stays = _stays(by_rank[reference])
        measured_us = (header["clock_offset_ns"] - base["clock_offset_ns"]) / 1e3
        clocks[rank] = Clock.by_batches(_stays(traces), reference_stays, measured_us)
    return clocks


class _Rows:
    """Numbers of rows anew: the two files of one rank each have their own."""

    def __init__(self, rank: int, out: TextIO) -> None:
        self._rank = rank
        self._out = out
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self._numbers)
            if name:
                event = {"ph": "M", "name": "thread_name", "pid": self._rank, "tid": self._numbers[name]}
                _write(self._out, {**event, "args": {"name": name}})
        return self._numbers[name]


def _write(out: TextIO, event: Event) -> None:
    out.write(json.dumps(event, separators=(",", ":")) + ",\n")


def _copy(trace: Trace, clock: Clock, rows: _Rows, out: TextIO) -> int:
    names = {0: ""}
    count = 0
    for event in trace.events():
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                names[event["tid"]] = event["args"]["name"]
            continue
        event["pid"] = trace.rank
        event["tid"] = rows.number(names[event["tid"]])
        event["ts"] = round(event["ts"] - clock.ahead_us(event["ts"]), 3)
        _write(out, event)
        count += 1
    return count


def merge(out: Path, files: Sequence[Path]) -> list[str]:
    """Write the events of all files to ``out``, a process for each rank, and return what to tell the user.

    Ranks of rank 0's machine share its clock. Others are aligned by the allreduces that both ranks
    ran, and without any by what ``init()`` has measured.

    Raises:
        TraceError: a file is no timeline, or they are not of one job.
        OSError: a file cannot be read or written.
    """
    if out.resolve() in [path.resolve() for path in files]:
        raise TraceError(f"{out}: cannot be read and written at once; give the merged file another name")
    by_rank: dict[int, list[Trace]] = {}
    for path in files:
        trace = read(path)
        of_rank = by_rank.setdefault(trace.rank, [])
        if of_rank and of_rank[0].header != trace.header:
            raise TraceError(f"{of_rank[0].path} and {path} are of rank {trace.rank} in different jobs")
        of_rank.append(trace)
    clocks = _clocks(by_rank)
    lines = []
    with out.open("w", encoding="utf-8") as file:
        file.write("[\n")
        for rank, traces in sorted(by_rank.items()):
            process = {"ph": "M", "pid": rank, "tid": 0}
            host = traces[0].header["host"]
            _write(file, {**process, "name": "process_name", "args": {"name": f"rank {rank} ({host})"}})
            _write(file, {**process, "name": "process_sort_index", "args": {"sort_index": rank}})
            rows = _Rows(rank, file)
            rows.number("")  # what belongs to the process: row 0
            count = sum(_copy(trace, clocks[rank], rows, file) for trace in traces)
            dropped = max(trace.dropped for trace in traces)
            lines.append(f"rank {rank}: {count} events" + (f"; {dropped} are missing" if dropped else ""))
        file.write('{"ph":"M","name":"polyhvd_merged","pid":0,"tid":0,"args":{}}\n]\n')
    return lines
