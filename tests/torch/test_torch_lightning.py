"""Lightning's Trainer on two ranks: against the plain Trainer on the joined batch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from on_ranks import Functions
from pool import Pool

cases = Functions("torch_lightning_cases")

pytestmark = [
    pytest.mark.sizes(2),
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="Lightning is not installed"),
]

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


@pytest.mark.parametrize(
    "arguments",
    [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.3}, {"precision": "bf16-mixed"}],
    ids=["plain", "accumulate", "clip", "bf16"],
)
def test_training_is_that_of_one_process_on_the_joined_batch(ranks: Pool, arguments: dict[str, Any]) -> None:
    ranks.run(cases.trains_like_one_process, arguments)


def test_batches_that_make_no_step_exchange_nothing(ranks: Pool) -> None:
    ranks.run(cases.accumulates_without_exchanges)


def test_sync_batchnorm_of_the_trainer_normalizes_over_all_ranks(ranks: Pool) -> None:
    ranks.run(cases.batch_norm_is_that_of_the_joined_batch)


def test_two_optimizers_are_stepped_by_hand(ranks: Pool) -> None:
    ranks.run(cases.manual_optimization_of_two_optimizers)


def test_logged_metrics_are_those_of_all_ranks(ranks: Pool) -> None:
    ranks.run(cases.metrics_are_those_of_all_ranks)


def test_the_strategy_exchanges_and_refuses_with_advice(ranks: Pool) -> None:
    ranks.run(cases.exchanges_of_the_strategy)


def test_rank_0_writes_checkpoints_and_all_resume_from_its_state(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(cases.resumes_from_a_checkpoint, str(tmp_path))


def test_without_the_launcher_a_trainer_of_the_older_package_is_a_world_of_one(tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "RESULT 1 1 [0.5, 0.5, 0.5]" in done.stdout
