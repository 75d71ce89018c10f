"""Compares the flight recorders of several ranks: which operation some of them ran and others did not."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from polyhvd.observe.files import opener
from polyhvd.observe.terminal import printable

__all__ = ["Dump", "FlightError", "Record", "explain", "latest", "load"]

_FILES = "polyhvd-flight.*.json"
_SHOWN = 4  # operations in a list, and further differences
_NUMBER_MAX = 1 << 64  # fits a float
_RANKS_MAX = 1 << 20
_UNIX_S_MAX = 1 << 36  # fits a date
_T = TypeVar("_T", int, str)


class FlightError(ValueError):
    """A file is not a flight dump, or not of the same job as the others."""


@dataclass(frozen=True)
class Record:
    """One operation of one rank."""

    sequence: int
    state: str
    kind: str
    name: str
    process_set: int
    batch: int  # 0: not agreed
    submitted_ns: int

    @property
    def key(self) -> tuple[int, str, str]:
        """The key by which ranks match operations."""
        return self.process_set, self.kind, self.name

    @property
    def pending(self) -> bool:
        """Whether the other members have not agreed to it, as far as this rank knows."""
        return self.batch == 0 and self.state in ("submitted", "announced", "failed")


@dataclass(frozen=True)
class Dump:
    """The records of one rank."""

    path: Path
    rank: int
    size: int
    pid: int
    host: str
    reason: str
    now_ns: int
    unix_s: int
    job: str  # empty: of a version that did not write it
    generation: int  # of the rank's world: numbers of ranks and batches mean something only within one
    records: tuple[Record, ...]

    @property
    def last_done(self) -> Record | None:
        """The last operation in the total order that this rank has finished."""
        done = [record for record in self.records if record.batch and record.state == "done"]
        return max(done, key=lambda record: record.batch, default=None)

    @cached_property
    def first_known(self) -> int:
        """Number of the first batch that the ring cannot have lost."""
        if self.records and self.records[0].sequence == 1:
            return 1
        return min((record.batch for record in self.records if record.batch), default=0)

    @cached_property
    def last_runs(self) -> dict[tuple[int, str, str], int]:
        """The last batch with each operation, by its key; 0 when the ring knows none."""
        found: dict[tuple[int, str, str], int] = {}
        for record in self.records:
            found[record.key] = max(record.batch, found.get(record.key, 0))
        return found

    @cached_property
    def batches_before(self) -> dict[int, int]:
        """The last batch among the operations before each one, by its sequence number."""
        found: dict[int, int] = {}
        last = 0
        for record in sorted(self.records, key=lambda record: record.sequence):
            found.setdefault(record.sequence, last)
            last = max(last, record.batch)
        return found


def _taken(fields: Any, name: str, kind: type[_T]) -> _T:
    """A field of this type; raises ValueError."""
    if not isinstance(fields, dict):
        raise ValueError(f"{str(fields)[:40]!r} in the place of an object")
    if name not in fields:
        raise ValueError(f"no {name!r}")
    value = fields[name]
    if type(value) is not kind or (isinstance(value, int) and abs(value) > _NUMBER_MAX):
        raise ValueError(f"{str(value)[:40]!r} in the place of {name!r}")
    return value


def _record(fields: Any) -> Record:
    return Record(
        sequence=_taken(fields, "sequence", int),
        state=_taken(fields, "state", str),
        kind=_taken(fields, "kind", str),
        name=_taken(fields, "name", str),
        process_set=_taken(fields, "process_set", int),
        batch=_taken({"batch": 0, **fields}, "batch", int),
        submitted_ns=_taken({"submitted_ns": 0, **fields}, "submitted_ns", int),
    )


def _read(path: Path) -> Dump:
    # Not splitlines(), which also divides at separators that a name may hold.
    with open(path, encoding="utf-8", errors="replace", opener=opener) as file:
        lines = [line for line in file.read().split("\n") if line]
    try:
        if not lines:
            raise ValueError("an empty file")
        first = json.loads(lines[0])
        header: Any = first.get("flight") if isinstance(first, dict) else None
        dump = Dump(
            path=path,
            rank=_taken(first, "rank", int),
            size=_taken(header, "size", int),
            pid=_taken(first, "pid", int),
            host=_taken(header, "host", str),
            reason=_taken(first, "reason", str),
            now_ns=_taken(first, "now_ns", int),
            unix_s=_taken(first, "unix_s", int),
            job=_taken({"job": "", **header}, "job", str),
            generation=_taken({"generation": 1, **header}, "generation", int),
            records=tuple(_record(json.loads(line)) for line in lines[1:]),
        )
        count = _taken({"records": len(dump.records), **first}, "records", int)
        if not 0 <= dump.rank < dump.size <= _RANKS_MAX:
            raise ValueError(f"rank {dump.rank} of {dump.size}")
        if not 0 <= dump.unix_s < _UNIX_S_MAX:
            raise ValueError(f"{dump.unix_s} in the place of 'unix_s'")
        if len(dump.records) != count:
            raise ValueError(f"{len(dump.records)} of {count} operations: it was cut off")
        return dump
    except (ValueError, RecursionError) as error:
        raise FlightError(f"{path}: expected a flight dump of polyhvd, found {error}") from None


def load(files: Iterable[Path]) -> list[Dump]:
    """Read dumps, the newest of each rank of each world of each job; of a folder, all that lie in it.

    Raises:
        FlightError: a file is not a dump, or two of one job and generation are of worlds of different sizes.
        OSError: a file cannot be read.
    """
    newest: dict[tuple[str, int, int], Dump] = {}
    for dump in map(_read, _listed(files)):
        key = dump.job, dump.generation, dump.rank
        if key not in newest or dump.unix_s > newest[key].unix_s:
            newest[key] = dump
    dumps = [dump for _, dump in sorted(newest.items())]
    for other, dump in pairwise(dumps):
        is_same_world = (dump.job, dump.generation) == (other.job, other.generation)
        if is_same_world and dump.size != other.size:
            raise FlightError(
                f"{dump.path} is of a job of {dump.size} ranks, {other.path} of one of {other.size}"
            )
    return dumps


def latest(place: str) -> tuple[list[Path], str]:
    """The files of the job on this host that has written files last, and a line that describes it.

    Args:
        place: the folder for files that the settings name, or the system's for temporary files.

    Raises:
        FlightError: there are no files of this user.
    """
    root = Path(place)
    files: dict[float, list[Path]] = {}  # by the time of the newest
    for folder in [root, *root.glob(f"polyhvd-flight-{os.geteuid()}*/*/")]:
        own = [path for path in folder.glob(_FILES) if _is_own(path)]
        if own:
            files[max(path.lstat().st_mtime for path in own)] = own
    if not files:
        raise FlightError(
            f"no job of this user has written files to {root} on this host. Ranks write them when the job "
            "fails or stalls, and on SIGUSR2. If POLYHVD_FLIGHT_DIR or TMPDIR of the job was another folder, "
            "use: polyhvd flight FOLDER"
        )
    written, own = max(files.items())
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written))
    return own, f"These are the latest files on this host, written at {at}: {printable(str(own[0].parent))}"


def _is_own(path: Path) -> bool:
    status = path.lstat()
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _listed(files: Iterable[Path]) -> Iterator[Path]:
    for path in files:
        if not path.is_dir():
            yield path
            continue
        found = sorted(path.glob(_FILES))
        if not found:
            raise FlightError(f"{path}: there is no {_FILES} in this folder")
        yield from found


def explain(dumps: Sequence[Dump]) -> list[str]:
    """Return the differences between the ranks, then the position of each rank, as lines of text.

    Args:
        dumps: each job's are compared separately, the latest last. Of an elastic job, those of the world that
            has written last are compared.
    """
    jobs: dict[str, list[Dump]] = {}
    for dump in dumps:
        jobs.setdefault(dump.job, []).append(dump)
    if len(jobs) == 1:
        return _of_a_job(dumps)
    lines = [f"The files are of {len(jobs)} jobs, which are compared separately. The latest is last."]
    for written_s, job in sorted((max(dump.unix_s for dump in own), job) for job, own in jobs.items()):
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written_s))
        name = printable(job) or "a job without a name"
        lines += ["", f"{name}, files written at {at}:", *_of_a_job(jobs[job])]
    return lines


def _of_a_job(dumps: Sequence[Dump]) -> list[str]:
    last = max(dumps, key=lambda dump: (dump.unix_s, dump.generation)).generation
    others = [dump for dump in dumps if dump.generation != last]
    dumps = [dump for dump in dumps if dump.generation == last]
    lines = _reasons(dumps) + _conclusion(dumps) + [""] + [_where(dump) for dump in dumps]
    missing = sorted(set(range(dumps[0].size)) - {dump.rank for dump in dumps})
    if missing:
        why = "a rank writes none if it waits for no other, has finished or was killed"
        lines.append(f"{_ranks(missing)}: no file; {why}")
    apart_s = max(dump.unix_s for dump in dumps) - min(dump.unix_s for dump in dumps)
    if apart_s > 1:
        lines.append(f"The files were written {apart_s} s apart: some ranks may have continued meanwhile.")
    if others:
        lines.append(
            f"Only files of generation {last} of the job were compared. Those of other generations: "
            f"{_shortened([printable(str(dump.path)) for dump in others])}"
        )
    return lines


def _reasons(dumps: Sequence[Dump]) -> list[str]:
    by_reason: dict[str, list[int]] = {}
    for dump in dumps:
        by_reason.setdefault(printable(dump.reason), []).append(dump.rank)
    return [f"Written by {_ranks(ranks)} because: {reason}" for reason, ranks in by_reason.items()]


def _conclusion(dumps: Sequence[Dump]) -> list[str]:
    differences = _unfinished(dumps) + _not_submitted(dumps)
    if not differences:
        return ["The ranks ran the same operations, and wait for none that other ranks have not submitted."]
    lines = ["The first difference:", f"  {differences[0]}"]
    if len(differences) > 1:
        lines += ["After it:", *(f"  {text}" for text in differences[1 : _SHOWN + 1])]
    if len(differences) > _SHOWN + 1:
        lines.append(f"  and {len(differences) - _SHOWN - 1} more")
    return lines


def _where(dump: Dump) -> str:
    last = dump.last_done
    text = f"rank {dump.rank} (pid {dump.pid} on {printable(dump.host)}): "
    text += f"completed batch {last.batch}, {_name(last.key)}" if last else "completed nothing"
    pending = [
        f"{_name(record.key)} ({printable(record.state)}, {(dump.now_ns - record.submitted_ns) / 1e9:.1f} s)"
        for record in dump.records
        if record.state not in ("done", "refused")
    ]
    return text + "; in flight: " + (_shortened(pending) or "nothing")


def _shortened(items: Sequence[str]) -> str:
    more = [f"{len(items) - _SHOWN} more"] if len(items) > _SHOWN else []
    return ", ".join([*items[:_SHOWN], *more])


def _unfinished(dumps: Sequence[Dump]) -> list[str]:
    """Agreed operations that some members have finished and others have not."""
    batches: dict[int, dict[int, Record]] = {}
    for dump in dumps:
        for record in dump.records:
            if record.batch:
                batches.setdefault(record.batch, {}).setdefault(dump.rank, record)
    found = []
    members_of = _members(dumps)
    for batch, by_rank in sorted(batches.items()):
        record = next(iter(by_rank.values()))
        members = members_of[record.process_set]
        done = [rank for rank, own in by_rank.items() if own.state == "done"]
        states: dict[str, list[int]] = {}
        for dump in dumps:
            if dump.rank not in members or dump.rank in done or batch < dump.first_known:
                continue
            state = by_rank[dump.rank].state if dump.rank in by_rank else "not reached"
            states.setdefault(state, []).append(dump.rank)
        if done and states:
            others = "; ".join(f"{_ranks(ranks)}: {printable(state)}" for state, ranks in states.items())
            found.append(f"batch {batch}, {_name(record.key)}: {_ranks(done)} finished it; {others}")
    return found


def _not_submitted(dumps: Sequence[Dump]) -> list[str]:
    """Operations that some members wait for and others have not submitted."""
    waiting: dict[tuple[int, str, str], dict[int, Record]] = {}
    for dump in dumps:
        for record in dump.records:
            if record.pending:
                waiting.setdefault(record.key, {}).setdefault(dump.rank, record)
    by_rank = {dump.rank: dump for dump in dumps}
    members_of = _members(dumps)
    found = []
    for key, asked in waiting.items():
        absent = sorted(members_of[key[0]] - asked.keys())
        if not absent and len(by_rank) == dumps[0].size:
            continue
        sides = [f"submitted by {_ranks(asked)}"]
        last_runs: dict[int, list[int]] = {}
        for rank in absent:
            last_runs.setdefault(by_rank[rank].last_runs.get(key, 0), []).append(rank)
        for last_run, ranks in last_runs.items():
            before = f"last ran it in batch {last_run}" if last_run else "never ran it"
            sides.append(f"not by {_ranks(ranks)}, which {before}")
        if not absent:
            sides.append("nothing is known about ranks without a file")
        # What was due first: after the fewest batches, and in the order of the last time.
        after = min(by_rank[rank].batches_before[record.sequence] for rank, record in asked.items())
        last_time = max(dump.last_runs.get(key, 0) for dump in dumps)
        submitted = min(record.submitted_ns for record in asked.values())
        due = (after, last_time == 0, last_time, submitted)
        found.append((due, f"{_name(key)}: {'; '.join(sides)}"))
    return [text for _, text in sorted(found)]


def _members(dumps: Sequence[Dump]) -> dict[int, set[int]]:
    """Known ranks of each process set: those that have used it are members."""
    found = {0: {dump.rank for dump in dumps}}
    for dump in dumps:
        for process_set in {record.process_set for record in dump.records}:
            found.setdefault(process_set, set()).add(dump.rank)
    return found


def _name(key: tuple[int, str, str]) -> str:
    process_set, kind, name = key
    return printable(f"{kind} '{name}'") + (f" of process set {process_set}" if process_set else "")


def _ranks(ranks: Iterable[int]) -> str:
    ordered = sorted(ranks)
    return ("rank " if len(ordered) == 1 else "ranks ") + ", ".join(map(str, ordered))
