"""What an error of ``init()`` that nobody catches leaves on standard error: a line, with the caller's place.

The exception itself is an ordinary one, with its whole traceback, for whoever catches it: programs,
notebooks, debuggers, pytest. Only what Python would print as the program ends is shortened: the frames
between the caller's line and the message are polyhvd's. A hook of somebody else's is left alone.
"""

from __future__ import annotations

import logging
import sys
import traceback
from types import CodeType, TracebackType

from polyhvd.config import ConfigError
from polyhvd.errors import HorovodInternalError, InvalidArgumentError

__all__ = ["shorten"]

_LOG = logging.getLogger("polyhvd")
_MARK = "_polyhvd_raised_by"


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
    line = None if _is_watched() else _line(error, trace)
    if line is None or sys.stderr is None:
        sys.__excepthook__(kind, error, trace)
    else:
        sys.stderr.write(line)
        sys.stderr.flush()


def _is_watched() -> bool:
    """Whether the whole traceback is wanted."""
    interactive = hasattr(sys, "ps1") or sys.flags.interactive or sys.flags.inspect
    return bool(interactive) or sys.flags.dev_mode or _LOG.isEnabledFor(logging.DEBUG)


def _line(error: BaseException, trace: TracebackType | None) -> str | None:
    """``FILE:LINE: CLASS: MESSAGE``, with the place that has called; None for an error of anybody else's."""
    entered = getattr(error, _MARK, None)
    chained = error.__cause__ or (error.__context__ and not error.__suppress_context__)
    if entered is None or chained:
        return None
    place = ""
    for frame, number in traceback.walk_tb(trace):
        if frame.f_code is entered:
            break
        if not f"{frame.f_globals.get('__name__')}.".startswith("polyhvd."):
            place = f"{frame.f_code.co_filename}:{number}: "
    return place + "".join(traceback.format_exception_only(type(error), error))
