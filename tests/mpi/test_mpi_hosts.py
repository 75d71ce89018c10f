"""One mpirun over two hosts."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import jobs
import launching
import pytest
from mpi_hosts import Hosts, hosts

pytestmark = pytest.mark.slow

__all__ = ["hosts"]

WORKS = (
    jobs.SAY
    + """
import socket
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


def results(out: str) -> Sequence[str]:
    return sorted(re.findall(r"rank (\d on .*)", out))


@pytest.mark.parametrize("backends", ["host", "mpi"])
def test_ranks_share_memory_within_their_host_alone(hosts: Hosts, tmp_path: Path, backends: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(WORKS)
    status, out, err = hosts.run(script, POLYHVD_BACKENDS=backends)
    assert status == 0, out + err
    carried = "False True True" if backends == "host" else "True False False"
    assert results(out) == [
        f"{rank} on {host.name} {local} 2 {across} 2 {carried}"
        for across, host in enumerate((hosts.first, hosts.second))
        for local, rank in enumerate((2 * across, 2 * across + 1))
    ], out + err


NAMELESS = (
    jobs.SAY
    + """
import socket
import numpy as np, polyhvd.numpy as hvd
socket.gethostname = lambda: f"nobody-knows-{os.getpid()}"
try:
    hvd.init()
    say("worked")
except hvd.HorovodInternalError as error:
    say("raised", error)
    raise
"""
)


def test_hosts_that_names_do_not_lead_to_need_an_interface(hosts: Hosts, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(NAMELESS)
    status, out, err = hosts.run(script)
    assert status != 0
    assert re.search(r"raised .*no route to nobody-knows-\d+; name an interface .*POLYHVD_GLOO_IFACE", out), (
        out + err
    )
    status, out, err = hosts.run(script, POLYHVD_GLOO_IFACE="eth0")
    assert (status, out.count("worked")) == (0, 4), out + err


BUSY = (
    jobs.SAY
    + """
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
