"""Jobs that a real torchrun starts, on one host and on two."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import netns
import pytest
from joining import SECRET, TORCHRUN, WORK, Job, environment, free_port

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")

#: As a script of torch does, which has a world of torch's own beside this one.
TORCH_WORK = """
import os
import torch
import torch.distributed
import polyhvd.torch as hvd
torch.distributed.init_process_group("gloo")
hvd.init()
total = hvd.allreduce(torch.ones(3) * (hvd.rank() + 1), op=hvd.Sum)
same = torch.ones(3) * (torch.distributed.get_rank() + 1)
torch.distributed.all_reduce(same)
place = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
os.write(1, (" ".join(map(str, ["place", *place, "sum", total[0].item()])) + "\\n").encode())
assert torch.equal(total, same)
torch.distributed.destroy_process_group()
"""
#: Rank 1 fails in the first incarnation, when all have met; the second one meets anew.
RESTARTED = (
    WORK
    + """
import sys, time
first = not os.path.exists(sys.argv[1])
hvd.allreduce(np.ones(1))
if first and hvd.rank() == 1:
    open(sys.argv[1], "x").close()
    sys.exit(3)
if first:
    time.sleep(60)
os.write(1, ("restarts " + os.environ["TORCHELASTIC_RESTART_COUNT"] + "\\n").encode())
"""
)


def script(folder: Path, source: str, name: str = "train") -> str:
    path = folder / f"{name}.py"
    path.write_text(source)
    return str(path)


def printed(outputs: Sequence[tuple[int, str, str]], word: str) -> list[str]:
    return sorted(line for _, out, _ in outputs for line in out.splitlines() if line.startswith(word))


def test_two_jobs_at_once_need_no_secret_on_one_host(tmp_path: Path) -> None:
    """One of three ranks that are restarted, and one that has a world of torch's own beside ours."""
    with Job() as job:
        options = ["--standalone", "--nproc-per-node", "3", "--max-restarts", "1"]
        command = [*TORCHRUN, *options, script(tmp_path, RESTARTED, "restarted"), str(tmp_path / "mark")]
        job.start(command, environment())
        options = ["--nproc-per-node", "2", "--master-port", str(free_port())]
        job.start([*TORCHRUN, *options, script(tmp_path, TORCH_WORK, "beside")], environment())
        outputs = job.finish()
    assert [status for status, _, _ in outputs] == [0, 0], outputs
    restarted, beside = outputs
    assert printed([restarted], "restarts") == ["restarts 1"] * 3
    assert printed([restarted], "place")[::2] == [f"place {rank} 3 {rank} 3 0 1 sum 6.0" for rank in range(3)]
    assert printed([beside], "place") == [f"place {rank} 2 {rank} 2 0 1 sum 3.0" for rank in range(2)]


@pytest.mark.slow
@pytest.mark.skipif(not netns.available(), reason="needs network namespaces, which root can make")
def test_two_hosts_meet_by_a_secret_also_when_their_agents_count_restarts_differently(tmp_path: Path) -> None:
    """An agent counts the failures of its own ranks, and not that it has joined a new round."""
    with netns.two_hosts() as hosts, Job() as job:
        for number, host in enumerate(hosts):
            options = [
                *("--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "2", "--rdzv-backend", "c10d"),
                *("--rdzv-endpoint", f"{hosts[0].address}:29555", "--rdzv-id", "job"),
                *("--rdzv-conf", f"is_host={1 - number}", "--local-addr", host.address),
            ]
            command = [*TORCHRUN, *options, script(tmp_path, RESTARTED), str(tmp_path / "mark")]
            job.start(host.command(*command), environment(POLYHVD_SECRET=SECRET))
        outputs = job.finish()
    assert [status for status, _, _ in outputs] == [0, 0], outputs
    assert printed(outputs, "restarts") == ["restarts 0"] * 2 + ["restarts 1"] * 2
    assert printed(outputs, "place")[::2] == [
        f"place {rank} 4 {rank % 2} 2 {rank // 2} 2 sum 10.0" for rank in range(4)
    ]
