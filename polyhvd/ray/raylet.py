"""How processes of Ray end: ranks with the raylet of their node, and actors with or without Ray's GCS."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from polyhvd.launch.providers.precedence import RAY

__all__ = ["end_with_raylet", "kill"]

_INTERVAL_S = 1.0
#: Seconds for Ray to end actors.
_KILL_S = 5.0


@functools.cache
def end_with_raylet() -> None:
    """From now on, end this process when its raylet has ended.

    A worker of Ray looks for the process id of its raylet, which a zombie keeps: for ever in a container
    whose first process does not wait for children. The parent of this process changes at once.
    """
    raylet = os.getppid()
    if RAY.variables().get("RAY_RAYLET_PID") == str(raylet):
        threading.Thread(target=_watch, args=(raylet,), name="polyhvd-ray-raylet", daemon=True).start()


def _watch(raylet: int) -> None:
    while os.getppid() == raylet:
        time.sleep(_INTERVAL_S)
    print(f"polyhvd: the raylet of this node (process {raylet}) has ended; so does its rank", file=sys.stderr)
    sys.stderr.flush()
    os._exit(1)


def kill(actors: Sequence[Any], and_then: Callable[[], object] | None = None) -> None:
    """Kill actors that have a method ``end``. Has no effect without a connection to Ray.

    Without its GCS, Ray waits in ``ray.kill()`` for a minute, and then ends this process. Calls do not need
    the GCS, so actors end themselves then, unless they are busy.

    Args:
        actors: to kill.
        and_then: called after that; it may need the GCS, too.
    """

    def ask() -> None:
        for actor in actors if ray.is_initialized() else ():
            with contextlib.suppress(Exception):  # of a connection that has ended
                ray.kill(actor)
        if and_then is not None:
            and_then()

    asking = threading.Thread(target=ask, name="polyhvd-ray-kill", daemon=True)
    asking.start()
    asking.join(_KILL_S)
    if asking.is_alive():
        for actor in actors:
            with contextlib.suppress(Exception):
                actor.end.remote()
