"""A rank of an elastic job on several hosts that are measured: it trains until a file says that it is enough.

``python -m benchmarks.elastic_hosts_rank FRAMEWORK MB FOLDER``. It notes what :mod:`benchmarks.elastic_rank`
does, with its generation and its host; who ends processes and hosts is :mod:`benchmarks.elastic_hosts`.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.elastic_rank import COMMIT_EVERY, JOBS, Events, elements, noted


def main() -> None:
    framework, megabytes, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    events, host = Events(folder), os.readlink("/proc/self/ns/net")
    module = importlib.import_module(f"polyhvd.{framework}")
    enter = module.init

    def init() -> None:
        events.note("ready", host=host)
        enter()

    module.init = init  # type: ignore[attr-defined]
    hvd, state, reduce_gradient = JOBS[framework](elements(megabytes))
    from polyhvd.collectives.objects import allgather_object
    from polyhvd.runtime import current

    @hvd.elastic.run
    def train(state: Any) -> None:
        place = current.world().placement
        where = {"rank": place.rank, "size": place.size, "world": place.generation, "host": host}
        while True:
            events.note("step", step=state.step, **where)
            with noted(events, hvd):
                reduce_gradient()
                time.sleep(0.002)  # what a model would compute
                state.step += 1
                if state.step % COMMIT_EVERY:
                    state.check_host_updates()
                    continue
                state.commit()
                if any(allgather_object((folder / "done").exists(), name="done")):
                    return

    train(state)
    hvd.shutdown()


if __name__ == "__main__":
    main()
