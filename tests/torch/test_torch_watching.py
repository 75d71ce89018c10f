"""What parity.watch costs, and what it says of momenta: of a model of PyTorch, on one rank or two."""

from __future__ import annotations

import itertools
import time

import polyhvd.torch
import pytest
import torch
from torch import nn

from polyhvd import parity

pytestmark = pytest.mark.ranks(2, framework="torch")  # all run on ranks, so pytest does not import PyTorch


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


Trained = tuple[nn.Module, torch.optim.Optimizer]


def cost(plain: Trained, watched: Trained, inputs: torch.Tensor, steps: int) -> float:
    """By the quietest steps of each, taken in turn."""
    pairs = [(step(*plain, inputs), step(*watched, inputs)) for _ in range(steps)]
    return min(after for _, after in pairs) / min(before for before, _ in pairs)


@pytest.mark.ranks(1)
def test_watching_a_convolutional_network_costs_at_most_as_much_as_its_step() -> None:
    torch.set_num_threads(1)
    images = torch.randn(32, 3, 16, 16)
    plain, (model, optimizer) = convolutional(0), convolutional(0)
    with parity.watch(model, optimizer) as watched:
        ratios = [cost(plain, (model, optimizer), images, 6) for _ in range(2)]
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


def dense(*sizes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, units in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, units), nn.ReLU(inplace=True)]
    model = nn.Sequential(*layers[:-1])
    return model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)


def batch(rows: int, width: int, number: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(number))


@pytest.mark.ranks(1)
def test_watching_dense_layers_of_few_rows_costs_at_most_as_much_as_their_step() -> None:
    torch.set_num_threads(1)
    rows = batch(128, 784, 0)
    plain, (model, optimizer) = dense(784, 256, 128, 10), dense(784, 256, 128, 10)
    with parity.watch(model, optimizer) as watched:
        ratios = [cost(plain, (model, optimizer), rows, 20) for _ in range(4)]
    assert min(ratios) <= 2.0, ratios
    assert watched.first is None, watched


@pytest.mark.ranks(2, 3, 4)
def test_a_step_whose_tensors_are_known_is_one_collective() -> None:
    model, optimizer = dense(12, 8, 3)
    counted = []
    with parity.watch(model, optimizer) as watched:
        for number, rows in enumerate([6, 6, 6, 4, 6, 4, 6]):  # the last batch of an epoch is a smaller one
            before = polyhvd.torch.counters()["operations"]
            step(model, optimizer, batch(rows, 12, number))
            counted.append(polyhvd.torch.counters()["operations"] - before)
    assert watched.first is None, watched
    # Momentum is there from the first step on; a size is reported when it first occurs.
    assert counted == [3, 1, 1, 3, 1, 1, 1]


@pytest.mark.ranks(3)
def test_a_rank_that_begins_anew_is_told_what_the_others_know(rank: int) -> None:
    model, optimizer = dense(12, 8, 3)
    watched = parity.watch(model, optimizer)
    for number in range(6):
        if rank == 1 and number in (2, 4):
            watched.close()
            watched = parity.watch(model, optimizer)
        if rank == 2 and number == 5:
            model[2].weight.data[1, 2] += 0.01
        step(model, optimizer, batch(6, 12, number))
    watched.close()
    assert watched.first is not None
    assert (watched.first.kind, watched.first.layer, watched.first.rank) == ("weights", 1, 2)


@pytest.mark.ranks(3)
def test_another_number_of_rows_is_a_divergence_of_the_input(rank: int) -> None:
    model, optimizer = dense(12, 8, 3)
    with parity.watch(model, optimizer) as watched:
        for number in range(3):
            rows = 4 if rank == 2 and number == 1 else 6
            step(model, optimizer, batch(rows, 12, number))
    first = watched.divergences[0]
    assert (first.step, first.kind, first.rank) == (1, "input", 2)


@pytest.mark.ranks(4)
def test_a_divergence_far_into_training_is_found_in_its_step(rank: int) -> None:
    model, optimizer = dense(12, 8, 3)
    with parity.watch(model, optimizer) as watched:
        for number in range(8):
            if number == 6 and rank == 3:
                model[2].weight.data[1, 2] += 0.01
            step(model, optimizer, batch(6, 12, number))
    assert watched.first is not None
    first = watched.first
    assert (first.step, first.kind, first.layer, first.rank) == (6, "weights", 1, 3)


LOGGED = {"POLYHVD_PARITY_LOG": "/dev/null"}  # with which every step is judged


@pytest.mark.ranks(3, env=LOGGED)
@pytest.mark.parametrize(("epsilon", "is_suspicious"), [(1.25e-6, True), (1e-6, False)])
def test_a_layer_that_stands_out_below_its_limit_is_told_on_every_rank(
    rank: int, epsilon: float, is_suspicious: bool
) -> None:
    torch.manual_seed(0)
    norm = nn.LayerNorm(32, eps=epsilon if rank == 2 else 1e-6)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), norm, nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with parity.watch(model, optimizer) as watched:
        for number in range(2):
            step(model, optimizer, batch(6, 12, number))
    assert watched.first is None, watched
    found = watched.suspicious
    assert (found is not None) == is_suspicious
    assert found is None or (found.step, found.layer, found.rank) == (0, 1, 2), found
    assert ("suspicious: step 0, layer 1, activation: " in str(watched)) == is_suspicious


class Odd(nn.Module):
    """What is not read where it lies: whole numbers, gaps, half types, a gradient of few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, sparse=True)
        self.wide = nn.Linear(4, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.last = nn.Linear(5, 3).to(torch.bfloat16)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        made = self.wide(self.table(words).transpose(0, 1))
        return self.last(self.frozen(made).to(torch.bfloat16)).transpose(0, 1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("spoiled", "place"),
    [
        ("nothing", None),
        ("table", ("weights", 0)),
        ("frozen", ("weights", 2)),
        ("last", ("weights", 3)),
        ("words", ("input", 0)),
    ],
)
def test_tensors_of_all_sorts_are_watched(rank: int, spoiled: str, place: tuple[str, int] | None) -> None:
    torch.manual_seed(0)
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with parity.watch(model, optimizer) as watched:
        for number in range(3):
            words = torch.randint(0, 7, (5, 6), generator=torch.Generator().manual_seed(number))
            if rank and number == 2:
                if spoiled == "words":
                    words = (words + 1) % 7
                elif spoiled != "nothing":
                    getattr(model, spoiled).weight.data.mul_(1.5)
            optimizer.zero_grad()
            model(words).float().square().mean().backward()
            optimizer.step()
    first = watched.first
    assert (None if first is None else (first.kind, first.layer)) == place, watched
    assert first is None or first.step == 2


@pytest.mark.ranks(2)
def test_a_weight_that_becomes_nan_is_told(rank: int) -> None:
    model, optimizer = dense(12, 8, 3)
    with parity.watch(model, optimizer) as watched:
        for number in range(3):
            step(model, optimizer, batch(6, 12, number))
            if rank and number == 1:
                model[0].bias.data[3] = float("nan")
    assert watched.first is not None
    assert (watched.first.step, watched.first.kind, watched.first.layer) == (2, "weights", 0)


def small(seed: int = 0) -> Trained:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def rows_of(number: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(number))


@pytest.mark.ranks(2)
def test_a_schedule_that_is_made_while_watched_outlives_the_watch() -> None:
    model, optimizer = small()
    with parity.watch(model, optimizer) as watched:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for number in range(2):
            step(model, optimizer, rows_of(number))
            schedule.step()
    step(model, optimizer, rows_of(2))
    schedule.step()
    assert watched.steps == 2
    assert watched.first is None, watched
    assert schedule.get_last_lr() == [0.0125]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", ["no gradients", "eval() alone"])
def test_an_evaluation_before_the_step_of_a_pass_is_no_divergence(rank: int, mode: str) -> None:
    model, optimizer = small()
    with parity.watch(model, optimizer) as watched:
        for number in range(3):
            if rank == 1:
                model.eval()
                with torch.set_grad_enabled(mode != "no gradients"):
                    model(rows_of(9))
                model.train()
            optimizer.zero_grad()
            model(rows_of(number)).square().mean().backward()
            if rank == 1 and mode == "no gradients":
                with torch.no_grad():
                    model.eval()(rows_of(9))
                model.train()
            optimizer.step()
    assert watched.first is None, watched


@pytest.mark.ranks(2)
def test_gradients_that_are_accumulated_are_watched(rank: int) -> None:
    model, optimizer = small()
    with parity.watch(model, optimizer) as watched:
        for number in range(3):
            optimizer.zero_grad()
            for part in range(2):
                scale = 2.0 if (rank, number, part) == (1, 2, 0) else 1.0
                (model(rows_of(2 * number + part)).square().mean() * scale).backward()
            optimizer.step()
    first = watched.first
    assert first is not None
    assert (first.step, first.kind, first.rank) == (2, "gradient", 1), watched


class Branches(nn.Module):
    """Layers that are called by name, with what is no tensor, and perhaps not at all; outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.other, self.head = nn.Linear(6, 6), Chooser(), nn.Linear(6, 3)

    def forward(self, rows: torch.Tensor, *, uses_other: bool = True) -> dict[str, torch.Tensor]:
        made = self.body(input=rows)
        made = made + self.other(None, made) if uses_other else made
        return {"scores": self.head(made), "made": made}


class Chooser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, mask: None, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.scale


@pytest.mark.ranks(2, 3)
def test_a_layer_that_one_rank_does_not_use_is_seen_by_the_next_one(rank: int) -> None:
    torch.manual_seed(0)
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with parity.watch(model, optimizer) as watched:
        for number in range(3):
            optimizer.zero_grad()
            made = model(rows_of(number), uses_other=(rank, number) != (1, 2))
            made["scores"].square().mean().backward()
            optimizer.step()
    first = watched.first
    assert first is not None
    assert (first.step, first.rank) == (2, 1), watched
    assert first.kind == "activation", watched


@pytest.mark.ranks(2)
def test_a_weight_without_a_gradient_on_one_rank_differs_by_its_gradient(rank: int) -> None:
    model, optimizer = small()
    with parity.watch(model, optimizer) as watched:
        for number in range(3):
            optimizer.zero_grad()
            model(rows_of(number)).square().mean().backward()
            if (rank, number) == (1, 2):
                model[3].bias.grad = None
            optimizer.step()
    first = watched.first
    assert first is not None
    assert (first.step, first.kind, first.layer, first.rank) == (2, "gradient", 2, 1), watched
    assert "3.bias" in str(watched)
