"""How commands write to standard output: in any encoding, to pipes that may close, to full disks."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator

__all__ = ["printable", "until_output_fails"]

_FAILED_STATUS = 1
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def printable(text: str) -> str:
    """The text with control characters escaped, so that a terminal does not interpret them."""
    return "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in text)


@contextlib.contextmanager
def until_output_fails(program: str) -> Iterator[None]:
    r"""Exit if standard output cannot be written.

    There is no message if its reader has gone, as ``head`` does, and one line if the disk is full. Characters
    that its encoding lacks are written as escape sequences, such as ``\xe9``.

    Args:
        program: the command's name, for the line.

    Raises:
        SystemExit: standard output is a closed pipe, or its disk is full or broken.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            if error.errno not in _DISK_ERRORS or error.filename is not None:
                raise
            print(f"{program}: cannot write standard output: {error.strerror}", file=sys.stderr)
        # What is still buffered is written at exit, which must not fail again.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(_FAILED_STATUS) from None
