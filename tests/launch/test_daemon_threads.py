"""Programs that end while daemon threads wait for operations."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

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


LEAVES_BEFORE_OTHERS_COMPARE = """
import pathlib, time
import numpy as np, polyhvd.numpy as hvd
from polyhvd.training.drift import DriftCheck
leaves = pathlib.Path(PATH)
hvd.init()
while hvd.rank() == 1 and not leaves.exists():
    time.sleep(0.01)
time.sleep(0.5 * hvd.rank())  # in which rank 0 would leave
check = DriftCheck("optimizer", hvd.global_process_set, "broadcast the weights")
check.compare("optimizer", lambda: [("w", np.full(3, hvd.rank()))])
leaves.touch()
"""


def test_a_rank_does_not_leave_before_others_have_compared_weights(
    launcher: Launcher, fork_servers: ForkServers, tmp_path: Path
) -> None:
    script = launcher.script(LEAVES_BEFORE_OTHERS_COMPARE.replace("PATH", repr(str(tmp_path / "leaves"))))
    argv = [*fork_servers.python(2, IMPORTS["numpy"]), script]
    status, out, err = launcher.run("-np", "2", argv=argv)
    assert (status, out, err.count("WARNING")) == (0, "", 1), err
    assert "optimizer: 1 of 1 weights differ between ranks, the first is 'w'" in err
