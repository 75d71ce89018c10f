"""Jobs of their own: a script written for Horovod, a Trainer without the launcher, a rank that is killed."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fork_servers import IMPORTS, SETTINGS, ForkServers
from pool import Pool, PoolSpec

from polyhvd.testing.stand_ins import is_installed

HERE = Path(__file__).resolve().parent
pytestmark = pytest.mark.skipif(not is_installed("torch"), reason="torch is not installed")

ALONE = """
import pytorch_lightning
import torch
import polyhvd.lightning as hvd

class Model(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))
    def training_step(self, batch, index):
        return (self.weight - batch).square().sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.25)

model, options = Model(), {"logger": False, "enable_checkpointing": False}
trainer = pytorch_lightning.Trainer(strategy="horovod", accelerator="cpu", max_epochs=1, **options)
trainer.fit(model, torch.utils.data.DataLoader(torch.ones(1, 3)))
print("RESULT", hvd.size(), trainer.world_size, model.weight.tolist())
"""


def test_a_script_for_horovod_runs_with_another_import(fork_servers: ForkServers, tmp_path: Path) -> None:
    """Two epochs, then two more from the checkpoint: it resumes, learns, and ranks agree on every figure."""
    figures = []
    for epochs in ("2", "4"):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "polyhvd.launch", "-np", "2"),
                *(*fork_servers.python(2, IMPORTS["torch"]), str(HERE / "horovod_script.py")),
                *("--epochs", epochs),
                *("--checkpoints", str(tmp_path)),
            ],
            cwd=HERE.parents[1],
            env={**os.environ, **SETTINGS},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        figures.append([line.split("] ", 1)[1] for line in done.stdout.splitlines() if "accuracy" in line])
    first, second = figures
    assert sorted(first) == sorted(2 * sorted({*first}))
    assert {line.split()[1] for line in first} == {"0", "1"}
    assert {line.split()[1] for line in second} == {"2", "3"}, "the second run has not resumed"
    assert len({*second}) == 2, "the ranks disagree"
    accuracy = max(float(line.split()[-1]) for line in second)
    assert accuracy > 0.8
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"epoch-{n}.pt" for n in range(4)]


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="Lightning is not installed")
def test_without_the_launcher_a_trainer_of_the_older_package_is_a_world_of_one(
    fork_servers: ForkServers, tmp_path: Path
) -> None:
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    done = subprocess.run(
        [*fork_servers.python(1, IMPORTS["torch"]), str(script)],
        cwd=tmp_path,
        env={**os.environ, **SETTINGS},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "RESULT 1 1 [0.5, 0.5, 0.5]" in done.stdout


@pytest.mark.parametrize("size", [2, 3])
def test_a_lost_rank_is_an_error_in_both_threads(fork_servers: ForkServers, size: int) -> None:
    victim = size - 1
    with Pool(PoolSpec("torch", (size,)), fork_servers) as pool:
        pool.start("test_torch_threads:threads_that_lose_a_rank", victim)
        for _ in range(2):
            pool.note(victim)
        pool.signal(victim, signal.SIGKILL)
        for rank in range(victim):
            assert all(f"rank {victim}" in text for text in pool.answer(rank))
