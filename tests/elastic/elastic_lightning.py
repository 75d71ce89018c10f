"""A Trainer of Lightning in an elastic job. Arguments: a folder, and RANK:STEP at which ranks are killed."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
import polyhvd.lightning as hvd
import torch
from torch.utils.data import DataLoader, TensorDataset

from polyhvd.data import DistributedBatchSampler

FOLDER, KILLS = Path(sys.argv[1]), sys.argv[2:]
ROWS = 107
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")
hvd.init()

torch.manual_seed(7)
x = torch.randn(ROWS, 5)
rows = TensorDataset(x, x.sum(1, keepdim=True), torch.arange(ROWS))


class Regression(lightning.LightningModule):
    def __init__(self, sampler: DistributedBatchSampler) -> None:
        super().__init__()
        self.sampler = sampler
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
        self.register_buffer("counts", torch.zeros(ROWS))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets, numbers = batch
        text = f"{hvd.rank()}:{self.global_step}"
        if text in KILLS and not (FOLDER / f"killed {text}").exists():
            (FOLDER / f"killed {text}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        mine = torch.zeros(ROWS)
        mine[numbers] += 1.0
        self.counts += hvd.allreduce(mine, op=hvd.Sum, name="counts")
        return self.sampler.weight * (self.net(inputs) - targets).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


@hvd.elastic.run
def train(state: Any) -> None:
    loader = DataLoader(rows, batch_sampler=state.sampler)
    state.trainer.fit(state.module, loader, ckpt_path=state.ckpt_path)


def trained() -> str:
    sampler = DistributedBatchSampler(rows, batch_size=4, seed=3)
    module = Regression(sampler)
    trainer = lightning.Trainer(
        strategy="polyhvd",
        accelerator="cpu",
        max_epochs=3,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
    )
    train(hvd.elastic.LightningState(trainer, module, sampler=sampler))
    weights = b"".join(p.detach().numpy().tobytes() for p in module.parameters())
    digest = hashlib.sha256(weights).hexdigest()[:16]
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    counts = sorted(set(module.counts.tolist()))
    return (
        f"{digest} counts {counts} steps {trainer.global_step} epochs {trainer.current_epoch} rate {rate:.5f}"
    )


print("end", trained(), flush=True)
print("undisturbed", trained(), flush=True)
