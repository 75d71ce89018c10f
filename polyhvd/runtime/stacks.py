"""Where the threads of this program are, in the form in which Python prints tracebacks."""

from __future__ import annotations

import sys
import sysconfig
import threading
import traceback
from collections.abc import Collection
from itertools import islice
from pathlib import Path
from types import FrameType

__all__ = ["is_library", "stacks"]

_FRAMES_MAX = 64  # of a thread, the innermost
_THREADS_MAX = 64
_ERROR_CHARACTERS_MAX = 200
#: Threads that run no code of the program and wait for no other rank.
_REPORTING = frozenset({"polyhvd-metrics", "polyhvd-ray-metrics", "polyhvd-watch"})
_OWN = str(Path(__file__).parent)
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def stacks(without: Collection[int] = ()) -> str:
    """Write in one line where the main thread is, and then where every thread is.

    ``without`` are idents of threads that are left out, as are threads of polyhvd that only report. The
    first line names the innermost function that belongs to neither Python, an installed package nor
    polyhvd, and the exception that is being handled: a ``with`` block that an exception has left may wait
    for threads that wait for other ranks.
    """
    main = threading.main_thread()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    reporting = [ident for ident, name in names.items() if name in _REPORTING]
    left_out: set[int | None] = {*without, *reporting}
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident not in left_out}
    idents = sorted(frames, key=lambda ident: (ident != main.ident, names.get(ident, "")))
    lines = [_place(frames.get(main.ident or 0)) + _handled(main.ident or 0)]
    for ident in idents[:_THREADS_MAX]:
        lines += [
            f'Thread "{names.get(ident, "not of Python")}" (most recent call last):',
            *_stack(frames[ident]),
        ]
    if len(idents) > _THREADS_MAX:
        lines.append(f"and {len(idents) - _THREADS_MAX} more threads")
    return "\n".join(lines)


def _place(frame: FrameType | None) -> str:
    if not threading.main_thread().is_alive():
        others = [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
        return f"finished but for its threads {', '.join(sorted(others))}" if others else "finished"
    innermost = frame
    while frame is not None and is_library(frame):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return ""
    code = frame.f_code
    return f"in {code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})"


def _handled(ident: int) -> str:
    found = sys._current_exceptions().get(ident)
    error = found[1] if isinstance(found, tuple) else found  # a tuple before Python 3.12
    if error is None:
        return ""
    text = "".join(traceback.format_exception_only(error)).splitlines()[0][:_ERROR_CHARACTERS_MAX]
    return f", which handles {''.join(c if c.isprintable() else ' ' for c in text)}"


def is_library(frame: FrameType) -> bool:
    """Return whether it belongs to Python, an installed package or polyhvd."""
    module = str(frame.f_globals.get("__name__", ""))
    file = frame.f_code.co_filename
    if module.partition(".")[0] == "polyhvd" or file.startswith((_OWN, "<frozen")):
        return True
    return file.startswith(_LIBRARIES)


def _stack(frame: FrameType) -> list[str]:
    inner = list(islice(traceback.walk_stack(frame), _FRAMES_MAX + 1))
    summary = traceback.StackSummary.extract(iter(inner[:_FRAMES_MAX]))
    summary.reverse()
    text = "".join(summary.format()).rstrip("\n").split("\n")
    return (["  ... (outer calls are left out)"] if len(inner) > _FRAMES_MAX else []) + text
