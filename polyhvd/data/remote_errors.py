"""Exceptions that go from one process to another with their tracebacks."""

from __future__ import annotations

import ast
import linecache
import pickle
import traceback
from types import CodeType, TracebackType
from typing import Any, NamedTuple

import cloudpickle

__all__ = ["RemoteError", "pack"]


class RemoteError(NamedTuple):
    """An exception as a process sends it. Locals of its frames are not part of it."""

    pickled: bytes | None  # None: it cannot be pickled
    text: str
    frames: list[tuple[str, int, str]]  # file, line and function, the outermost first
    cause: RemoteError | None
    context: RemoteError | None
    hides_context: bool

    def restore(self) -> BaseException:
        """The exception, with a traceback that names the files, lines and functions of the other process.

        One that cannot be pickled becomes a RuntimeError with its class and text.
        """
        error = RuntimeError(self.text) if self.pickled is None else _unpickled(self.pickled)
        error.__cause__ = None if self.cause is None else self.cause.restore()
        error.__context__ = None if self.context is None else self.context.restore()
        error.__suppress_context__ = self.hides_context
        following: TracebackType | None = None
        for file, line, function in reversed(self.frames):
            made = _traceback(file, line, function)
            following = TracebackType(following, made.tb_frame, made.tb_lasti, line)
        return error.with_traceback(following)


def pack(error: BaseException, leave_out: str = "") -> RemoteError:
    """An exception in a form that another process can :meth:`~RemoteError.restore`.

    Args:
        error: that was raised.
        leave_out: the file whose frames are not part of the traceback.
    """
    frames = [
        (frame.filename, frame.lineno or 1, frame.name)
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != leave_out
    ]
    cause, context = error.__cause__, error.__context__
    return RemoteError(
        _pickled(error),
        "".join(traceback.format_exception_only(type(error), error)).strip(),
        frames,
        None if cause is None else pack(cause, leave_out),
        None if context is None or context is cause else pack(context, leave_out),
        error.__suppress_context__,
    )


def _pickled(error: BaseException) -> bytes | None:
    """None: neither the exception nor its class and arguments can be pickled."""
    kind, arguments = type(error), error.args
    # Classes whose arguments are not those of __init__ cannot be unpickled; attributes may be unsuitable.
    for value in (error, (kind, arguments, error.__dict__), (kind, arguments, {})):
        try:
            pickled: bytes = cloudpickle.dumps(value)
            _unpickled(pickled)
        except Exception:  # whatever these do
            continue
        return pickled
    return None


def _unpickled(pickled: bytes) -> BaseException:
    value = pickle.loads(pickled)
    if isinstance(value, BaseException):
        return value
    kind, arguments, attributes = value
    error: BaseException = kind.__new__(kind, *arguments)
    error.__dict__.update(attributes)
    return error


class _Raised(Exception):
    """The parts of a traceback."""


def _traceback(file: str, line: int, function: str) -> TracebackType:
    """A traceback of one frame, as code at this place would have it."""
    tree = ast.parse("raise error", file)
    text = linecache.getline(file, line).rstrip()
    for node in ast.walk(tree):
        if hasattr(node, "lineno"):  # the whole line, of which no part is then marked
            place: Any = node
            place.lineno = place.end_lineno = line
            place.col_offset, place.end_col_offset = len(text) - len(text.lstrip()), len(text.encode())
    code: CodeType = compile(tree, file, "exec")
    named: dict[str, Any] = {"co_name": function}
    if hasattr(code, "co_qualname"):  # from Python 3.11 on
        named["co_qualname"] = function
    try:
        exec(code.replace(**named), {"__name__": file, "error": _Raised()})
    except _Raised as error:
        made = error.__traceback__
    assert made is not None
    assert made.tb_next is not None
    return made.tb_next
