"""polyhvdrun on each of two hosts, which are namespaces: whatever is killed, nothing is left on either."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import netns
import pytest
from joining import SECRET, Job, environment
from launching import wait_until

pytestmark = pytest.mark.skipif(not netns.available(), reason="needs root and iproute2")

#: Ranks with a child that has left their session.
WORKING = """
import os, subprocess, sys
import numpy as np
import polyhvd.numpy as hvd
subprocess.Popen(["sleep", "600"], start_new_session=True)
hvd.init()
print("in the world", flush=True)
while True:
    hvd.allreduce(np.ones(3), name="step")
"""


class Nodes:
    """A job of two hosts with two ranks each; its processes carry a mark in their environment."""

    def __init__(self, job: Job, hosts: tuple[netns.Namespace, netns.Namespace], mark: str) -> None:
        self._mark = os.fsencode(f"TEST_OF_NODES={mark}")
        env = environment(POLYHVD_SECRET=SECRET, TEST_OF_NODES=mark)
        options = [
            "--nnodes",
            "2",
            "--nproc-per-node",
            "2",
            "--heartbeat-timeout-s",
            "5",
            "--term-grace-s",
            "1",
        ]
        for number, host in enumerate(hosts):
            place = ["--node-rank", str(number), "--rdzv-endpoint", hosts[0].address]
            polyhvdrun = [sys.executable, "-m", "polyhvd.launch", *options, *place]
            job.start(host.command(*polyhvdrun, sys.executable, "-c", WORKING), env)
        self.job = job

    def living(self) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if self._mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    def wait_until_all_work(self) -> None:
        out = self.job.processes[0].stdout
        assert out is not None
        lines = [out.readline() for _ in range(4)]
        assert all("in the world" in line for line in lines), lines


def child(pid: int) -> int:
    (found,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(found)


def a_rank(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


VICTIMS: dict[str, Callable[[int], int]] = {
    "polyhvdrun": lambda pid: pid,
    "guard": child,
    "agent": lambda pid: child(child(pid)),
    "rank": lambda pid: a_rank(child(child(pid))),
}


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[netns.Namespace, netns.Namespace]]:
    with netns.two_hosts() as hosts:
        yield hosts


@pytest.mark.parametrize(
    ("number", "what"), [(0, "polyhvdrun"), (0, "agent"), (1, "guard"), (1, "agent"), (1, "rank")]
)
def test_kill_9_leaves_nothing_on_either_host(
    hosts: tuple[netns.Namespace, netns.Namespace], number: int, what: str
) -> None:
    with Job() as job:
        nodes = Nodes(job, hosts, f"{os.getpid()}-{number}-{what}")
        nodes.wait_until_all_work()
        victim = VICTIMS[what](job.processes[number].pid)
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: not nodes.living(), f"the end of all after {what} of host {number}", 30.0)
        ended = job.finish()
    assert all(status != 0 for status, _, _ in ended)
    error = ended[1 - number if what == "polyhvdrun" else number][2]
    assert "polyhvdrun: " in error
