"""A Trainer of Hugging Face's transformers on several ranks: a small BERT finds the largest number.

polyhvdrun -np 2 python examples/hugging_face_trainer.py --epochs 3

It needs: pip install transformers accelerate
"""

from __future__ import annotations

import argparse
from typing import Any

import polyhvd.torch as hvd
import torch
from torch.utils.data import Dataset, Subset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class DistributedTrainer(Trainer):
    """A Trainer whose gradients are the average over all ranks; each rank passes its own part of the data."""

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """The Trainer's optimizer, wrapped; ranks begin with the weights of rank 0."""
        if self.optimizer is None:
            hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
            self.optimizer = hvd.DistributedOptimizer(
                super().create_optimizer(*args, **kwargs),
                backward_passes_per_step=self.args.gradient_accumulation_steps,
            )
        return self.optimizer

    def is_world_process_zero(self) -> bool:
        """Only rank 0 prints and saves."""
        return hvd.rank() == 0


class Numbers(Dataset):
    """Rows of eight different numbers; the label is the place of the largest."""

    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._rows = torch.stack([torch.randperm(32, generator=generator)[:8] for _ in range(rows)])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[row], "labels": self._rows[row].argmax()}


def main() -> None:
    """Train, and print the loss of each epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="rows of a rank in a step")
    parser.add_argument("--accumulate", type=int, default=1, help="batches of a step of the optimizer")
    parser.add_argument("--in-order", action="store_true", help="do not shuffle the rows")
    parser.add_argument("--output", default="hugging-face-output", help="folder for checkpoints")
    options = parser.parse_args()

    hvd.init()
    torch.manual_seed(hvd.rank())
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(vocab_size=32, num_labels=8, **sizes, **no_dropout))
    data = Numbers(512)
    rows = range(hvd.rank(), len(data) // hvd.size() * hvd.size(), hvd.size())  # as many on each rank
    arguments = TrainingArguments(
        output_dir=options.output,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch_size,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=3e-3,
        train_sampling_strategy="sequential" if options.in_order else "random",
        use_cpu=not torch.cuda.is_available(),
        logging_strategy="epoch",
        save_strategy="epoch" if hvd.rank() == 0 else "no",
        disable_tqdm=True,
        report_to="none",
    )
    trainer = DistributedTrainer(model, arguments, train_dataset=Subset(data, rows))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    total = sum(float(parameter.detach().double().abs().sum()) for parameter in model.parameters())
    print(
        f"rank {hvd.rank()} of {hvd.size()}: loss {float(losses[0]):.4f} to {float(losses[-1]):.4f}, "
        f"weights {total:.4f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
