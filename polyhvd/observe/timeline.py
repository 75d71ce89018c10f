"""Makes one trace of the timelines of several ranks, on rank 0's clock."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

__all__ = ["Clock", "Trace", "TraceError", "merge", "read"]

_NUMBER_MAX = 1e18
_WINDOW_US = 10e6  # clocks drift apart: each stretch of this length is aligned by itself

Event = dict[str, Any]


class TraceError(ValueError):
    """A file is not a timeline of polyhvd, or not of the same job as the others."""


@dataclass
class Trace:
    """One process's file, read line by line as often as needed."""

    path: Path
    #: Of each world in it, in order: a process of an elastic job is in several.
    headers: list[dict[str, Any]] = field(default_factory=list)
    dropped: int = 0  # number of missing events, as the file has it

    @property
    def header(self) -> dict[str, Any]:
        """That of the first world."""
        return self.headers[0]

    @property
    def process(self) -> int:
        """The number of the process that wrote it in an elastic job, and its rank in others."""
        return int(self.header["rank"] if self.header.get("process") is None else self.header["process"])

    @property
    def name(self) -> str:
        """The name of the process: "rank 2", or "process 3" in an elastic job."""
        return f"{'rank' if self.header.get('process') is None else 'process'} {self.process}"

    @property
    def clock(self) -> tuple[str, int]:
        """Identifies its clock: processes of one machine have the same."""
        boot = str(self.header["boot"])
        return (boot, -1) if boot else ("", self.process)

    def events(self) -> Iterator[Event]:
        """All events; of a file without its end, since the process was killed, those that are whole."""
        with self.path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, 1):
                text = line.strip().removesuffix(",")
                if text in ("[", "]", ""):
                    continue
                try:
                    event = json.loads(text)
                except (ValueError, RecursionError) as error:
                    if line.endswith("\n"):
                        raise TraceError(f"{self.path}:{number}: expected an event a line: {error}") from None
                    return  # cut off in the middle
                if not _is_event(event):
                    raise TraceError(f"{self.path}:{number}: expected an event, found {text[:40]!r}")
                yield event


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= _NUMBER_MAX  # not NaN, and fits a float


def _is_event(event: Any) -> bool:
    """Return whether what is read of an event has the types that polyhvd writes."""
    if not isinstance(event, dict):
        return False
    phase, name, arguments = event.get("ph"), event.get("name"), event.get("args", {})
    if not (isinstance(phase, str) and isinstance(name, str) and isinstance(arguments, dict)):
        return False
    if phase != "M" or name == "ALLREDUCE":
        of_batch = (event.get("dur"), arguments.get("bytes"), arguments.get("batch"))
        numbers = (event.get("ts"), *(of_batch if name == "ALLREDUCE" else ()))
        return type(event.get("tid")) is int and all(map(_is_number, numbers))
    if name == "thread_name":
        return type(event.get("tid")) is int and isinstance(arguments.get("name"), str)
    if name not in ("polyhvd", "polyhvd_end"):
        return True
    has_header = _is_header(arguments.get("header")) if name == "polyhvd" else "header" not in arguments
    return has_header and type(arguments.get("events_dropped")) is int


def _is_header(header: Any) -> bool:
    return (
        isinstance(header, dict)
        and all(type(header.get(key)) is int for key in ("rank", "generation"))
        and _is_number(header.get("clock_offset_ns"))
        and isinstance(header.get("process"), (int, type(None)))
        and all(isinstance(header.get(key), str) for key in ("host", "boot"))
    )


def read(path: Path) -> Trace:
    """Look at a file's headers; raises :class:`TraceError` when polyhvd has not written it."""
    trace = Trace(path)
    for event in trace.events():
        if event["name"] in ("polyhvd", "polyhvd_end") and event["ph"] == "M":
            trace.dropped = event["args"]["events_dropped"]
            if (header := event["args"].get("header")) is not None:
                trace.headers.append(header)
    if not trace.headers:
        raise TraceError(f"{path}: expected a timeline of polyhvd, found none of its headers")
    return trace


class Clock:
    """How far a rank's clock is ahead of the reference's, over time."""

    def __init__(self, offset_us: float) -> None:
        self._offset_us = offset_us
        self._starts: list[float] = []
        self._offsets: list[float] = []

    @classmethod
    def by_batches(cls, own: _Stays, other: _Stays, otherwise_us: float) -> Clock:
        """Align by the allreduces that both ran: no rank leaves one before all have entered it.

        Each of them bounds the offset from both sides; see ``tracing.clock_offset``.
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
    """The times when the last of some ranks entered a batch and the first left it, in microseconds."""

    entered: float
    left: float


#: Of each batch, by the generation of its world and its number in that.
_Stays = dict[tuple[int, int], _Stay]


def _stays(traces: Sequence[Trace]) -> _Stays:
    found: _Stays = {}
    for trace in traces:
        generation = -1
        for event in trace.events():
            if event["ph"] == "M" and event["name"] == "polyhvd":
                generation = event["args"]["header"]["generation"]
                continue
            arguments = event.get("args", {})
            if event["name"] == "ALLREDUCE" and arguments["bytes"] and arguments["batch"]:
                key, end = (generation, int(arguments["batch"])), event["ts"] + event["dur"]
                last = found.get(key, _Stay(-float("inf"), float("inf")))
                found[key] = _Stay(max(last.entered, event["ts"]), min(last.left, end))
    return found


def _measured_us(own: Sequence[Trace], base: Sequence[Trace]) -> float:
    """How far a clock was ahead in the first world that both files have."""
    offsets = {header["generation"]: header["clock_offset_ns"] for trace in base for header in trace.headers}
    for trace in own:
        for header in trace.headers:
            if header["generation"] in offsets:
                return float(header["clock_offset_ns"] - offsets[header["generation"]]) / 1e3
    return 0.0


def _clocks(traces: Sequence[Trace]) -> dict[tuple[str, int], Clock]:
    """Return the clock of each machine, with the first trace's as the reference."""
    by_clock: dict[tuple[str, int], list[Trace]] = {}
    for trace in traces:
        by_clock.setdefault(trace.clock, []).append(trace)
    (reference, base), *others = by_clock.items()
    clocks = {reference: Clock(0.0)}
    reference_stays = _stays(base) if others else {}
    for key, own in others:
        clocks[key] = Clock.by_batches(_stays(own), reference_stays, _measured_us(own, base))
    return clocks


class _Rows:
    """Numbers the rows of a process, whose files have different numbers."""

    def __init__(self, process: int, out: TextIO) -> None:
        self._process = process
        self._out = out
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self._numbers)
            if name:
                event = {"ph": "M", "name": "thread_name", "pid": self._process, "tid": self._numbers[name]}
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
        if event["tid"] not in names:
            raise TraceError(f"{trace.path}: expected an event of a row with a name, found {event['tid']}")
        event["pid"] = trace.process
        event["tid"] = rows.number(names[event["tid"]])
        event["ts"] = round(event["ts"] - clock.ahead_us(event["ts"]), 3)
        _write(out, event)
        count += 1
    return count


def _together(files: Sequence[Path]) -> list[list[Trace]]:
    """The files of each process; raises :class:`TraceError` where they are of different jobs."""
    found: dict[int, list[Trace]] = {}
    sizes: dict[int, tuple[Any, Path]] = {}  # of worlds, by generation
    for path in files:
        trace = read(path)
        for header in trace.headers:
            size, other_path = sizes.setdefault(header["generation"], (header.get("size"), path))
            if header.get("size") != size:
                raise TraceError(
                    f"{path} is of a job of {header.get('size')!r} ranks, {other_path} of one of {size!r}"
                )
        known = found.setdefault(trace.process, [])
        for other in known:
            generations = {header["generation"]: header for header in other.headers}
            same = [
                trace.header.get(key) == other.header.get(key) for key in ("host", "pid", "boot", "process")
            ]
            if not all(same) or any(generations.get(h["generation"], h) != h for h in trace.headers):
                raise TraceError(f"{other.path} and {path} are of {trace.name} in different jobs")
        known.append(trace)
    elastic = {traces[0].header.get("process") is not None: traces[0].path for traces in found.values()}
    if len(elastic) > 1:
        raise TraceError(f"{elastic[True]} is of an elastic job, and {elastic[False]} is not")
    return sorted(found.values(), key=lambda traces: _seniority(traces[0]))


def _seniority(trace: Trace) -> tuple[int, int]:
    return int(trace.header["generation"]), int(trace.header["rank"])


def _title(traces: Sequence[Trace]) -> str:
    """ "rank 2 (host)", or "process 3 (host): rank 2, then 1"."""
    first = traces[0]
    title = f"{first.name} ({first.header['host']})"
    if first.header.get("process") is None:
        return title
    ranks = [header["rank"] for trace in traces for header in trace.headers]
    changes = [str(rank) for i, rank in enumerate(ranks) if i == 0 or rank != ranks[i - 1]]
    return f"{title}: rank {', then '.join(changes)}"


def _is_of_a_rank(path: Path) -> bool:
    with suppress(OSError, TraceError):
        return path.is_file() and any(e["name"] == "polyhvd" for e in islice(Trace(path).events(), 8))
    return False


def merge(out: Path, files: Sequence[Path]) -> list[str]:
    """Write the events of all files to ``out``, a process for each rank, and return lines for the user.

    In an elastic job each process is one, whichever ranks it has had. Ranks of rank 0's machine share its
    clock. Other machines' are aligned by the allreduces that ranks of both ran, and without any by what
    ``init()`` has measured.

    Raises:
        TraceError: a file is not a timeline, or they are not of one job; or ``out`` is a rank's timeline.
        OSError: a file cannot be read or written.
    """
    if _is_of_a_rank(out):
        raise TraceError(
            f"{out}: expected the name of the merged file, found a rank's timeline, which it would overwrite"
        )
    together = _together(files)
    clocks = _clocks([trace for traces in together for trace in traces])
    lines = []
    with out.open("w", encoding="utf-8") as file:
        file.write("[\n")
        for place, traces in enumerate(together):
            number = traces[0].process
            process = {"ph": "M", "pid": number, "tid": 0}
            _write(file, {**process, "name": "process_name", "args": {"name": _title(traces)}})
            _write(file, {**process, "name": "process_sort_index", "args": {"sort_index": place}})
            rows = _Rows(number, file)
            rows.number("")  # what belongs to the process: row 0
            count = sum(_copy(trace, clocks[trace.clock], rows, file) for trace in traces)
            dropped = max(trace.dropped for trace in traces)
            missing = f"; {dropped} are missing" if dropped else ""
            lines.append(f"{traces[0].name}: {count} events{missing}")
        file.write('{"ph":"M","name":"polyhvd_merged","pid":0,"tid":0,"args":{}}\n]\n')
    return lines
