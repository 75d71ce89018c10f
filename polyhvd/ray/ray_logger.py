"""Values that ranks of an elastic job send to the callbacks of ``run()``, as Horovod's ``ray_logger``."""

from __future__ import annotations

import logging
import time
from typing import Any

import ray.cloudpickle

from polyhvd.launch.providers.precedence import RAY
from polyhvd.rendezvous.auth import parse_secret
from polyhvd.rendezvous.client import Client
from polyhvd.runtime import current

__all__ = ["LOGGED", "log"]

_LOG = logging.getLogger("polyhvd")
#: Scope in which the driver looks for values.
LOGGED = "ray/logged"
_TIMEOUT_S = 30.0


def log(info_dict: Any, chief_only: bool = True) -> None:
    """Have the driver call the callbacks of ``run()`` with a value; return when it has arrived there.

    Outside an elastic job of an executor it has no effect.

    Args:
        info_dict: what to send, such as a dict; it has to be picklable.
        chief_only: whether only rank 0 sends it.

    Raises:
        StoreError: the driver does not answer.

    Example::

        polyhvd.ray.ray_logger.log({"epoch": state.epoch, "loss": loss})
    """
    launched = RAY.elastic_launched
    if launched is None:
        _LOG.warning("ray_logger.log(): this process is not a rank of an elastic executor")
        return
    world = current.find()
    if chief_only and (world is None or world.placement.rank != 0):
        return
    number, deadline = launched.member or 0, time.monotonic() + _TIMEOUT_S
    value = bytes(ray.cloudpickle.dumps(info_dict))
    secret = parse_secret(launched.secret)
    with Client(launched.rendezvous, secret, rank=number, generation=0, deadline=deadline) as client:
        client.put(LOGGED, number, value)
        client.forget(LOGGED, number)
        client.gather(f"{LOGGED}/{number}", 1, _TIMEOUT_S, own=(0, b""))  # answered after it has arrived
