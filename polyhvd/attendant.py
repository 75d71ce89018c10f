"""A thread that does for the engine what needs Python: the engine's own threads never call it."""

from __future__ import annotations

import logging
import threading

from polyhvd import _core

__all__ = ["Attendant"]

_LOG = logging.getLogger("polyhvd")


class Attendant:
    """Serves a mailbox, sleeping outside of the interpreter, until ``close()``."""

    def __init__(self) -> None:
        self.mailbox = _core.Mailbox()
        # A daemon, since others are joined before the functions of atexit, and so before shutdown().
        self._thread = threading.Thread(target=self._run, name="polyhvd attendant", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread when it has done what is left."""
        self.mailbox.close()
        self._thread.join()

    def _run(self) -> None:
        while self.mailbox.wait():
            while (line := self.mailbox.take_line()) is not None:
                _LOG.warning("%s", line)
