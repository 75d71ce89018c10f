"""Opens files that a setting names, without waiting for the other end of a pipe."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

__all__ = ["FULL", "claimed", "opener"]

#: Of a disk, or a share of it, that has no room: nothing that a program could mend by another path.
FULL = (errno.ENOSPC, errno.EDQUOT)


def opener(path: str, flags: int) -> int:
    """Open a file for ``open()``, without blocking: a FIFO in its place is an error, or empty."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


@contextlib.contextmanager
def claimed(path: str) -> Iterator[None]:
    """Make sure that ``path`` can be written before the block does it; if that raises, leave no new file.

    Raises:
        OSError: it cannot be written.
    """
    try:
        made = opener(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        os.close(opener(path, os.O_WRONLY | os.O_CREAT))
        yield
        return
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(path), os.fstat(made)) and os.fstat(made).st_size == 0:
                os.unlink(path)
        raise
    finally:
        os.close(made)
