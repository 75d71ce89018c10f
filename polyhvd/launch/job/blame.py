"""Finds the rank that a failed job is to be blamed on. Pure.

When one rank dies the others soon fail too, because they lost it. The first exit that the launcher
sees need not be the cause: what counts is how each rank ended.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = [
    "CONSEQUENCES",
    "Ending",
    "describe",
    "exit_status",
    "first_cause",
    "had_failed",
    "others",
    "traceback_lines",
    "trim",
]

_OTHERS_MAX = 8
_SAME_MAX = 16
_ERROR_CHARACTERS_MAX = 300
_ERROR_LINES_MAX = 3  # of one that ends a program, where nothing may follow it
_TRACEBACK = b"Traceback (most recent call last)"
#: In place of a traceback, what polyhvd.launch.uncaught has printed of an error of init().
_LINE = re.compile(rb"\S.*:\d+: (polyhvd\.(config|errors)\.)?\w+Error: ")
#: What polyhvd logs, errors apart (see polyhvd/log.py): by a thread, also in the midst of a traceback's line.
_LOGGED = re.compile(
    rb"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} )?polyhvd rank \d+ (generation \d+ )?"
    rb"(TRACE|DEBUG|INFO|WARNING): [^\n]*(\n|$)"
)
#: The line of an exception, among others that are not indented.
_EXCEPTION = re.compile(rb"(\w+\.)*[A-Z_]\w*[a-z]\w*(: |$)")
#: Between the tracebacks of an exception and of what it has led to.
_CHAINED = (b"During handling of the above exception", b"The above exception was the direct cause")
#: Precedes exceptions that Python prints and ignores: in destructors, and in functions of atexit.
_GONE_ON = (b"Exception ignored ", b"Error in atexit.")
#: What a rank whose error another rank prints with its traceback writes around that error.
_BRIEF = re.compile(rb"^\S.*:\d+: (?=polyhvd\.errors\.)| \(rank \d+ prints the traceback; [^()]*\)$")
#: A rank that ends with one of these suffered from another one: is_consequence in the table of
#: csrc/control/error.h, which the launcher does not load.
CONSEQUENCES = (
    "HorovodInternalError",
    "PeerDepartedError",
    "PeerLostError",
    "ShutdownError",
    "TransferTimeoutError",
)
_VICTIM = re.compile(rf"\b({'|'.join(CONSEQUENCES)})\b".encode())


@dataclass
class Ending:
    """How a rank ended by itself, before the launcher sent any signal."""

    rank: int
    host: str
    status: int  # negative: the signal that killed it
    tail: Sequence[bytes] = field(default=())  # the last lines on its standard error
    reason: str = ""  # the launcher's explanation, if there is no exit status
    #: Errors that other ranks have caused on this one, as its engine has reported them by itself.
    suffered: Sequence[bytes] = field(default=())
    what: str = "rank"  # "process" in an elastic job, where ranks change
    progress: bytes = b""  # of an elastic job's functions, see polyhvd/elastic/limits.py
    remark: str = ""  # on its status

    @property
    def failed(self) -> bool:
        """Whether it did not end in good order."""
        return self.status != 0 or bool(self.reason)

    @property
    def unstartable(self) -> bool:
        """Whether it never began, so that starting it again would be the same."""
        return self.reason.startswith("was not started")

    @property
    def certainty(self) -> int:
        """0: killed from outside or crashed; 1: failed; 2: failed because it lost another rank."""
        if self.status < 0 or self.reason:
            return 0
        if any(_VICTIM.search(line) for line in _last_error(self.tail)):
            return 2
        # A framework's class hides ours, and its text is around ours; but ours is in it.
        words = b" ".join(b" ".join(traceback_lines(self.tail)).split())
        return 2 if any(b" ".join(message.split()) in words for message in self.suffered) else 1


def first_cause(endings: Sequence[Ending]) -> Ending:
    """The failure that explains the others; among equals the earliest that has printed something, if any.

    ``endings`` in their order.
    """

    def order(ending: Ending) -> tuple[int, bool, bool]:
        failed = ending.certainty == 1
        return ending.certainty, failed and _is_mute(ending), failed and _is_brief(ending)

    return min(endings, key=order)


def _is_mute(ending: Ending) -> bool:
    """Return whether it has ended as Python does after an exception, but without a word."""
    return ending.status == 1 and not any(line.strip() for line in _of_the_end(ending.tail))


def had_failed(ending: Ending) -> bool:
    """Return whether a rank that was requested to end had failed before: it had printed a traceback.

    A framework takes a while to shut down, so ranks that lost this one may end before it.
    """
    lines = [line for line in _of_the_end(ending.tail) if line]
    starts = _starts(lines)
    error = [line for line in _below(lines, starts[-1]) if line[:1] != b" "] if starts else []
    return 0 < len(error) <= _ERROR_LINES_MAX and ending.certainty == 1


def describe(ending: Ending) -> str:
    """One line: which rank, where, and what happened to it."""
    return f"{_event(ending)} ({ending.remark})" if ending.remark else _event(ending)


def _event(ending: Ending) -> str:
    name = f"{ending.what} {ending.rank} on {ending.host}"
    if ending.reason:
        return f"{name} {ending.reason}"
    if ending.status < 0:
        return f"{name} was killed by {_signal_name(-ending.status)}"
    return f"{name} exited with status {ending.status}"


def exit_status(ending: Ending) -> int:
    """The exit status of the whole job, as a shell would put it."""
    return 128 - ending.status if ending.status < 0 else ending.status


def others(endings: Sequence[Ending], cause: Ending) -> list[str]:
    """One line for each rank that has failed besides the cause, a few at most; no line repeats the cause."""
    lines = []
    same = []
    for ending in endings:
        if ending is cause or (ending.reason and ending.reason == cause.reason):
            continue
        error = _error(ending)
        is_alike = not ending.reason and 0 < ending.status == cause.status
        if error and is_alike and _BRIEF.sub(b"", error) == _BRIEF.sub(b"", _error(cause)):
            same.append(ending)
        else:
            lines.append(f"{describe(ending)}: {_error_line(ending)}" if error else describe(ending))
    if len(lines) > _OTHERS_MAX + 1:
        lines[_OTHERS_MAX:] = [f"{len(lines) - _OTHERS_MAX} more ranks failed"]
    if same:
        noun = cause.what if len(same) == 1 else f"{cause.what}{'es' if cause.what == 'process' else 's'}"
        listed = ", ".join(
            str(ending.rank) for ending in sorted(same, key=lambda ending: ending.rank)[:_SAME_MAX]
        )
        more = f" and {len(same) - _SAME_MAX} more" if len(same) > _SAME_MAX else ""
        lines.append(f"{noun} {listed}{more} exited with status {cause.status}: the same error")
    return lines


def traceback_lines(tail: Sequence[bytes]) -> list[bytes]:
    """A rank's last words: its last traceback, with those that led to it, or the last few lines."""
    tail = _of_the_end(tail)
    starts = _starts(tail)
    if not starts:
        return list(tail[-20:])
    while len(starts) > 1 and any(line.startswith(_CHAINED) for line in tail[starts[-2] : starts[-1]]):
        starts.pop()
    return list(tail[starts[-1] :])


def _of_the_end(tail: Sequence[bytes]) -> Sequence[bytes]:
    """The lines without polyhvd's log; and without exceptions that ended nothing, if there are others."""
    tail = _LOGGED.sub(b"", b"\n".join(tail)).split(b"\n") if any(map(_LOGGED.search, tail)) else tail
    kept = []
    part = ""  # of such an exception: where the line before was
    for line in tail:
        if line.startswith(_GONE_ON):
            part = "heading"
        elif part == "heading":
            part = "stack" if line.startswith(_TRACEBACK) else "error"
        elif part == "stack":
            part = "stack" if line.startswith(b" ") else "error"
        elif part and line.startswith(_CHAINED):
            part = "chained"
        elif part == "chained" and line.startswith(_TRACEBACK):
            part = "stack"
        elif line:
            part = ""
        if not part:
            kept.append(line)
    return kept if any(line.strip() for line in kept) else tail


def _starts(lines: Sequence[bytes]) -> list[int]:
    """Return the indices of lines at which a traceback begins, or that replace one."""
    return [i for i, line in enumerate(lines) if line.startswith(_TRACEBACK) or _LINE.match(line)]


def _below(lines: Sequence[bytes], start: int) -> Sequence[bytes]:
    """The text after the heading of a traceback; a text that stands for one has no heading."""
    return lines[start + (not _LINE.match(lines[start])) :]


def _last_error(tail: Sequence[bytes]) -> list[bytes]:
    """The lines that name the exception: below the stack of the last traceback, which is indented."""
    tail = _of_the_end(tail)
    starts = _starts(tail)
    lines = _below(tail, starts[-1]) if starts else tail[-20:]
    return [line for line in lines if line[:1] not in (b" ", b"")]


def _is_brief(ending: Ending) -> bool:
    """Return whether another rank prints the traceback of its error, see polyhvd.launch.uncaught."""
    return b" prints the traceback; " in _error(ending)


def _error_line(ending: Ending) -> str:
    text = _error(ending).decode("utf-8", "surrogateescape")
    return text if len(text) <= _ERROR_CHARACTERS_MAX else f"{text[:_ERROR_CHARACTERS_MAX]} ..."


def _error(ending: Ending) -> bytes:
    """The exception of the last traceback; else what the rank's engine has reported; else the last line."""
    named = _last_error(ending.tail)
    in_traceback = bool(_starts(_of_the_end(ending.tail)))
    found = None
    if in_traceback:
        found = next((line for line in named if _EXCEPTION.match(line) or _LINE.match(line)), None)
    if found is None:
        likely = named[:1] if in_traceback else named[-1:]
        found = next(iter([*ending.suffered, *likely]), b"")
    return found.strip()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def trim(lines: Sequence[bytes]) -> list[bytes]:
    """Without empty lines at the end, so that the error itself is the last thing that is seen."""
    kept = list(lines)
    while kept and not kept[-1].strip():
        kept.pop()
    return kept
