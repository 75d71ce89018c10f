"""What a loader leaves out since it cannot be read, with ``on_error="skip"``."""

from __future__ import annotations

import logging

__all__ = ["Skips"]

_LOG = logging.getLogger("polyhvd")


class Skips:
    """Reports each file once. Thread-safe; two threads may report a file at the same time."""

    def __init__(self) -> None:
        self._reported: set[str] = set()

    def report(self, file: str, reason: object) -> None:
        """Log why rows of a file are left out, unless something of this file was reported before.

        Args:
            file: its path.
            reason: the first error; its text names the file.
        """
        if file not in self._reported:
            self._reported.add(file)
            _LOG.warning("data: left out, since on_error='skip': %s", reason)
