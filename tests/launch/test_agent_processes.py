"""Agents as the launcher sees them: ranks that are added, signals, deaths, and what a lost one leaves."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from launching import DEADLINE_S, assert_gone, is_running
from ranks_alive import outliving_sigkill

from polyhvd.launch.hosts.lists import Host
from polyhvd.launch.job import agent, processes
from polyhvd.launch.job.agent_process import AgentProcess
from polyhvd.launch.providers.local_agents import LocalAgents
from polyhvd.launch.providers.starting import AgentProvider, HostAgent
from polyhvd.rendezvous.auth import new_secret

WAITING = "import os, signal; os.write(1, b'up'); signal.pause()"


class Watched:
    """An agent, and what has come of it."""

    def __init__(self, provider: AgentProvider, secret: str, host_id: int) -> None:
        self.agent: HostAgent = provider.agent(Host("localhost", 2))
        self._env = {"POLYHVD_SECRET": secret, "POLYHVD_HOST_ID": str(host_id)}
        self.written: dict[int, bytes] = {}
        self.pids: dict[int, int] = {}
        self.statuses: dict[int, int] = {}

    def start(self, source: str, *ranks: int) -> None:
        job: dict[str, Any] = {
            "argv": [sys.executable, "-c", source],
            "cwd": os.getcwd(),
            "env": self._env,
            "unset": [],
            "ranks": [(rank, {"RANK": str(rank)}) for rank in ranks],
        }
        self.agent.start(job)
        while self.agent.unsent_bytes:  # what does not fit into the pipe
            self.agent.flush()
            time.sleep(0.01)

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        with selectors.DefaultSelector() as selector:
            selector.register(self.agent.stdout, selectors.EVENT_READ)
            while not condition():
                assert selector.select(max(0.0, deadline - time.monotonic())), "nothing comes of the agent"
                for kind, rank, payload in self.agent.receive():
                    if kind == agent.STDOUT:
                        self.written[rank] = self.written.get(rank, b"") + payload
                    elif kind == agent.STARTED:
                        self.pids[rank] = agent.parse_status(payload)[0]
                    elif kind == agent.EXITED:
                        self.statuses[rank] = agent.parse_status(payload)[0]


@pytest.fixture
def start() -> Iterator[Callable[..., Watched]]:
    started = []

    def new(secret: str = "", host_id: int = 0) -> Watched:
        started.append(Watched(LocalAgents(), secret or new_secret(), host_id))
        return started[-1]

    yield new
    for watched in started:
        watched.agent.close()


def test_rank_can_be_added_to_an_agent_that_runs(start: Callable[..., Watched]) -> None:
    watched = start()
    watched.start(WAITING, 0)
    watched.wait(lambda: watched.written == {0: b"up"})
    watched.start("import os; print(os.environ['RANK'])", 3)
    watched.wait(lambda: watched.statuses == {3: 0})
    assert (watched.agent.ranks, watched.written) == ([0], {0: b"up", 3: b"3\n"})
    assert is_running(watched.pids[0])
    watched.agent.signal(signal.SIGTERM)
    watched.wait(lambda: watched.agent.ended)
    assert watched.statuses == {0: -signal.SIGTERM, 3: 0}
    assert watched.agent.close() == 0


def test_strays_of_a_lost_agent_are_killed_and_those_of_others_are_not(start: Callable[..., Watched]) -> None:
    secret = new_secret()
    lost, other = start(secret, 0), start(secret, 1)
    for watched in (lost, other):
        watched.start(WAITING, 0)
        watched.wait(lambda watched=watched: watched.written == {0: b"up"})
    lost.agent.end_strays()
    assert_gone([lost.pids[0]])
    assert is_running(other.pids[0])


def test_what_has_started_an_agent_and_outlives_sigkill_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes, "_KILLED_S", 0.2)
    process = AgentProcess("node2", ["sleep", "600"])
    with ThreadPoolExecutor(1) as threads, outliving_sigkill(process._process.pid):
        for _ in range(2):
            assert threads.submit(process.close, 0.1).result(30) == -signal.SIGKILL
    pid = process._process.pid
    expected = (
        f"polyhvd: the agent for node2 (process {pid}) has not ended within 0.2 s of SIGKILL; it is left"
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(expected)
    assert process._process.wait(DEADLINE_S) == -signal.SIGKILL


def test_ranks_do_not_import_what_starts_them() -> None:
    program = (
        "import sys, polyhvd.numpy; print(*(name for name in sys.modules if name.startswith('polyhvd.')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    imported = set(done.stdout.split())
    launch = {name.removeprefix("polyhvd.launch.") for name in imported if name.startswith("polyhvd.launch.")}
    providers = (
        "cluster",
        "foreign",
        "jsrun",
        "kubernetes",
        "local",
        "mpi",
        "ray",
        "sagemaker",
        "slurm",
        "torchrun",
    )
    joining = {
        "entry",
        "hosts",
        "hosts.doctor",
        "init",
        "providers",
        "sagemaker",
        "uncaught",
        *(
            f"providers.{name}"
            for name in (*providers, "choice", "meeting", "nodelist", "precedence", "provider")
        ),
    }
    assert launch == joining


def test_the_launcher_does_not_import_what_ranks_meet_by() -> None:
    program = "import sys, polyhvd.launch.cli.main; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    slow = {"logging", "numpy", "polyhvd._core", "polyhvd.config", "polyhvd.launch.providers.meeting"}
    assert not slow & set(done.stdout.split())
