"""The one adapter of this process and its collectives, for the other modules of this folder."""

from __future__ import annotations

from typing import Any

import torch
from polyhvd.torch.adapter import TorchAdapter

from polyhvd.collectives.operation import is_number
from polyhvd.collectives.verbs import Collectives
from polyhvd.runtime import current
from polyhvd.training.compression import Compression as _Compression

__all__ = ["Compression", "adapter", "as_tensor", "collectives", "increment_version", "poll", "synchronize"]

adapter = TorchAdapter()
collectives: Collectives[torch.Tensor] = Collectives(adapter)
Compression = _Compression(adapter)


def _prepare() -> None:
    """The first optimizer of a process has PyTorch import its compiler, which takes a second."""
    torch.optim.SGD([torch.zeros(1)], lr=0.1)


current.on_wait(_prepare)


def as_tensor(value: Any) -> torch.Tensor:
    """A number of Python's or NumPy's as a tensor without dimensions; all else as it is."""
    return torch.as_tensor(value) if is_number(value) else value


poll = collectives.poll
synchronize = collectives.synchronize

# Marks a tensor as written to for autograd: a backward that needs its old values then fails.
increment_version: Any = getattr(torch.autograd.graph, "increment_version", torch._C._increment_version)
