"""A rank's reports of its metrics to polyhvdrun, by a thread that sends one every few seconds.

Members of elastic jobs send them on the connection of :mod:`polyhvd.elastic.watch`; other ranks open one with
the first report, so short programs open none.
"""

from __future__ import annotations

import functools
import json
import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from polyhvd.config import Launched
from polyhvd.launch.providers.meeting import given_secret
from polyhvd.rendezvous.client import Client
from polyhvd.rendezvous.store import StoreError
from polyhvd.runtime import current, metrics
from polyhvd.runtime.world import World

__all__ = ["begin", "report_of"]

_CONNECT_S = 10.0


def report_of(world: World) -> bytes:
    """The report of this rank, as :class:`polyhvd.launch.job.metrics.JobMetrics` reads it."""
    placement = world.placement
    content = {
        "rank": placement.rank,
        "host": world.hosts[placement.rank],
        "generation": placement.generation,
        "values": metrics.read(world),
    }
    return json.dumps(content).encode()


@functools.cache
def begin(launched: Launched, send: Callable[[bytes], None] | None = None) -> None:
    """Report from now on, once in a process.

    Args:
        launched: the launcher's variables of this process.
        send: sends a report in an elastic job, without waiting; None: on a separate connection.
    """
    thread = threading.Thread(
        target=_run, args=(launched.metrics_interval_s, send or _Connection(launched).send), daemon=True
    )
    thread.name = "polyhvd-metrics"
    with suppress(RuntimeError):  # the system has no more threads
        thread.start()


class _Connection:
    """A connection to the launcher's store."""

    def __init__(self, launched: Launched) -> None:
        self._launched = launched
        self._store: Client | None = None

    def send(self, report: bytes) -> None:
        """Send a report; raises StoreError if the launcher cannot be reached."""
        if self._store is None:
            launched, until = self._launched, time.monotonic() + _CONNECT_S
            secret = given_secret(launched)
            self._store = Client(
                launched.rendezvous, secret, rank=launched.rank, generation=1, deadline=until
            )
            os.register_at_fork(after_in_child=self._store.close)
        self._store.put(metrics.SCOPE, self._launched.rank, report)
        self._store.forget(metrics.SCOPE, self._launched.rank)


def _run(interval_s: float, send: Callable[[bytes], None]) -> None:
    time.sleep(random.uniform(0.5, 1.0) * interval_s)  # else all ranks would report at once, each time
    with suppress(StoreError):  # the launcher has gone
        while True:
            report = b""
            with suppress(Exception):  # the world ends meanwhile
                if (world := current.find()) is not None:
                    report = report_of(world)
            if report:
                send(report)
            time.sleep(interval_s)
