"""Gauges of each rank in Ray's metrics, which its dashboard and Prometheus show. See ``polyhvd docs ray``."""

from __future__ import annotations

import contextlib
import functools
import threading
import time

from ray.util.metrics import Gauge

from polyhvd.runtime import current, metrics

__all__ = ["export", "publish", "read"]

#: Ray exports every ten seconds by default.
_INTERVAL_S = 2.0


def read() -> tuple[int, dict[str, float]] | None:
    """The rank, and the value of each gauge that there is now; None outside of a world."""
    world = current.find()
    if world is None:
        return None
    values = metrics.read(world)
    return world.placement.rank, {metrics.PREFIX + name: value for name, value in values.items()}


def export() -> None:
    """Set the gauges to their present values; outside of a world they keep the last ones."""
    if (found := read()) is not None:
        rank, values = found
        for name, value in values.items():
            _gauges()[name].set(value, {"rank": str(rank)})


@functools.cache
def publish() -> None:
    """Export the gauges of this process from now on."""
    threading.Thread(target=_run, name="polyhvd-ray-metrics", daemon=True).start()


@functools.cache
def _gauges() -> dict[str, Gauge]:
    return {
        (name := metrics.PREFIX + metric.name): Gauge(name, metric.help, ("rank",))
        for metric in metrics.METRICS
    }


def _run() -> None:
    while True:
        time.sleep(_INTERVAL_S)
        with contextlib.suppress(Exception):  # the world ends meanwhile
            export()
