"""What a rank logs of weights that differ between ranks."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

__all__ = ["drift_reports"]


@contextlib.contextmanager
def drift_reports() -> Iterator[list[str]]:
    """The reports of this rank; they are complete after the block."""
    found: list[str] = []

    class Reports(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Reports()
    logging.getLogger("polyhvd").addHandler(handler)
    try:
        yield found
        for thread in threading.enumerate():
            if thread.name == "polyhvd drift":
                thread.join()
    finally:
        logging.getLogger("polyhvd").removeHandler(handler)
