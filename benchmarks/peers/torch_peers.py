"""PyTorch: polyhvd, Horovod, torch.distributed on gloo with DDP, and a single rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.peers.base import Call, Meets, Peer, Reducer, plain_place
from benchmarks.peers.hvd import Hvd
from benchmarks.peers.torch_models import MODELS
from benchmarks.workloads import Workload

torch.set_num_threads(1)


class Tensors:
    """How tensors are made, filled and read."""

    def make(self, elements: int, dtype: str, value: int) -> Any:
        return torch.full((elements,), value, dtype=getattr(torch, dtype))

    def fill(self, tensor: Any, value: int) -> Any:
        return tensor.fill_(value)

    def ends(self, tensor: Any) -> tuple[float, float]:
        return float(tensor[0]), float(tensor[-1])


def training_step(name: str, wrap: Callable[[Any, Any], tuple[Any, Any]]) -> Call | None:
    """Forward, backward and update of a model; `wrap` makes model and optimizer distributed."""
    if name not in MODELS:
        return None
    torch.manual_seed(1)
    model, inputs, targets = MODELS[name]()
    model, optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9))
    loss = torch.nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()

    return step


class HvdTorch(Tensors, Hvd):
    """Tensors through Horovod's API, and its DistributedOptimizer."""

    def call(self, workload: Workload) -> Call | None:
        if workload.path != "step":
            return super().call(workload)

        def wrap(model: Any, optimizer: Any) -> tuple[Any, Any]:
            self.hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            names = [(f"{workload.model}.{name}", p) for name, p in model.named_parameters()]
            return model, self.hvd.DistributedOptimizer(optimizer, named_parameters=names)

        return training_step(workload.model, wrap)


class PolyhvdTorch(HvdTorch):
    """polyhvd.torch."""

    def __init__(self) -> None:
        import polyhvd.torch

        self.start(polyhvd.torch)


class Horovod(HvdTorch):
    """Horovod itself, on what its launcher has chosen; the same calls."""

    def __init__(self) -> None:
        import horovod.torch

        self.start(horovod.torch)


class TorchAlone(Peer):
    """The same steps with no communication."""

    def __init__(self) -> None:
        self.rank, self.size = plain_place()

    def call(self, workload: Workload) -> Call | None:
        return training_step(workload.model, lambda model, optimizer: (model, optimizer))


class TorchMeeting(Meets, TorchAlone):
    """Ranks that wait for each other after each step: what a step is longer is communication's price."""


class Gloo(Tensors, Reducer):
    """torch.distributed on gloo, and DistributedDataParallel."""

    def __init__(self) -> None:
        import torch.distributed

        self.dist = torch.distributed
        self.rank, self.size = plain_place()
        self.dist.init_process_group(
            "gloo",
            init_method=f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
            rank=self.rank,
            world_size=self.size,
        )

    def blocking(self, tensors: list[Any], name: str) -> list[Any]:
        self.dist.all_reduce(tensors[0])
        return tensors

    def separate(self, tensors: list[Any], name: str) -> list[Any]:
        for work in [self.dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()
        return tensors

    def packed(self, tensors: list[Any], name: str) -> list[Any]:
        buffer = torch.cat(tensors)
        self.dist.all_reduce(buffer)
        for tensor, value in zip(tensors, buffer.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(value)
        return tensors

    def paths(self) -> dict[str, Callable[[list[Any], str], Any]]:
        return {
            "blocking": self.blocking,
            "async": self.separate,
            "separate": self.separate,
            "grouped": self.packed,
        }

    def call(self, workload: Workload) -> Call | None:
        if workload.path != "step":
            return super().call(workload)
        ddp = torch.nn.parallel.DistributedDataParallel
        return training_step(workload.model, lambda model, optimizer: (ddp(model), optimizer))

    def close(self) -> None:
        self.dist.destroy_process_group()
