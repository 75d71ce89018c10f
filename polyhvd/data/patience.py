"""Waits for batches that take long: they are reported, and end in the time in which a stall ends the job."""

from __future__ import annotations

import logging
from collections.abc import Callable

from polyhvd.config import Settings
from polyhvd.data.waiting import LOOK_S
from polyhvd.errors import DataError
from polyhvd.runtime import current

__all__ = ["look", "warn_s"]

_LOG = logging.getLogger("polyhvd")


def warn_s() -> float:
    """Seconds after which a wait is reported; 0: never."""
    settings = _settings()
    return 0.0 if settings.stall_check_disable else settings.stall_warn_s


def look(waited_s: float, describe: Callable[[], str]) -> None:
    """Warn of a wait once, when it has lasted as long as a stall that is reported.

    It counts the looks of a wait, not the clock, so that a program that is stopped and continued has not
    waited.

    Args:
        waited_s: for how many seconds, a multiple of :data:`~polyhvd.data.waiting.LOOK_S`.
        describe: returns what is waited for, and where it is.

    Raises:
        DataError: it has lasted as long as a stall that ends the job.
    """
    settings = _settings()
    if settings.stall_check_disable:
        return
    limit_s = settings.stall_shutdown_s
    if limit_s and waited_s >= limit_s:
        raise DataError(
            f"{describe()}\nwaited for {waited_s:.0f} s; POLYHVD_STALL_SHUTDOWN_TIME_SECONDS={limit_s:g} "
            "limits the wait"
        )
    if waited_s - LOOK_S < settings.stall_warn_s <= waited_s:
        _LOG.warning("%s\nwaiting for %.0f s so far", describe(), waited_s)


def _settings() -> Settings:
    world = current.find()
    return Settings.from_environment() if world is None else world.settings
