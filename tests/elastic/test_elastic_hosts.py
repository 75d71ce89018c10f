"""Elastic jobs on several hosts, over a real sshd on each: they lose hosts and gain others, and go on."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import netns
import pytest
import sshd
from launching import ROOT, Launcher, assert_gone, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not netns.available(), reason="needs root and iproute2"),
    pytest.mark.skipif(not sshd.available(), reason="needs openssh-server"),
]

#: Trains until a file says so, and tells who is where after every change of the world.
JOB = """
import os, pathlib, sys, time
import numpy as np
import polyhvd.numpy as hvd
from polyhvd.runtime import current

folder = pathlib.Path(sys.argv[1])
hvd.init()

@hvd.elastic.run
def train(state):
    place = current.world().placement
    pids = hvd.allgather_object(os.getpid())
    first = True
    while not state.done:
        done = hvd.allreduce(np.array([(folder / "done").exists()], float), op=hvd.Max, name="done")[0]
        state.weights += hvd.allreduce(np.full(1000, state.step + 1.0), op=hvd.Average, name="gradient")
        state.step += 1
        state.done = bool(done)
        if first and place.rank == 0:
            pid = " ".join(map(str, pids))
            os.write(1, b"world %d size %d step %d at %.3f pids %s.\\n" % (
                place.generation, place.size, state.step, time.time(), pid.encode()))
        first = False
        state.commit()

state = hvd.elastic.ArrayState(weights=np.zeros(1000), step=0, done=False)
train(state)
assert (state.weights == sum(range(1, state.step + 1))).all(), (state.step, state.weights)
os.write(1, b"end\\n")
"""


class Cluster:
    """Hosts on one switch, and a job of the first one's launcher."""

    def __init__(self, hosts: list[netns.Namespace], options: list[str], folder: Path) -> None:
        self.hosts, self.options, self.folder = hosts, options, folder
        self.launcher = Launcher(folder)
        self.list = folder / "hosts"
        self.script = folder / "discover.sh"
        self.asked = folder / "asked"
        self.script.write_text(f"#!/bin/sh\ncat '{self.list}'\necho >>'{self.asked}'\n")
        self.script.chmod(0o755)
        self.program = self.launcher.script(JOB)

    def are(self, *lines: str) -> None:
        """Have the discovery say these hosts."""
        new = self.list.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in lines))
        new.rename(self.list)

    def is_heard(self) -> None:
        """Wait until the discovery has said what it says now."""
        times = self.asked.stat().st_size + 2  # one of them has begun after this
        wait_until(lambda: self.asked.stat().st_size >= times, "a run of the script")

    def start(self, *options: str) -> None:
        """Start the job."""
        argv = [sys.executable, self.program, str(self.folder)]
        self.launcher.start(*self.options, *options, argv=argv, before=self.hosts[0].command())

    def discovers(self) -> list[str]:
        """Options for the discovery."""
        return ["--host-discovery-script", str(self.script)]

    def world(self, generation: int, size: int) -> tuple[float, list[int]]:
        """Wait for a generation of this size; when it had made a step, and the pids of its ranks."""
        self.launcher.wait_for(f"world {generation} size {size} ", 1)
        pattern = rf"world {generation} size {size} step \d+ at ([0-9.]+) pids ([0-9 ]+)\."
        found = None
        while found is None:
            found = re.search(pattern, self.launcher.out.decode())
            if found is None:
                self.launcher.wait_for("\n", self.launcher.out.count(b"\n") + 1)
        return float(found[1]), [int(pid) for pid in found[2].split()]

    def says(self, text: str) -> str:
        """Wait for words of the launcher."""

        def reported() -> bool:
            assert self.launcher.process is not None
            self.launcher._read(self.launcher.process, time.monotonic() + 1)
            return text in self.launcher.err.decode()

        wait_until(reported, text)
        return self.launcher.err.decode()

    def finish(self, size: int) -> str:
        """Let the job end; all of so many ranks have to have done the same steps."""
        (self.folder / "done").touch()
        status, out, err = self.launcher.finish()
        assert (status, out.count("end")) == (0, size), f"{out}\n{err}"
        return err


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[netns.Namespace], list[str]]]:
    with netns.hosts(3) as hosts, sshd.sshd_on(tmp_path_factory.mktemp("ssh"), hosts[1:]) as options:
        yield hosts, options


@pytest.fixture
def cluster(made: tuple[list[netns.Namespace], list[str]], tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(*made, tmp_path)
    yield cluster
    process = cluster.launcher.process
    if process is not None and process.poll() is None:
        process.kill()
        process.communicate()


def kill(pid: int, number: int = signal.SIGKILL) -> float:
    moment = time.time()
    os.kill(pid, number)
    return moment


def agent_of(pid: int) -> int:
    """The process that has started this one."""
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])


def busy(pid: int) -> float:
    """The part of the next second in which a process computes."""

    def spent_s() -> float:
        times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")

    before, began = spent_s(), time.monotonic()
    time.sleep(1.0)
    return (spent_s() - before) / (time.monotonic() - began)


def test_rank_and_agent_of_other_hosts_are_killed(cluster: Cluster) -> None:
    b, c = (host.address for host in cluster.hosts[1:])
    cluster.start("-H", f"localhost:1,{b}:1,{c}:1", "-np", "3", "--min-np", "2")
    _, pids = cluster.world(1, 3)
    killed = kill(pids[1])
    begun, pids = cluster.world(2, 2)
    print(f"a rank of another host: {begun - killed:.3f} s")
    _, pids = cluster.world(3, 3)  # it was started anew
    killed = kill(agent_of(pids[1]))
    begun, pids = cluster.world(4, 2)
    print(f"an agent: {begun - killed:.3f} s")
    cluster.world(5, 3)
    assert "was lost" in cluster.finish(3)


def test_host_comes_later_to_a_job_of_this_host_alone_and_leaves(cluster: Cluster) -> None:
    b = cluster.hosts[1].address
    cluster.are("localhost:1")
    cluster.start(*cluster.discovers(), "-np", "1", "--max-np", "2")
    cluster.world(1, 1)
    cluster.are("localhost:1", f"{b}:1")
    cluster.world(2, 2)
    cluster.are("localhost:1")
    cluster.world(3, 1)
    assert "was lost" not in cluster.finish(1)


def test_host_whose_agent_gets_sigterm_or_that_a_user_names_leaves_without_a_loss(cluster: Cluster) -> None:
    b, c = (host.address for host in cluster.hosts[1:])
    cluster.are("localhost:1", f"{b}:1", f"{c}:1")
    cluster.start(*cluster.discovers(), "-np", "3", "--min-np", "1", "--spares", "1")
    _, pids = cluster.world(1, 3)
    kill(agent_of(pids[1]), signal.SIGTERM)
    assert_gone([pids[1]])
    assert cluster.launcher.process is not None
    leave = ["leave", "--job", str(cluster.launcher.process.pid), "--host", c]
    done = cluster.hosts[0].run(sys.executable, "-m", "polyhvd.cli", *leave, capture_output=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert_gone([pids[2]])
    before = cluster.launcher.out.count(b"world")
    assert busy(cluster.launcher.process.pid) < 0.2  # for those that are left it has nothing to do
    cluster.are("localhost:1")
    cluster.is_heard()
    cluster.are("localhost:1", f"{b}:1")  # listed anew: it has come back
    while cluster.launcher.out.count(b"size 2 ", cluster.launcher.out.rfind(b"world")) == 0:
        cluster.launcher.wait_for("world", before + 1)
        before += 1
    err = cluster.finish(2)
    assert f"{b} leaves with notice" in err
    assert "was lost" not in err
    assert "was killed" not in err


def test_cable_that_is_cut_costs_the_heartbeat_s_time_and_the_host_comes_back(cluster: Cluster) -> None:
    b, c = (host.address for host in cluster.hosts[1:])
    cluster.start("-H", f"localhost:1,{b}:1,{c}:1", "-np", "3", "--min-np", "2", "--log-level", "info")
    _, pids = cluster.world(1, 3)
    cut = time.time()
    cluster.hosts[1].link("down")
    try:
        begun, _ = cluster.world(2, 2)
    finally:
        cluster.hosts[1].link("up")
    assert begun - cut < 15  # TCP takes 20 s; where nothing else runs it is less than 5
    print(f"a cable: {begun - cut:.3f} s")
    cluster.world(3, 3)
    assert_gone([pids[1]])
    err = cluster.finish(3)
    assert f"was lost: nothing was received from {b} for 4 s" in err
    assert "ended the job" not in err


#: Trains, and says with which status each process ends.
RESUMABLE = """
import os, pathlib, sys, time
import numpy as np
import polyhvd.numpy as hvd
from polyhvd.data import ArrayLoader

folder = pathlib.Path(sys.argv[1])
state = hvd.elastic.ArrayState(w=np.zeros(3), rows=0)

def step(batch):
    (x,) = batch
    state.w += hvd.allreduce(np.full(3, x.sum()), op=hvd.Sum, name="gradient")
    state.rows += int(hvd.allreduce(np.full(1, len(x)), op=hvd.Sum, name="rows")[0])
    time.sleep(0.01)
    if state.rows == 600:
        print("train", flush=True)
    if (folder / "ends").exists() and state.rows > int((folder / "ends").read_text()):
        print("end", state.rows, state.w.tolist() == 3 * [float(sum(range(state.rows)))], flush=True)
        raise SystemExit(0)

try:
    hvd.init()
    loader = ArrayLoader([np.arange(1000000.0)], batch_size=4, shuffle=False)
    hvd.elastic.train(step, state, loader, epochs=1, checkpoint=folder / "run", progress=False)
except SystemExit as end:
    with (folder / "statuses").open("a") as file:
        print(time.time(), end.code, os.environ["POLYHVD_MEMBER"], state.rows, file=file)
    raise
"""


def statuses(folder: Path) -> list[list[str]]:
    path = folder / "statuses"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def test_ranks_whose_launcher_s_host_is_cut_off_write_a_checkpoint_and_end_to_be_resumed(
    cluster: Cluster,
) -> None:
    b, c = (host.address for host in cluster.hosts[1:])
    cluster.program = cluster.launcher.script(RESUMABLE)
    hosts = ["-H", f"localhost:1,{b}:1,{c}:1", "-np", "3", "--min-np", "3"]
    cluster.start(*hosts, "--term-grace-s", "5")
    cluster.launcher.wait_for("train", 3)
    cut = time.time()
    cluster.hosts[0].link("down")
    try:
        wait_until(lambda: len(statuses(cluster.folder)) >= 2, "the end of two ranks")
        ended = statuses(cluster.folder)
    finally:
        cluster.hosts[0].link("up")
    assert [(status, member) for _, status, member, _ in sorted(ended, key=lambda row: row[2])] == [
        ("75", "1"),
        ("75", "2"),
    ]
    print(f"a launcher's host: {max(float(row[0]) for row in ended) - cut:.3f} s")
    assert max(float(row[0]) for row in ended) - cut < 15  # where nothing else runs it is less than 6
    assert cluster.launcher.process is not None
    cluster.launcher.process.kill()
    cluster.launcher.process.communicate()
    rows = max(int(row[3]) for row in ended)
    assert rows >= 600
    assert (cluster.folder / "run" / f"checkpoint-{rows // 12:012}.npz").exists()
    (cluster.folder / "ends").write_text(str(rows))
    cluster.start(*hosts)
    status, out, err = cluster.launcher.finish()
    assert (status, out.count(f"end {rows + 12} True\n")) == (0, 3), f"{out}\n{err}"


def test_host_that_is_unfit_is_refused_and_the_job_goes_on(cluster: Cluster) -> None:
    b, c = (host.address for host in cluster.hosts[1:])
    cluster.are("localhost:1")
    cluster.start(*cluster.discovers(), "-np", "1", "--max-np", "3")
    cluster.world(1, 1)
    cluster.are("127.0.0.9:1", "localhost:1", f"{b}:1", f"{c}:1")
    assert "127.0.0.9 cannot take part for now: refused: " in cluster.says("127.0.0.9 cannot take part")
    cluster.world(2, 3)
    cluster.finish(3)


@pytest.mark.parametrize("least", [1, 2])
def test_host_that_is_unfit_at_the_beginning_is_missed_where_it_is_needed(
    cluster: Cluster, least: int
) -> None:
    cluster.start("-H", "localhost:1,127.0.0.9:1", "-np", "2", "--min-np", str(least))
    if least == 1:
        cluster.world(1, 1)
        assert "127.0.0.9 cannot take part for now" in cluster.finish(1)
        return
    status, _, err = cluster.launcher.finish()
    assert status == 1
    assert "127.0.0.9 cannot take part for now: refused: " in err
    assert err.rstrip().endswith("polyhvdrun: the other hosts have 1 slots, fewer than --min-np 2")


@pytest.fixture
def silent_name_server(cluster: Cluster) -> Iterator[None]:
    """The launcher's host asks a name server that never answers."""
    launcher_host = cluster.hosts[0]
    folder = Path("/etc/netns") / launcher_host.name  # of which `ip netns exec` makes /etc
    folder.mkdir(parents=True)
    (folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:5 attempts:2\n")
    source = (
        "import socket, sys\n"
        "listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "listener.bind(('127.0.0.1', 53))\n"
        "print('listens', flush=True)\n"
        "sys.stdin.read()\n"
    )
    server = launcher_host.popen(sys.executable, "-c", source, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"listens\n"
        yield
    finally:
        server.kill()
        server.communicate()
        shutil.rmtree(folder)


@pytest.mark.usefixtures("silent_name_server")
def test_name_server_that_is_silent_when_a_host_is_added_costs_no_rank(cluster: Cluster) -> None:
    b = cluster.hosts[1].address
    cluster.are("localhost:1", f"{b}:1")
    cluster.start(*cluster.discovers(), "-np", "2", "--min-np", "2", "--max-np", "3")
    cluster.world(1, 2)
    cluster.are("localhost:1", f"{b}:1", "node3.cluster:1")
    cluster.says("node3.cluster cannot take part for now: ")
    err = cluster.finish(2)
    assert "was lost" not in err
    assert "nothing was received" not in err
