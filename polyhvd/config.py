"""The configuration: one table, one frozen dataclass. Nothing else reads the environment.

Every variable is accepted as ``POLYHVD_<NAME>`` and as ``HOROVOD_<NAME>``; the former wins.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

__all__ = ["Config", "ConfigError", "Variable", "table"]


class ConfigError(ValueError):
    """An environment variable holds a value that cannot be used."""


@dataclass(frozen=True)
class Variable:
    """A row of the table: environment name, how to read it, default, meaning."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    meaning: str


def _number(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError("must be a finite number that is not negative")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError("must not be negative")
    return value


def _switch(text: str) -> bool:
    values = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False}
    try:
        return values[text.strip().lower() or "0"]
    except KeyError:
        raise ValueError("must be 0 or 1") from None


def _row(name: str, parse: Callable[[str], Any], default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"variable": Variable(name, parse, default, meaning)})


@dataclass(frozen=True)
class Config:
    """All settings of one process, as read at ``init()``."""

    rank: int = _row("RANK", _count, 0, "World rank of this process; set by the launcher.")
    size: int = _row("SIZE", _count, 1, "Number of ranks; set by the launcher.")
    local_rank: int = _row("LOCAL_RANK", _count, 0, "Rank among those of this host.")
    local_size: int = _row("LOCAL_SIZE", _count, 1, "Number of ranks on this host.")
    cross_rank: int = _row("CROSS_RANK", _count, 0, "Position of this host among those with this local rank.")
    cross_size: int = _row("CROSS_SIZE", _count, 1, "Number of hosts that have this local rank.")
    host_id: str = _row(
        "HOST_ID", str, "0", "The host as the launcher numbers it. Ranks with equal ids share memory."
    )
    rendezvous: str = _row("RENDEZVOUS", str, "", "host:port of the launcher's rendezvous; empty: one rank.")
    secret: str = _row("SECRET", str, "", "The job's secret in hexadecimal; made by the launcher.")
    secret_file: str = _row("SECRET_FILE", str, "", "A file that holds the secret instead.")
    interface: str = _row("GLOO_IFACE", str, "", "Network interface or address to listen on; empty: chosen.")
    start_timeout_s: float = _row("START_TIMEOUT", _number, 30.0, "Seconds to wait for all ranks at init().")
    shared_memory: bool = _row("SHARED_MEMORY", _switch, True, "0: ranks of one host use TCP as well.")
    fusion_bytes_max: int = _row(
        "FUSION_THRESHOLD", _count, 128 << 20, "Bytes of the operations that run as one at most."
    )
    cycle_time_ms: float = _row(
        "CYCLE_TIME",
        _number,
        1.0,
        "Longest time, in milliseconds, that asynchronous work is gathered before the engine acts.",
    )
    reproducible: bool = _row(
        "REPRODUCIBLE",
        _switch,
        False,
        "1: sums do not depend on how ranks are spread over hosts either; the same on every rank.",
    )
    cache_capacity: int = _row("CACHE_CAPACITY", _count, 1024, "Operations that are remembered by number.")
    data_timeout_s: float = _row(
        "DATA_TIMEOUT_SECONDS", _number, 300.0, "Seconds that an agreed transfer may take."
    )
    stall_check_disable: bool = _row("STALL_CHECK_DISABLE", _switch, False, "1: no stall reports.")
    stall_warn_s: float = _row(
        "STALL_CHECK_TIME_SECONDS", _number, 60.0, "Seconds after which a waiting operation is reported."
    )
    stall_shutdown_s: float = _row(
        "STALL_SHUTDOWN_TIME_SECONDS", _number, 0.0, "Seconds after which a stall ends the job; 0: never."
    )
    timeline: str = _row(
        "TIMELINE",
        str,
        "",
        "Write a timeline from init() on: the file of rank 0, beside which the others' lie; "
        "DYNAMIC or empty: when start_timeline() is called.",
    )
    timeline_mark_cycles: bool = _row(
        "TIMELINE_MARK_CYCLES", _switch, False, "1: mark in the timeline when the engine begins new work."
    )
    timeline_bytes_max: int = _row(
        "TIMELINE_MAX_BYTES",
        _count,
        256 << 20,
        "Bytes of a rank's timeline at most; the oldest events are dropped.",
    )
    flight_recorder: bool = _row(
        "FLIGHT_RECORDER", _switch, True, "0: the last operations are not written to a file when a job fails."
    )
    flight_dir: str = _row(
        "FLIGHT_DIR", str, "", "Folder of those files; empty: the system's for temporary files."
    )

    @property
    def flight_folder(self) -> str:
        """Where flight dumps go; empty when they are turned off or there is no such place."""
        if not self.flight_recorder or self.flight_dir:
            return self.flight_dir if self.flight_recorder else ""
        try:
            return tempfile.gettempdir()
        except OSError:
            return ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Read the table's variables; raises :class:`ConfigError` naming the variable and the value."""
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for item in fields(cls):
            variable: Variable = item.metadata["variable"]
            for prefix in ("POLYHVD_", "HOROVOD_"):
                text = environ.get(prefix + variable.name)
                if text is None:
                    continue
                try:
                    values[item.name] = variable.parse(text)
                except ValueError as error:
                    raise ConfigError(f"{prefix}{variable.name}={text!r}: {error}") from None
                break
        config = cls(**values)
        if config.rank >= config.size:
            raise ConfigError(f"POLYHVD_RANK={config.rank} is not below POLYHVD_SIZE={config.size}")
        return config


def table() -> list[Variable]:
    """The rows of the table, in the order of the fields of :class:`Config`."""
    return [item.metadata["variable"] for item in fields(Config)]


def _as_markdown() -> str:
    def shown(value: Any) -> str:
        number = int(value) if isinstance(value, bool) else value
        text = f"{number:g}" if isinstance(number, float) else str(number)
        return f"`{text}`" if text else "empty"

    lines = [
        "# Configuration",
        "",
        "Environment variables, read once by `init()`. Each is also accepted with Horovod's prefix,",
        "`HOROVOD_`; with both, `POLYHVD_` wins.",
        "",
        "This page is made by `python -m polyhvd.config > docs/configuration.md`.",
        "",
        "| variable | default | meaning |",
        "|---|---|---|",
    ]
    lines += [f"| `POLYHVD_{row.name}` | {shown(row.default)} | {row.meaning} |" for row in table()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(_as_markdown(), end="")
