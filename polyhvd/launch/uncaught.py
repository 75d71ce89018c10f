"""Uncaught errors: how they are printed, and the text that other ranks receive.

An error of ``init()`` that ends the program is printed as one line, with the caller's place. The exception
itself is an ordinary one, with its whole traceback, for whoever catches it: programs, notebooks, debuggers,
pytest. Only what Python would print as the program ends is shortened: the frames between the caller's line
and the message are polyhvd's. Other errors of polyhvd are printed with their traceback, which ends at the
caller's line. A hook of another library stays.

Python keeps the exception that has ended the main thread. It does not keep the argument of ``SystemExit``,
nor the exception of another thread: :func:`watch_ends` records these.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from opcode import opname
from types import CodeType, FrameType, TracebackType
from typing import NoReturn

from polyhvd import _core
from polyhvd.config import ConfigError
from polyhvd.errors import (
    DataError,
    HorovodInternalError,
    InvalidArgumentError,
    NotInitializedError,
    RankMismatchError,
    ShutdownError,
)
from polyhvd.observe.terminal import printable
from polyhvd.runtime import current
from polyhvd.runtime.stacks import is_library

__all__ = [
    "has_failed",
    "last_words",
    "shorten",
    "watch_child",
    "watch_ends",
    "words_of_failure",
    "words_of_threads",
]

_LOG = logging.getLogger("polyhvd")
_MARK = "_polyhvd_raised_by"
_MESSAGE_CHARACTERS_MAX = 4096  # that are looked at
_WORDS_BYTES_MAX = 360
_NAME_CHARACTERS_MAX = 100  # of a file
_THREAD_CHARACTERS_MAX = 30
#: In the message of a mismatch: each rank, or the first one of several with the same arguments.
_RANKS = re.compile(r"\branks? (\d+)")
_ESCAPE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\^_])")


def shorten(error: Exception, entered: CodeType) -> None:
    """Have ``error`` printed as one line if it ends the program.

    Errors that are not about what the caller or the environment says are left as they are: those are faults
    of polyhvd, and need their traceback.

    Args:
        error: that a public function is about to raise.
        entered: the code of that function.
    """
    clear = (ConfigError, InvalidArgumentError, HorovodInternalError)
    if not isinstance(error, clear) and not (isinstance(error, OSError) and error.filename is not None):
        return
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _hook
    if sys.excepthook is _hook:
        setattr(error, _MARK, entered)


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    text = None
    if not _is_watched():
        text = _line(error, trace) or _mismatch(error, trace) or _without_own_frames(error, trace)
    if text is None or sys.stderr is None:
        sys.__excepthook__(kind, error, trace)
    else:
        sys.stderr.write(text)
        sys.stderr.flush()


@dataclass(frozen=True)
class _Exit:
    """The last ``SystemExit`` of the main thread, with a status other than 0.

    Args:
        words: of its argument.
        path: the frames of modules in which it was made, whose variables live on in any case, each with its
            instruction. The last one is the outermost frame of the main thread.
    """

    words: str
    path: list[tuple[FrameType, int]]

    def has_ended_program(self) -> bool:
        """Return whether nothing has caught it: no frame has gone on, unless to raise it."""
        return all(
            frame.f_lasti == place
            or opname[frame.f_code.co_code[frame.f_lasti]] in ("RERAISE", "RAISE_VARARGS")
            for frame, place in self.path
        )


_exit: _Exit | None = None
_thread_words = ""
_child_error: BaseException | None = None  # that has ended the function of a process of multiprocessing
_is_over = False  # the main thread has failed, and this rank has left
_watched_child = 0  # the last process for which watch_child() has been called


def watch_ends() -> None:
    """Record how the program ends, and print errors without frames of polyhvd; called once."""
    _watch_exits()
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _hook
    former = threading.excepthook

    def hook(failed: threading.ExceptHookArgs) -> None:
        global _thread_words
        error = failed.exc_value
        if _is_over and isinstance(error, (NotInitializedError, ShutdownError)):
            return  # the exception that has been printed is the reason
        if not _thread_words and isinstance(error, Exception) and not _is_consequence(error):
            name = failed.thread.name if failed.thread is not None else ""
            _thread_words = (
                f"has shut down; its thread {printable(name[:_THREAD_CHARACTERS_MAX])!r} had failed: "
                f"{_words_of(error)}"
            )
        former(failed)

    threading.excepthook = hook


def _watch_exits() -> None:
    """Record arguments of ``SystemExit``, and of ``sys.exit()``, which may end a program without making one.

    A program that has imported ``sys.exit`` by its name is given the new one.
    """
    _core.watch_system_exits(_record_exit)
    former = sys.exit

    @functools.wraps(former)
    def exit_with_words(status: object = None, /) -> NoReturn:
        _record_exit(status)
        former(status)  # type: ignore[arg-type]

    sys.exit = exit_with_words
    program = vars(sys.modules.get("__main__", sys))
    for name in [name for name, value in program.items() if value is former]:
        program[name] = exit_with_words


def watch_child(end: Callable[[], None]) -> None:
    """In a process of ``multiprocessing``: record what ends its function, and call ``end`` after its threads.

    Such a process catches what ends its function, and if it was forked it calls no functions of ``atexit``.
    """
    global _watched_child
    process = sys.modules.get("multiprocessing.process")
    if _watched_child == os.getpid() or process is None or process.parent_process() is None:
        return
    _watched_child = os.getpid()
    from multiprocessing import util

    def record() -> None:
        global _child_error, _exit
        _child_error = sys.exc_info()[1]
        if not isinstance(_child_error, SystemExit):
            _exit = None  # it was caught

    util.Finalize(None, record, exitpriority=0)  # called when the function has ended
    former = getattr(threading, "_shutdown")  # noqa: B009, the stubs lack it

    def shut_down() -> None:
        former()
        end()

    setattr(threading, "_shutdown", shut_down)  # noqa: B010


def _record_exit(status: object) -> None:
    global _exit
    main = threading.main_thread()
    if threading.current_thread() is not main or not main.is_alive():  # atexit ignores it
        return
    _exit = None
    if status is None or (isinstance(status, int) and status == 0):
        return
    number = int(status) if isinstance(status, int) else 1
    text = "" if isinstance(status, int) else _first_line(status)
    words = f"has ended with: {text}" if text else f"has ended with status {number}"
    path = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" or frame.f_back is None:
            path.append((frame, frame.f_lasti))
        frame = frame.f_back
    _exit = _Exit("" if _is_consequence(sys.exc_info()[1]) else _cut(words), path)


def has_failed() -> bool:
    """Return whether the main thread has ended with an exception, or with a status other than 0."""
    if _is_interactive():
        return False
    return _uncaught() is not None or (_exit is not None and _exit.has_ended_program())


def last_words() -> str:
    """How this program ends, for other ranks: "has failed: ValueError: bad row (train.py, line 31)".

    Returns:
        An empty text if the program and its threads have come to their end, or it was interrupted; and
        after a failure of another rank, which is that rank's to explain.
    """
    global _is_over
    if not has_failed():
        return words_of_threads()
    _is_over = True
    error = _uncaught()
    if error is None:
        return _exit.words if _exit is not None else ""
    return words_of_failure(error)


def words_of_failure(error: BaseException) -> str:
    """The same for an exception that has ended the work of this rank, whose process continues."""
    if not isinstance(error, Exception) or _is_consequence(error):
        return ""
    return f"has failed: {_words_of(error)}"


def words_of_threads() -> str:
    """The first exception that has ended a thread other than the main one, once; empty if none has."""
    global _thread_words
    words, _thread_words = _thread_words, ""
    return words


def _uncaught() -> BaseException | None:
    """The exception with which Python ends the main thread."""
    if _child_error is not None and not isinstance(_child_error, SystemExit):
        return _child_error
    error = getattr(sys, "last_value", None)  # Python's own, whoever has the hook; but debuggers set it, too
    trace = error.__traceback__ if isinstance(error, BaseException) else None
    if trace is None or trace.tb_frame.f_back is not None or _has_returned(trace.tb_frame):
        return None  # it was caught, by the program, an interactive session or a test runner
    return error


def _has_returned(frame: FrameType) -> bool:
    """Return whether a frame that is done has not ended with an exception."""
    return opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")


def _words_of(error: BaseException) -> str:
    """Its class and message, and the innermost line of the program."""
    kind = type(error)
    words = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        words = f"{kind.__module__}.{words}"
    message = _first_line(error)
    words = _cut(words + (f": {message}" if message else ""))
    place = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        if not is_library(frame):
            name = os.path.basename(frame.f_code.co_filename)[-_NAME_CHARACTERS_MAX:]
            place = printable(f" ({name}, line {number})")
    return words + place


def _first_line(value: object) -> str:
    with contextlib.suppress(Exception):  # of a class whose __str__() fails
        text = _ESCAPE.sub("", str(value)[:_MESSAGE_CHARACTERS_MAX]).strip()
        return text.splitlines()[0].rstrip() if text else ""
    return ""


def _cut(words: str) -> str:
    words = printable(words)
    if len(words.encode()) > _WORDS_BYTES_MAX:
        words = words.encode()[:_WORDS_BYTES_MAX].decode("utf-8", "ignore") + " ..."
    return words


def _is_consequence(error: BaseException | None) -> bool:
    """Return whether another rank has led to it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, HorovodInternalError) and not isinstance(error, RankMismatchError):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _is_interactive() -> bool:
    return bool(hasattr(sys, "ps1") or sys.flags.interactive or sys.flags.inspect)


def _is_watched() -> bool:
    """Return whether the whole traceback is wanted."""
    return _is_interactive() or sys.flags.dev_mode or _LOG.isEnabledFor(logging.DEBUG)


def _line(error: BaseException, trace: TracebackType | None) -> str | None:
    """``FILE:LINE: CLASS: MESSAGE``, with the place that has called; None for an error of anybody else's."""
    entered = getattr(error, _MARK, None)
    if entered is None or _is_chained(error):
        return None
    return _placed(error, trace, entered)


def _mismatch(error: BaseException, trace: TracebackType | None) -> str | None:
    """The same for a mismatch of a collective, on all ranks but its first one, which prints the traceback."""
    world = current.find()
    if not isinstance(error, RankMismatchError) or _is_chained(error) or world is None:
        return None
    ranks = [int(number) for number in _RANKS.findall(str(error))]
    if not ranks or world.placement.rank not in range(min(ranks) + 1, world.placement.size):
        return None
    remark = f"(rank {min(ranks)} prints the traceback; all ranks with POLYHVD_LOG_LEVEL=debug)"
    return f"{_placed(error, trace).rstrip()} {remark}\n"


def _is_chained(error: BaseException) -> bool:
    return error.__cause__ is not None or (error.__context__ is not None and not error.__suppress_context__)


def _placed(error: BaseException, trace: TracebackType | None, entered: CodeType | None = None) -> str:
    """The error with the last line of the program, or the one that has called ``entered``."""
    place = ""
    for frame, number in traceback.walk_tb(trace):
        if frame.f_code is entered:
            break
        if not _is_own(frame):
            place = f"{frame.f_code.co_filename}:{number}: "
    return place + "".join(traceback.format_exception_only(type(error), error))


def _without_own_frames(error: BaseException, trace: TracebackType | None) -> str | None:
    """The traceback up to the call of polyhvd, of an error that describes itself; None for another error."""
    if not isinstance(error, (DataError, HorovodInternalError, InvalidArgumentError, NotInitializedError)):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    kept = len(frames)
    while kept and _is_own(frames[kept - 1]):
        kept -= 1
    if not kept:
        return None
    shown = traceback.TracebackException(type(error), error, trace)
    del shown.stack[kept:]
    cause = error.__cause__
    raised_in = [frame for frame, _ in traceback.walk_tb(cause.__traceback__)] if cause is not None else []
    if type(cause) is type(error) and all(map(_is_own, raised_in)):
        shown.__cause__ = None  # the same error, before it was given the name of a parameter
    return "".join(shown.format())


def _is_own(frame: FrameType) -> bool:
    return f"{frame.f_globals.get('__name__')}.".startswith("polyhvd.")
