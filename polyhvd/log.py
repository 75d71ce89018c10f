"""How polyhvd's logger, ``logging.getLogger("polyhvd")``, is set up by ``init()``.

A program that has configured logging itself decides where records go; else they go to standard error.
"""

from __future__ import annotations

import logging

from polyhvd.config import Settings, unknown

__all__ = ["configure", "report_unknown"]

_LOG = logging.getLogger("polyhvd")
_TRACE = 5
_LEVELS = {
    "trace": _TRACE,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Silent as long as the root logger has a handler, which gets the records anyway."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def configure(settings: Settings, rank: int, generation: int = 0) -> None:
    """Give the logger its level and form; only LOG_LEVEL overrides a level that the program has set.

    Args:
        settings: of this process.
        rank: its rank.
        generation: of its world in an elastic job; 0: of none.
    """
    logging.addLevelName(_TRACE, "TRACE")
    if _LOG.level == logging.NOTSET or settings.log_level != Settings.log_level:
        _LOG.setLevel(_LEVELS[settings.log_level])
    for handler in [handler for handler in _LOG.handlers if isinstance(handler, _Stderr)]:
        _LOG.removeHandler(handler)
    if not _LOG.handlers:
        handler = _Stderr()
        time = "" if settings.log_hide_time else "%(asctime)s "
        place = f"rank {rank} generation {generation}" if generation else f"rank {rank}"
        handler.setFormatter(logging.Formatter(f"{time}polyhvd {place} %(levelname)s: %(message)s"))
        _LOG.addHandler(handler)


def report_unknown() -> None:
    """Warn of each variable with our prefixes that the table of configuration does not know."""
    for variable, nearest in unknown().items():
        hint = f"did you mean {nearest}?" if nearest else "for a list, run: polyhvd docs configuration"
        _LOG.warning("%s is set, but is not a variable of polyhvd or Horovod; %s", variable, hint)
