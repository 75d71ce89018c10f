"""Jobs that ``accelerate launch`` of Hugging Face has started. The matrix has an environment with it."""

from __future__ import annotations

import os
import secrets
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
from joining import free_port

ACCELERATE = os.environ.get("ACCELERATE", "")
#: What it would ask for; two processes without GPUs are what it has no word for but this.
OPTIONS = ("--multi_gpu", "--mixed_precision", "no", "--dynamo_backend", "no")
DEADLINE_S = 240.0
TRAINS = """
import polyhvd.torch as hvd
import torch

hvd.init()
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.constant_(model.weight, 1.0 + hvd.rank())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
model(torch.tensor([[1.0 + hvd.rank()]])).sum().backward()
optimizer.step()
line = f"rank {hvd.rank()} of {hvd.size()} local {hvd.local_rank()} of {hvd.local_size()}"
print(f"{line} weight {model.weight.item():.2f}\\n", end="", flush=True)
"""

pytestmark = pytest.mark.skipif(
    not ACCELERATE, reason="ACCELERATE names no accelerate; tools/matrix.py accelerate"
)


def launch(stack: ExitStack, folder: Path, *options: str, **variables: str) -> subprocess.Popen[str]:
    script = folder / "train.py"
    script.write_text(TRAINS)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("POLYHVD_", "HOROVOD_"))
    }
    process = subprocess.Popen(
        [ACCELERATE, "launch", *OPTIONS, *options, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**environment, "HF_HOME": str(folder), **variables},
    )
    stack.callback(process.wait, 10)
    stack.callback(process.kill)
    return process


def lines(output: str) -> list[str]:
    return sorted(line for line in output.splitlines() if line.startswith("rank "))


def test_two_processes_of_one_host_are_two_ranks(tmp_path: Path) -> None:
    with ExitStack() as stack:
        process = launch(stack, tmp_path, "--num_processes", "2", "--num_machines", "1")
        output = process.communicate(timeout=DEADLINE_S)[0]
    assert process.returncode == 0, output
    assert lines(output) == [f"rank {rank} of 2 local {rank} of 2 weight 0.85" for rank in range(2)], output


@pytest.mark.parametrize("has_secret", [True, False])
def test_two_machines_are_one_job_that_needs_a_secret(tmp_path: Path, has_secret: bool) -> None:
    variables = {"POLYHVD_SECRET": secrets.token_hex(32)} if has_secret else {}
    meet = ("--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port()))
    counts = ("--num_processes", "4", "--num_machines", "2")
    with ExitStack() as stack:
        machines = [
            launch(stack, tmp_path, *counts, *meet, "--machine_rank", str(rank), **variables)
            for rank in range(2)
        ]
        outputs = [machine.communicate(timeout=DEADLINE_S)[0] for machine in machines]
    said = "\n".join(outputs)
    if not has_secret:
        assert all(machine.returncode for machine in machines), said
        assert "export POLYHVD_SECRET_FILE=" in said
        assert lines(said) == []
        return
    assert [machine.returncode for machine in machines] == [0, 0], said
    assert [line.split(" local")[0] for line in lines(said)] == [f"rank {rank} of 4" for rank in range(4)], (
        said
    )
    assert all(line.endswith("weight 0.75") for line in lines(said)), said
