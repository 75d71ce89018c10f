"""What parity.watch costs, and what it says of momenta: of a model of PyTorch, on one rank or two."""

from __future__ import annotations

import time

import polyhvd.torch  # noqa: F401
import pytest
import torch
from torch import nn

from polyhvd import parity


def convolutional(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1, stride=2),
        nn.Flatten(),
        nn.Linear(32 * 8 * 8, 10),
    )
    return model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor) -> float:
    begun = time.perf_counter()
    optimizer.zero_grad()
    model(images).square().mean().backward()
    optimizer.step()
    return time.perf_counter() - begun


@pytest.mark.ranks(1)
def test_watching_a_convolutional_network_costs_at_most_as_much_as_its_step() -> None:
    torch.set_num_threads(1)
    images = torch.randn(32, 3, 16, 16)
    plain, (model, optimizer) = convolutional(0), convolutional(0)
    with parity.watch(model, optimizer) as watched:
        ratios = []
        for _ in range(2):  # the quietest steps of each, taken in turn
            pairs = [(step(*plain, images), step(model, optimizer, images)) for _ in range(6)]
            ratios.append(min(after for _, after in pairs) / min(before for before, _ in pairs))
    assert min(ratios) <= 2.0, ratios
    assert watched.first is None, watched


@pytest.mark.ranks(2)
@pytest.mark.parametrize("framework_keeps", ["momentum", "second moment"])
def test_what_an_optimizer_keeps_is_told_apart_from_the_update(rank: int, framework_keeps: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    key = {"momentum": "exp_avg", "second moment": "exp_avg_sq"}[framework_keeps]
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    with parity.watch(model, optimizer) as watched:
        for number in range(4):
            if number == 2 and rank == 1:
                optimizer.state[model.weight][key].mul_(1.5)
            optimizer.zero_grad()
            model(
                torch.randn(8, 6, generator=torch.Generator().manual_seed(number))
            ).square().mean().backward()
            optimizer.step()
    first = watched.first
    assert first is not None, watched
    assert (first.step, first.kind, first.detail, first.rank) == (2, "update", framework_keeps, 1)
    assert f"{framework_keeps} of weight" in str(watched)


@pytest.mark.ranks(2)
def test_another_momentum_of_batch_normalization_is_found_in_the_statistics(rank: int) -> None:
    model, optimizer = convolutional(0)
    model[1].momentum = 0.1 if rank else 0.9
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with parity.watch(model, optimizer) as watched:
        step(model, optimizer, images)
    assert watched.first is not None  # of the mean there is none: a bias before it has no effect
    assert (watched.first.kind, watched.first.layer, watched.first.detail) == ("statistics", 1, "variance")
