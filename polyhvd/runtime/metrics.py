"""The metrics of a rank: one table for ``hvd.metrics()``, polyhvdrun's page, ``polyhvd top``, Ray and docs.

``python -m polyhvd.runtime.metrics`` prints it as a table of Markdown.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a launcher, which only needs the table, would start later
    from polyhvd.runtime.placement import Placement
    from polyhvd.runtime.world import World

__all__ = ["JOB_METRICS", "METRICS", "PREFIX", "SCOPE", "Metric", "read", "table"]

#: Of the names in Prometheus and Ray.
PREFIX = "polyhvd_"
#: Of the launcher's store: where ranks report.
SCOPE = "metrics"
_BYTES = ("cma_bytes", "mpi_bytes", "nccl_bytes", "shm_bytes", "tcp_bytes_received", "tcp_bytes_sent")
#: A rate covers at least so many steps and seconds, or so many seconds.
_STEPS_MIN, _WINDOW_S, _WINDOW_MAX_S = 5, 1.0, 60.0


@dataclass(frozen=True)
class _Point:
    """Totals of a rank at one time."""

    at: float  # by time.monotonic()
    steps: float
    bytes: float
    wait_s: float
    data_wait_s: float

    @classmethod
    def of(cls, at: float, counted: Mapping[str, int]) -> _Point:
        """From counters; those that are not there are 0."""
        return cls(
            at,
            counted.get("steps", 0),
            sum(counted.get(name, 0) for name in _BYTES),
            counted.get("wait_us", 0) / 1e6,
            counted.get("data_wait_us", 0) / 1e6,
        )


@dataclass(frozen=True)
class _Sample:
    """The values that the metrics are computed from."""

    world: World
    counted: Mapping[str, int]
    step_s: float
    begin: _Point  # of the rates
    end: _Point

    @property
    def placement(self) -> Placement:
        """The place of the rank."""
        return self.world.placement

    def rate(self, value: Callable[[_Point], float]) -> float:
        """How much a total has grown per second."""
        elapsed_s = self.end.at - self.begin.at
        return max(0.0, value(self.end) - value(self.begin)) / elapsed_s if elapsed_s > 0 else 0.0

    @property
    def wait_ratio(self) -> float:
        """Part of the time in which the rank has waited for others."""
        return min(1.0, self.rate(lambda point: point.wait_s))


@dataclass(frozen=True)
class Metric:
    """A row of the table."""

    name: str  #: with its unit last, after Prometheus' conventions; those of counters end in _total
    help: str  #: a phrase, without a final full stop
    value: Callable[[_Sample], float | None]  #: None: not known in this job

    @property
    def kind(self) -> str:
        """Prometheus' type: "counter" or "gauge"."""
        return "counter" if self.name.endswith("_total") else "gauge"


def _counter(name: str) -> Callable[[_Sample], float]:
    return lambda sample: sample.counted[name]


METRICS: tuple[Metric, ...] = (
    Metric(
        "steps_total",
        "Steps of training; a step ends when the collective that began it comes again",
        _counter("steps"),
    ),
    Metric(
        "step_seconds",
        "Time of a step: the median of the last 16 in this world; 0 before the first one",
        lambda sample: sample.step_s,
    ),
    Metric(
        "own_step_seconds",
        "Time of a step without the wait for other ranks; a slow rank has the largest one",
        lambda sample: sample.step_s * (1.0 - sample.wait_ratio),
    ),
    Metric(
        "wait_ratio",
        "Part of the time of the last steps spent waiting for other ranks",
        lambda s: s.wait_ratio,
    ),
    Metric(
        "data_wait_ratio",
        "Part of the time of the last steps spent waiting for data of loaders of polyhvd.data",
        lambda sample: min(1.0, sample.rate(lambda point: point.data_wait_s)),
    ),
    Metric("wait_seconds_total", "Time spent waiting for other ranks", lambda sample: sample.end.wait_s),
    Metric(
        "data_wait_seconds_total",
        "Time spent waiting for data of loaders of polyhvd.data",
        lambda sample: sample.end.data_wait_s,
    ),
    Metric(
        "bytes_per_second",
        "Bytes moved in collectives per second, during the last steps",
        lambda sample: sample.rate(lambda point: point.bytes),
    ),
    Metric(
        "moved_bytes_total", "Bytes moved in collectives, by all transports", lambda sample: sample.end.bytes
    ),
    Metric("sent_bytes_total", "Bytes sent to other hosts over TCP", _counter("tcp_bytes_sent")),
    Metric(
        "received_bytes_total", "Bytes received from other hosts over TCP", _counter("tcp_bytes_received")
    ),
    Metric("read_bytes_total", "Bytes read by loaders of polyhvd.data", _counter("data_bytes")),
    Metric("operations_total", "Collectives submitted", _counter("operations")),
    Metric("batches_total", "Batches in which collectives have run, after fusion", _counter("batches")),
    Metric(
        "cache_hits_total", "Collectives whose agreement was in the response cache", _counter("cache_hits")
    ),
    Metric("pending_operations", "Collectives that have not completed", _counter("pending")),
    Metric("stalls_total", "Reports of stalled collectives; rank 0 makes them", _counter("stalls")),
    Metric(
        "slow",
        "1 if this rank is reported as slow; only in elastic jobs",
        lambda sample: None if sample.world.is_slow is None else float(sample.world.is_slow),
    ),
    Metric("ranks", "Ranks in the present world", lambda sample: sample.placement.size),
    Metric("generation", "Generation of the present world", lambda sample: sample.placement.generation),
    Metric(
        "world_changes_total",
        "Changes of the world that this process of an elastic job has gone through",
        _counter("world_changes"),
    ),
)

#: Gauges that only the launcher's page has, with their meaning.
JOB_METRICS: Mapping[str, str] = {
    "report_age_seconds": "Time since the last report of the rank, which is frozen if this grows",
    "job_reporting_ranks": "Ranks that run and have reported",
    "job_running_processes": "Processes that have not ended: ranks, reporting or not, and spares",
    "job_start_time_seconds": "When the job was started, in seconds since 1970",
}


class _Meter:
    """The points between which the rates of a world are computed. Thread-safe."""

    def __init__(self, world: World) -> None:
        self._lock = threading.Lock()
        self._points = deque([_Point.of(world.began, world.counted)], maxlen=2)

    def begin(self, now: _Point) -> _Point:
        """Return the point at which the rates that end now begin."""
        with self._lock:
            begin, last = self._points[0], self._points[-1]
            elapsed_s = now.at - last.at
            is_enough = now.steps - last.steps >= _STEPS_MIN or elapsed_s >= _WINDOW_MAX_S
            if is_enough and elapsed_s >= _WINDOW_S:
                self._points.append(now)
            return begin


_meters: weakref.WeakKeyDictionary[World, _Meter] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def read(world: World) -> dict[str, float]:
    """The metrics of this process in a world, by their names; see :func:`polyhvd.metrics`."""
    counted = world.counters()
    now = _Point.of(time.monotonic(), counted)
    if (meter := _meters.get(world)) is None:
        with _making:
            meter = _meters.setdefault(world, _Meter(world))
    sample = _Sample(world, counted, world.engine.step_s, meter.begin(now), now)
    found = {metric.name: metric.value(sample) for metric in METRICS}
    return {name: value for name, value in found.items() if value is not None}


def table() -> list[str]:
    """The table of metrics, as lines of Markdown."""
    rows = [f"| `{metric.name}` | {metric.kind} | {metric.help} |" for metric in METRICS]
    rows += [f"| `{name}` | gauge, only on the page | {text} |" for name, text in JOB_METRICS.items()]
    return ["| name | type | meaning |", "|---|---|---|", *rows]


if __name__ == "__main__":
    print("\n".join(table()))
