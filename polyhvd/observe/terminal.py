"""How commands write to standard output: names without escape sequences, and into a pipe that may close."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

__all__ = ["printable", "until_pipe_closes"]

_CLOSED_STATUS = 1


def printable(text: str) -> str:
    """The text with control characters escaped, so that a terminal does not interpret them."""
    return "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in text)


@contextlib.contextmanager
def until_pipe_closes() -> Iterator[None]:
    """Exit without a message if the reader of standard output has gone, as ``head`` does.

    Raises:
        SystemExit: standard output is a closed pipe.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        # What is still buffered is written at exit, which must not fail again.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(_CLOSED_STATUS) from None
