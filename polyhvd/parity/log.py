"""The file in which a job records its comparisons, for ``polyhvd parity --scripts``."""

from __future__ import annotations

import errno
import json
import os
from typing import Any

from polyhvd.observe.files import opener
from polyhvd.runtime import current

__all__ = ["note"]


def note(entry: dict[str, Any], first_rank: int) -> None:
    """Add a line of JSON to the file that ``POLYHVD_PARITY_LOG`` names, only on the first of the ranks.

    Args:
        entry: what was found.
        first_rank: world rank of the one that writes.

    Raises:
        OSError: it cannot be written.
    """
    world = current.world()
    if not world.settings.parity_log or world.placement.rank != first_rank:
        return
    path, line = world.settings.parity_log, json.dumps(entry).encode() + b"\n"
    descriptor = opener(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        if os.write(descriptor, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
    finally:
        os.close(descriptor)
