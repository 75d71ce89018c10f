"""Programs that end while daemon threads wait in operations."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from fork_servers import IMPORTS, ForkServers
from launching import Launcher

#: Each thread of a rank waits for an operation that no other rank asks for.
PROGRAM = """
import os, threading, time
import FRAMEWORK
import polyhvd.FRAMEWORK as hvd
hvd.init()

def block(i):
    x = FRAMEWORK.ones(4)
    name = f"rank {hvd.rank()} thread {i}"
    try:
        if i % 3 == 0:
            hvd.allreduce(x, name=name)
        elif i % 3 == 1:
            hvd.allgather(x, name=name)
        else:
            hvd.allreduce_(x, name=name)
    except hvd.HorovodInternalError:
        pass

threads = [threading.Thread(target=block, args=(i,), daemon=True) for i in range(6)]
for thread in threads:
    thread.start()
while hvd.counters()["pending"] < 6 and any(thread.is_alive() for thread in threads):
    time.sleep(0.001)
"""


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_a_program_ends_well_while_daemon_threads_wait(
    launcher: Launcher, fork_servers: ForkServers, framework: str
) -> None:
    if not find_spec(framework):
        pytest.skip(f"{framework} is not installed")
    script = launcher.script(PROGRAM.replace("FRAMEWORK", framework))
    argv = [*fork_servers.python(2, IMPORTS[framework]), script]
    for _ in range(4 if framework == "numpy" else 2):
        status, out, err = launcher.run("-np", "2", argv=argv, env={"POLYHVD_FLIGHT_RECORDER": "0"})
        assert (status, out, err) == (0, "", "")
