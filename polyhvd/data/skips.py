"""The files that a loader leaves out since they cannot be read, with ``on_error="skip"``."""

from __future__ import annotations

import logging

__all__ = ["Skips"]

_LOG = logging.getLogger("polyhvd")


class Skips:
    """Reports each file once. Thread-safe."""

    def __init__(self) -> None:
        #: By file, what was given first. setdefault() is atomic, and a lock could not be copied.
        self._reported: dict[str, object] = {}

    def report(self, file: str, reason: object) -> None:
        """Log why rows of a file are left out, unless something of this file was reported before.

        Args:
            file: its path.
            reason: the error that was found first; its text names the file.
        """
        own = object()
        if self._reported.setdefault(file, own) is own:
            _LOG.warning("data: left out, since on_error='skip': %s", reason)
