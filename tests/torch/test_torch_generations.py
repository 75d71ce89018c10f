"""Backward passes, handles and optimizers across shutdown() and init()."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import polyhvd.torch as hvd
import pytest
import torch
from torch_common import raises

pytestmark = pytest.mark.ranks(2, 3, framework="torch")

Tensor = torch.Tensor


def rewire() -> int:
    """Begin another world; how many operations it has had."""
    hvd.shutdown()
    hvd.init()
    hvd.barrier()
    return hvd.counters()["operations"]


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "allreduce": lambda x: hvd.allreduce(x, op=hvd.Sum, name="x"),
    "no name": lambda x: hvd.allreduce(x, op=hvd.Sum),
    "allgather": lambda x: hvd.allgather(x, name="x"),
    "broadcast": lambda x: hvd.broadcast(x, 0, name="x"),
    "alltoall": lambda x: hvd.alltoall(x, name="x"),
    "reducescatter": lambda x: hvd.reducescatter(x, op=hvd.Sum, name="x"),
    "batch norm": lambda x: hvd.SyncBatchNorm(2)(x.view(-1, 2)),
}


@pytest.mark.parametrize(
    "kind", ["allreduce", "no name", "allgather", "broadcast", "alltoall", "reducescatter", "batch norm"]
)
def test_a_backward_of_the_old_world_is_lost(kind: str) -> None:
    x = torch.full((2 * hvd.size(),), hvd.rank() + 1.0, requires_grad=True)
    y = CALLS[kind](x).sum()
    before = rewire()
    with raises(hvd.PeerLostError, "which has ended"):
        y.backward()
    assert hvd.counters()["operations"] == before
    CALLS[kind](x).sum().backward()
    assert x.grad is not None


def test_a_second_derivative_of_the_old_world_is_lost() -> None:
    x = torch.ones(2, requires_grad=True)
    y = hvd.allreduce(x, op=hvd.Sum, name="x").square().sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    rewire()
    with raises(hvd.PeerLostError, "which has ended"):
        slope.sum().backward()


def test_a_handle_of_the_old_world_fails() -> None:
    handle = hvd.allreduce_async(torch.ones(2), name=f"of {hvd.rank()} alone")
    done = hvd.allreduce_async(torch.ones(2), name="of all", op=hvd.Sum)
    with contextlib.suppress(hvd.PeerDepartedError):  # others may have left by now, as this one will
        assert hvd.synchronize(done)[0] == hvd.size()
    rewire()
    assert hvd.poll(handle)
    with raises((hvd.ShutdownError, hvd.PeerDepartedError), "shut down"):
        hvd.synchronize(handle)


class _Held(torch.autograd.Function):
    """Holds backward up, until it is resumed."""

    entered, opened = threading.Event(), threading.Event()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _Held.entered.set()
        assert _Held.opened.wait(60)
        return gradient


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def loss(module: torch.nn.Module, held: bool = False) -> Tensor:
    first, second = module
    between = first(torch.full((5, 3), hvd.rank() + 1.0))
    return second(_Held.apply(between) if held else between).square().sum()


def trains(optimizer: Any, module: torch.nn.Module) -> None:
    """A step works, and ends in the same parameters on every rank."""
    optimizer.zero_grad()
    loss(module).backward()
    optimizer.step()
    for parameter in module.parameters():
        everybody = hvd.allgather(parameter.detach().reshape(1, -1))
        assert torch.equal(everybody, everybody[:1].expand_as(everybody))


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_an_optimizer_whose_backward_was_lost_goes_on_in_the_new_world(op: str) -> None:
    _Held.entered, _Held.opened = threading.Event(), threading.Event()
    module = model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(module.parameters(), 0.01), op=getattr(hvd, op))
    trains(optimizer, module)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            loss(module, held=True).backward()
        except BaseException as error:
            errors.append(error)

    running = threading.Thread(target=run)
    running.start()
    assert _Held.entered.wait(60)
    hvd.barrier()  # a rank that left now would end the others' passes earlier
    before = rewire()
    _Held.opened.set()
    running.join(60)
    assert len(errors) == 1
    assert isinstance(errors[0], hvd.PeerLostError), errors
    assert hvd.counters()["operations"] == before
    with raises(hvd.PeerLostError, "which has ended"):
        optimizer.step()
    for _ in range(3):
        trains(optimizer, module)


@pytest.mark.parametrize("shared", [False, True], ids=["one optimizer", "two that share parameters"])
@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_gradients_of_the_old_world_are_not_stepped_with(op: str, shared: bool) -> None:
    module = model()
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(module.parameters(), 0.001), op=getattr(hvd, op))
        for _ in range(1 + shared)
    ]
    loss(module).backward()
    before = rewire()
    for each in optimizers:
        with raises(hvd.PeerLostError, "which has ended"):
            each.step()
    assert hvd.counters()["operations"] == before
    for _ in range(3):
        for each in optimizers:
            trains(each, module)


@pytest.mark.parametrize("groups", [0, 1])
def test_ranks_that_failed_at_different_places_meet_again(groups: int) -> None:
    """One has begun a backward more than the others: after a re-wiring they are in the same step."""
    module = model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(module.parameters(), 0.01), op=hvd.Sum, num_groups=groups
    )
    for _ in range(2):
        trains(optimizer, module)
    if hvd.rank() > 0:
        optimizer.zero_grad()
        with raises(hvd.HorovodInternalError, "shut down"):  # as rank 0 leaves
            loss(module).backward()
    rewire()
    for _ in range(3):
        trains(optimizer, module)
