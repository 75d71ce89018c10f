"""Gauges of each rank in Ray's metrics, which its dashboard and Prometheus show. See docs/ray.md."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Mapping

from ray.util.metrics import Gauge

from polyhvd.elastic import process
from polyhvd.runtime import current

__all__ = ["GAUGES", "export", "publish", "read"]

#: Ray exports every ten seconds by default.
_INTERVAL_S = 2.0
#: Names with descriptions.
GAUGES: Mapping[str, str] = {
    "polyhvd_step_seconds": "Median time of the last steps of a rank of an elastic job",
    "polyhvd_wait_seconds": "Time for which a rank has waited for other ranks in its present world",
    "polyhvd_data_wait_seconds": "Time for which a rank has waited for its data",
    "polyhvd_bytes": "Bytes that a rank has moved in collectives",
    "polyhvd_operations": "Collectives that a rank has completed",
    "polyhvd_size": "Number of ranks in the present world",
    "polyhvd_recoveries": "Changes of the world that a rank of an elastic job has gone through",
}
_BYTES = ("cma_bytes", "mpi_bytes", "nccl_bytes", "shm_bytes", "tcp_bytes_received", "tcp_bytes_sent")


def read() -> tuple[int, dict[str, float]] | None:
    """The rank, and the value of each gauge that there is now; None outside of a world."""
    world = current.find()
    if world is None:
        return None
    counted = world.counters()
    values: dict[str, float] = {
        "polyhvd_wait_seconds": world.engine.waits[0],
        "polyhvd_data_wait_seconds": counted["data_wait_us"] / 1e6,
        "polyhvd_bytes": sum(counted[name] for name in _BYTES),
        "polyhvd_operations": counted["operations"],
        "polyhvd_size": world.placement.size,
    }
    if (member := process.find()) is not None:
        values["polyhvd_recoveries"] = member.worlds - 1
        if member.figure is not None:
            values["polyhvd_step_seconds"] = member.figure.step_s
    return world.placement.rank, values


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
    return {name: Gauge(name, description, ("rank",)) for name, description in GAUGES.items()}


def _run() -> None:
    while True:
        time.sleep(_INTERVAL_S)
        with contextlib.suppress(Exception):  # the world ends meanwhile
            export()
