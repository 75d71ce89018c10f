"""One mpirun over two hosts: network namespaces with names of their own, and a stand-in for ssh."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jobs
import launching
import netns
import pytest
from netns import Namespace

#: Runs a command on the host that is named, as ssh does.
SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
inside='mount --bind HOSTS /etc/hosts; hostname "$1"; exec sh -c "$2"'
exec ip netns exec "$host" unshare --uts sh -c "$inside" sh "$host" "$*"
"""


@dataclass(frozen=True)
class Hosts:
    """Two hosts on which jobs of two ranks each run."""

    first: Namespace
    second: Namespace
    ssh: Path

    def start(self, script: Path, *arguments: str, **settings: str) -> subprocess.Popen[str]:
        """Begin a job of four ranks from the first host."""
        launchers = {
            **{f"OMPI_MCA_{name}": "eth0" for name in ("oob_tcp_if_include", "btl_tcp_if_include")},
            **{"OMPI_MCA_plm_rsh_agent": str(self.ssh), "PRTE_MCA_plm_ssh_agent": str(self.ssh)},
            **{"PRTE_MCA_prte_if_include": "eth0", "HYDRA_IFACE": "eth0"},
            **{"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": str(self.ssh)},
        }
        command = [sys.executable, "-m", "polyhvd.launch", "--mpi", "-np", "4"]
        command += ["-H", f"{self.first.name}:2,{self.second.name}:2"]
        command += [sys.executable, str(script), *arguments]
        return subprocess.Popen(
            [
                str(self.ssh),
                self.first.name,
                shlex.join(["cd", str(jobs.ROOT)]) + "; exec " + shlex.join(command),
            ],
            env=jobs.environment(POLYHVD_FLIGHT_DIR=str(script.parent), **launchers, **settings),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script: Path, *arguments: str, **settings: str) -> tuple[int, str, str]:
        """Run one to its end; returns exit status, standard output and error."""
        with self.start(script, *arguments, **settings) as process:
            try:
                out, err = process.communicate(timeout=60)
            finally:
                process.kill()
        return process.returncode, out, err


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if not netns.available() or shutil.which("unshare") is None:
        pytest.skip("network namespaces need root and iproute2")
    folder = tmp_path_factory.mktemp("hosts")
    with netns.two_hosts() as (first, second):
        known = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in (first, second))
        (folder / "hosts").write_text(known)
        ssh = folder / "ssh"
        ssh.write_text(SSH.replace("HOSTS", str(folder / "hosts")))
        ssh.chmod(0o755)
        yield Hosts(first, second, ssh)


WORKS = (
    jobs.SAY
    + """
import socket, sys
import numpy as np, polyhvd.numpy as hvd
hvd.init()
rank, size = hvd.rank(), hvd.size()
ours = np.arange(100_000) * (rank + 1.0)
for _ in range(3):
    assert (hvd.allreduce(ours, op=hvd.Sum) == np.arange(100_000) * 10.0).all()
assert (hvd.allgather(np.full((rank + 1, 2), rank))[:, 0] == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3]).all()
assert (hvd.broadcast(ours, root_rank=3) == np.arange(100_000) * 4.0).all()
for members in ([1, 2], [0, 1]):
    some = hvd.add_process_set(members)
    if some.included():
        assert (hvd.allreduce(np.ones(3), op=hvd.Sum, process_set=some) == 2).all()
hvd.barrier()
place = (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
moved = hvd.counters()
said = {name: moved[name + "_bytes"] > 0 for name in ("mpi", "shm")}
say("rank", rank, "on", socket.gethostname(), *place, *said.values(), moved["tcp_bytes_sent"] > 0)
"""
)


def told(out: str) -> Sequence[str]:
    return sorted(re.findall(r"rank (\d on .*)", out))


@pytest.mark.parametrize("backends", ["host", "mpi"])
def test_ranks_share_memory_within_their_host_alone(hosts: Hosts, tmp_path: Path, backends: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(WORKS)
    status, out, err = hosts.run(script, POLYHVD_BACKENDS=backends)
    assert status == 0, out + err
    carried = "False True True" if backends == "host" else "True False False"
    assert told(out) == [
        f"{rank} on {host.name} {local} 2 {across} 2 {carried}"
        for across, host in enumerate((hosts.first, hosts.second))
        for local, rank in enumerate((2 * across, 2 * across + 1))
    ], out + err


NAMELESS = (
    jobs.SAY
    + """
import socket, sys
import numpy as np, polyhvd.numpy as hvd
socket.gethostname = lambda: f"nobody-knows-{os.getpid()}"
try:
    hvd.init()
    say("worked")
except hvd.HorovodInternalError as error:
    say("told", error)
    raise
"""
)


def test_hosts_that_names_do_not_lead_to_need_an_interface(hosts: Hosts, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(NAMELESS)
    status, out, err = hosts.run(script)
    assert status != 0
    assert re.search(r"told .*no route to nobody-knows-\d+; name an interface .*POLYHVD_GLOO_IFACE", out), (
        out + err
    )
    status, out, err = hosts.run(script, POLYHVD_GLOO_IFACE="eth0")
    assert (status, out.count("worked")) == (0, 4), out + err


BUSY = (
    jobs.SAY
    + """
import socket, sys
import numpy as np, polyhvd.numpy as hvd
hvd.init()
while True:
    hvd.allreduce(np.ones(1 << 16), name="x")
    say("pid", os.getpid(), "of", hvd.rank())
"""
)


def test_nothing_is_left_on_either_host_when_a_rank_is_killed(hosts: Hosts, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(BUSY)
    process = hosts.start(script, POLYHVD_BACKENDS="mpi")
    assert process.stdout is not None
    try:
        ranks: dict[str, int] = {}
        while len(ranks) < 4:
            line = process.stdout.readline()
            assert line, "the job ended early"
            ranks.update({rank: int(pid) for pid, rank in re.findall(r"pid (\d+) of (\d)", line)})
        os.kill(ranks["3"], signal.SIGKILL)
        process.communicate(timeout=30)
        assert process.returncode != 0
        launching.assert_gone(sorted(ranks.values()))
    finally:
        process.kill()
        process.wait()
