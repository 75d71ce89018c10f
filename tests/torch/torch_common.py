"""What the cases share, on the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import polyhvd.torch as hvd
import torch

torch.set_num_threads(1)
Tensor = torch.Tensor
ROWS = 4  # of each rank's batch


def rank_tensor(*shape: int, dtype: torch.dtype = torch.float32, rank: int | None = None) -> Tensor:
    """Different values on each rank, and small enough for exact sums."""
    rank = hvd.rank() if rank is None else rank
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(1, 9, shape, generator=generator).to(dtype)


def everyones(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """``rank_tensor`` of every rank."""
    return [rank_tensor(*shape, dtype=dtype, rank=rank) for rank in range(hvd.size())]


def batches(steps: int, inputs: int = 5, outputs: int = 2) -> list[tuple[Tensor, Tensor]]:
    """Joined batches of all ranks, the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    rows = ROWS * hvd.size()
    return [
        (torch.randn(rows, inputs, generator=generator), torch.randn(rows, outputs, generator=generator))
        for _ in range(steps)
    ]


def own(tensor: Tensor, rank: int | None = None) -> Tensor:
    """This rank's rows of a joined batch."""
    rank = hvd.rank() if rank is None else rank
    return tensor[rank * ROWS : (rank + 1) * ROWS]


def model(seed: int = 0) -> torch.nn.Sequential:
    """The same weights for the same seed."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))


def loss_of(module: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Mean squared error: the mean of the ranks' losses is the loss of the joined batch."""
    return (module(x) - y).square().mean()


def assert_close(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    """Parameters are equal but for rounding."""
    for (name, a), b in zip(found.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def assert_same_bits(value: Any) -> None:
    """Tensors, or a module's parameters and gradients, are the same on every rank."""
    if isinstance(value, torch.nn.Module):
        value = [t for p in value.parameters() for t in (p, p.grad)]
    mine = [None if t is None else bytes(t.detach().contiguous().view(-1).view(torch.uint8)) for t in value]
    for rank, theirs in enumerate(hvd.allgather_object(mine, name="bits")):
        assert theirs == mine, f"rank {rank} has other bits"


@contextlib.contextmanager
def raises(kind: type[BaseException], *parts: str) -> Iterator[None]:
    """The block raises an error of this kind, whose message has these parts."""
    message = None
    try:
        yield
    except kind as error:
        message = str(error)
    assert message is not None, f"did not raise {kind.__name__}"
    for part in parts:
        assert part in message, f"{part!r} is not in: {message}"


def assert_usable() -> None:
    """The job goes on."""
    result = hvd.allreduce(torch.ones(3), op=hvd.Sum, name="usable")
    assert result.tolist() == [hvd.size()] * 3
