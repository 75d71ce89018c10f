"""A CNN on handwritten digits, as one writes it for Horovod. Only the import is ours."""

from __future__ import annotations

import argparse
from pathlib import Path

import polyhvd.torch as hvd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--base-lr", type=float, default=0.04)
parser.add_argument("--batches-per-allreduce", type=int, default=1)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--checkpoints", type=Path, required=True)
parser.add_argument("--seed", type=int, default=42)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.dropout = nn.Dropout2d(0.05)
        self.fc1 = nn.Linear(64, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.dropout(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


class Metric:
    """The average of a figure over all ranks and batches."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sum = torch.tensor(0.0)
        self.n = torch.tensor(0.0)

    def update(self, value: torch.Tensor) -> None:
        self.sum += hvd.allreduce(value.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def avg(self) -> torch.Tensor:
        return self.sum / self.n


def main() -> None:
    args = parser.parse_args()
    hvd.init()
    assert hvd.gloo_built() or hvd.mpi_built()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)

    # The last epoch that has a checkpoint; rank 0 looks, and all must agree.
    resume_from_epoch = 0
    for epoch in range(args.epochs, 0, -1):
        if (args.checkpoints / f"epoch-{epoch - 1}.pt").exists():
            resume_from_epoch = epoch
            break
    resume_from_epoch = hvd.broadcast(
        torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch"
    ).item()

    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(
        torch.tensor(images / 16.0, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)
    )
    train = torch.utils.data.Subset(data, range(1400))
    test = torch.utils.data.Subset(data, range(1400, len(data)))
    train_sampler = DistributedSampler(train, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(train, batch_size=args.batch_size, sampler=train_sampler)
    test_sampler = DistributedSampler(test, num_replicas=hvd.size(), rank=hvd.rank())
    test_loader = DataLoader(test, batch_size=args.batch_size, sampler=test_sampler)

    model = Net()
    lr_scaler = args.batches_per_allreduce * hvd.size()
    optimizer = optim.SGD(model.parameters(), lr=args.base_lr * lr_scaler, momentum=0.9)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        backward_passes_per_step=args.batches_per_allreduce,
        op=hvd.Average,
        gradient_predivide_factor=1.0,
    )
    if resume_from_epoch > 0 and hvd.rank() == 0:
        checkpoint = torch.load(args.checkpoints / f"epoch-{resume_from_epoch - 1}.pt")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(resume_from_epoch, args.epochs):
        model.train()
        train_sampler.set_epoch(epoch)
        train_loss = Metric("train_loss")
        for batch, target in train_loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(batch), target)
            loss.backward()
            optimizer.step()
            train_loss.update(loss)
        model.eval()
        test_accuracy = Metric("test_accuracy")
        with torch.no_grad():
            for batch, target in test_loader:
                test_accuracy.update((model(batch).argmax(1) == target).float().mean())
        print(f"epoch {epoch} loss {train_loss.avg:.4f} accuracy {test_accuracy.avg:.4f}", flush=True)
        if hvd.rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, args.checkpoints / f"epoch-{epoch}.pt")


if __name__ == "__main__":
    main()
