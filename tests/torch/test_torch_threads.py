"""DistributedOptimizers that threads of one rank use at the same time, each in its own loop."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import polyhvd.torch as hvd
import pytest
import torch
from torch_common import Tensor, assert_close, assert_same_bits, assert_usable, batches, loss_of, model, own

from polyhvd.testing.worker import note

pytestmark = pytest.mark.ranks(2, 3, framework="torch")

_PAUSE_MAX_S = 0.003
OPTIONS: dict[str, dict[str, Any]] = {
    "sum": {"op": hvd.Sum},
    "two passes": {"backward_passes_per_step": 2},
    "grouped": {"num_groups": 2},
    "compressed": {"compression": hvd.Compression.bf16},
}


def in_threads(*functions: Callable[[], None]) -> list[Exception | None]:
    """Run each function in a thread of its own; what they have raised."""
    raised: list[Exception | None] = [None] * len(functions)

    def run(number: int) -> None:
        try:
            functions[number]()
        except Exception as error:
            raised[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def run_threads(*functions: Callable[[], None]) -> None:
    """Run each function in a thread of its own, and raise the first error."""
    for error in in_threads(*functions):
        if error is not None:
            raise error


class Training:
    """A model, its optimizer, and the oracle's. Which of the ranks' threads is ahead is left to chance.

    Args:
        number: tells trainings from each other; they are made in the same order on every rank.
        kind: what is peculiar to it: a key of ``OPTIONS``, or one of "plain", "clipped", "closure", "sparse",
            "unused" (a parameter without any gradient) and "idle" (a rank without data in some steps).
        options: of the optimizer.
    """

    def __init__(self, number: int, kind: str = "plain", seed: int = 0, **options: Any) -> None:
        self.kind = kind
        self.passes = 2 if kind == "two passes" else 1
        self.data = [(x + number, y) for x, y in batches(8)]
        self.step_number = 0
        self._chance = random.Random(1000 * seed + 10 * number + hvd.rank())
        self.module, self.oracle = self._build(number), self._build(number)
        options = {**OPTIONS.get(kind, {}), **options}
        self.factor = hvd.size() if options.get("op") == hvd.Sum else 1
        self.optimizer = hvd.DistributedOptimizer(self._made_for(self.module), **options)
        self._oracle_optimizer = self._made_for(self.oracle)

    def _build(self, number: int) -> torch.nn.Module:
        if self.kind != "sparse":
            return model(number)
        torch.manual_seed(number)
        return torch.nn.Embedding(7, 2, sparse=True)

    def _made_for(self, module: torch.nn.Module) -> torch.optim.Optimizer:
        spare = [torch.nn.Parameter(torch.zeros(2))] if self.kind == "unused" else []
        return torch.optim.SGD([*module.parameters(), *spare], lr=0.02)

    def _loss(self, module: torch.nn.Module, x: Tensor, y: Tensor) -> Tensor:
        if self.kind == "sparse":
            x = (x[:, 0].abs() * 10).long() % 7
        return loss_of(module, x, y)

    def pause(self) -> None:
        """Let other threads go first, or not."""
        if self._chance.random() < 0.5:
            time.sleep(self._chance.random() * _PAUSE_MAX_S)

    def _batches(self) -> list[tuple[Tensor, Tensor]]:
        first = self.step_number * self.passes
        return [self.data[(first + number) % len(self.data)] for number in range(self.passes)]

    def train(self, steps: int) -> None:
        """As many steps, with the optimizer that is distributed."""
        for _ in range(steps):
            self.step()
            self.step_number += 1

    def step(self) -> None:
        """One step, with pauses wherever a program could have them."""
        idle = self.kind == "idle" and self.step_number % hvd.size() == hvd.rank()

        def loss() -> Tensor:
            self.optimizer.zero_grad()
            for x, y in self._batches():
                self.pause()
                total = self._loss(self.module, own(x), own(y))
                if not idle:
                    total.backward()
            self.pause()
            return total

        if self.kind == "closure":
            self.optimizer.step(loss)
            return
        loss()
        if self.kind == "clipped":
            self.optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), 0.05)
            with self.optimizer.skip_synchronize():
                self.optimizer.step()
        else:
            self.optimizer.step()

    def check(self) -> None:
        """The model is what the oracle makes of as many steps, and the same on every rank."""
        steps, self.step_number = self.step_number, 0
        for _ in range(steps):
            self._oracle_optimizer.zero_grad()
            for x, y in self._batches():
                self._oracle_pass(x, y)
            if self.kind == "clipped":
                torch.nn.utils.clip_grad_norm_(self.oracle.parameters(), 0.05)
            self._oracle_optimizer.step()
            self.step_number += 1
        if self.kind == "compressed":
            for found, expected in zip(self.module.parameters(), self.oracle.parameters(), strict=True):
                torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
        else:
            assert_close(self.module, self.oracle)
        assert_same_bits(list(self.module.parameters()))

    def _oracle_pass(self, x: Tensor, y: Tensor) -> None:
        if self.kind != "idle":
            (self._loss(self.oracle, x, y) * self.factor).backward()
            return
        for rank in range(hvd.size()):
            if self.step_number % hvd.size() != rank:
                (self._loss(self.oracle, own(x, rank), own(y, rank)) / hvd.size()).backward()


def two_threads_train(kind: str, other: str, seed: int, steps: tuple[int, int] = (30, 10)) -> None:
    """Each has its own model and makes its own number of steps."""
    trainings = [Training(0, kind, seed), Training(1, other, seed)]
    run_threads(*(lambda t=t, n=n: t.train(n) for t, n in zip(trainings, steps, strict=True)))
    for training in trainings:
        training.check()
    assert_usable()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("kind", "other"),
    [
        ("plain", "plain"),
        ("two passes", "sum"),
        ("grouped", "unused"),
        ("idle", "clipped"),
        ("sparse", "closure"),
        ("compressed", "idle"),
    ],
)
def test_two_threads_train_like_one_process_each(kind: str, other: str, seed: int) -> None:
    two_threads_train(kind, other, seed)


def test_the_main_thread_may_be_one_of_them() -> None:
    """Which has made all optimizers and uses one of them, as in a GAN with a thread for the discriminator."""
    trainings = [Training(number, "unused") for number in range(3)]

    def both() -> None:
        for _ in range(6):
            for training in trainings[::2]:
                training.train(1)

    thread = threading.Thread(target=trainings[1].train, args=(12,))
    thread.start()
    both()
    thread.join()
    for training in trainings:
        training.check()


def test_threads_may_make_their_optimizers() -> None:
    """One after the other, so that they are made in the same order on every rank."""
    made = [threading.Event() for _ in range(2)]
    trainings: list[Training] = []

    def run(number: int) -> None:
        if number > 0:
            assert made[number - 1].wait(60)
        trainings.append(training := Training(number))
        made[number].set()
        training.train(10)

    run_threads(lambda: run(0), lambda: run(1))
    for training in trainings:
        training.check()


def test_optimizers_may_go_from_thread_to_thread() -> None:
    """From the main thread to threads that end, to others, and back, on one rank later than on another."""
    trainings = [Training(0), Training(1, "unused"), Training(2, "sum")]

    def take_turns(some: list[Training]) -> None:
        for _ in range(3):
            for training in some:
                training.train(1)

    take_turns(trainings)
    for _ in range(3):
        run_threads(*(lambda t=t: t.train(5) for t in trainings))
    run_threads(lambda: take_turns(trainings))
    take_turns(trainings)
    run_threads(lambda: trainings[0].train(5), lambda: take_turns(trainings[1:]))
    for training in trainings:
        training.check()


def test_a_loop_may_change_threads_and_differently_on_each_rank() -> None:
    """Each step in one thread of several, as pools of threads have it, and on each rank in other ones."""
    training, chance = Training(0, "unused"), random.Random(hvd.rank())
    pools = [ThreadPoolExecutor(1) for _ in range(3)]
    for _ in range(20):
        chance.choice(pools).submit(training.train, 1).result()
    for pool in pools:
        pool.shutdown()
    training.check()


def test_an_optimizer_may_be_deleted_while_another_thread_goes_on() -> None:
    """And others are made and deleted by the same thread."""
    steady, brief = Training(0), Training(1)
    left = [brief]
    del brief

    def come_and_go() -> None:
        left.pop().train(3)
        gc.collect()

    run_threads(lambda: steady.train(20), come_and_go)
    others = [Training(number) for number in (2, 3)]
    steady.train(2)
    run_threads(lambda: steady.train(5), *(lambda t=t: t.train(5) for t in others))
    for training in (steady, *others):
        training.check()


@pytest.mark.ranks(3, 4)
def test_threads_may_share_process_sets_that_overlap_in_a_ring() -> None:
    """Two threads, each with a layer that it shares with the left neighbour and one with the right one."""
    size, me = hvd.size(), hvd.rank()
    sets = [hvd.add_process_set([rank, (rank + 1) % size]) for rank in range(size)]
    neighbours = ((me + 1) % size, (me - 1) % size)

    def layers_of(thread: int) -> tuple[list[torch.nn.Linear], list[Any]]:
        layers = [torch.nn.Linear(3, 2, bias=False) for _ in neighbours]
        optimizers = []
        for layer, members in zip(layers, (sets[me], sets[me - 1]), strict=True):
            torch.nn.init.zeros_(layer.weight)
            made = torch.optim.SGD(layer.parameters(), lr=1.0)
            optimizers.append(hvd.DistributedOptimizer(made, process_set=members, num_groups=thread))
        return layers, optimizers

    def run(thread: int, layers: list[torch.nn.Linear], optimizers: list[Any]) -> None:
        chance = random.Random(10 * me + thread)
        for step in range(10):
            for optimizer in optimizers:
                optimizer.zero_grad()
            time.sleep(chance.random() * _PAUSE_MAX_S)
            offset = step + 100 * thread
            sum(layer(torch.full((1, 3), me + offset * 1.0)).sum() for layer in layers).backward()
            for layer, neighbour in zip(layers, neighbours, strict=True):
                expected = (me + neighbour + 2 * offset) / 2
                assert layer.weight.grad.tolist() == [[expected] * 3] * 2
            for optimizer in optimizers:
                optimizer.step()

    made = [layers_of(thread) for thread in range(2)]
    run_threads(*(lambda t=t: run(t, *made[t]) for t in range(2)))
    for members in sets:
        hvd.remove_process_set(members)


@pytest.mark.ranks(2, 3, 4)
def test_a_thread_may_have_an_optimizer_of_some_ranks() -> None:
    """The other one's is of all."""
    members = hvd.add_process_set(range(1, hvd.size()))
    everyone, weight = Training(0), torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), process_set=members)

    def some() -> None:
        for _ in range(10):
            optimizer.zero_grad()
            everyone.pause()
            (weight.sum() * (hvd.rank() + 1)).backward()
            optimizer.step()

    run_threads(lambda: everyone.train(15), some)
    everyone.check()
    mean = sum(range(2, hvd.size() + 1)) / (hvd.size() - 1)
    assert weight.tolist() == [-10 * (mean if members.included() else 1.0)] * 2
    hvd.remove_process_set(members)


def test_a_rank_may_join_while_threads_of_others_train() -> None:
    """In the first fold the last rank has no data for either thread, in the second all of them have."""
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0)) for weight in weights]

    def train(number: int, steps: int) -> None:
        for _ in range(steps):
            optimizers[number].zero_grad()
            weights[number].sum().backward()
            optimizers[number].step()

    size, is_last = hvd.size(), hvd.rank() == hvd.size() - 1
    expected = [0.0, 0.0]
    # Zeros of the last rank count in the averages of the first fold, after which it has not moved.
    for steps, mean in (((0, 0) if is_last else (8, 4), (size - 1) / size), ((3, 5), 1.0)):
        run_threads(*(lambda n=n, count=count: train(n, count) for n, count in enumerate(steps)))
        hvd.join()
        for number, weight in enumerate(weights):
            expected[number] -= steps[number] * mean
            torch.testing.assert_close(weight.detach(), torch.full((2,), expected[number]))


def threads_that_lose_a_rank(victim: int) -> list[str]:
    """Two threads train until they fail; what they raise, of which kind."""
    trainings = [Training(number, kind) for number, kind in enumerate(("plain", "unused"))]

    def run(training: Training) -> None:
        training.train(3)
        if hvd.rank() == victim:
            note("trains")
        training.train(1_000_000)

    errors = in_threads(*(lambda t=t: run(t) for t in trainings))
    assert all(isinstance(error, hvd.HorovodInternalError) for error in errors), errors
    return [str(error) for error in errors]


def test_threads_meet_after_init() -> None:
    """A new engine finds optimizers where they would be in a process that has just begun."""
    trainings = [Training(number) for number in range(2)]
    if hvd.rank() == 0:
        run_threads(*(lambda t=t: t.optimizer.zero_grad() for t in trainings))
    hvd.shutdown()
    hvd.init()
    trainings[1].train(2)
    run_threads(*(lambda t=t: t.train(5) for t in trainings))
    for training in trainings:
        training.check()


@pytest.mark.parametrize("named", [True, False], ids=["same shapes", "other shapes"])
def test_optimizers_that_ranks_make_in_different_orders_are_an_error_on_every_rank(named: bool) -> None:
    """The threads of the first rank make theirs in another order; only names, or shapes, tell them apart."""
    made = threading.Event()
    sizes = (2, 2) if named else (2, 3)
    errors: list[str] = []

    def run(number: int) -> None:
        is_second = number == (0 if hvd.rank() == 0 else 1)
        assert not is_second or made.wait(60)
        weight = torch.nn.Parameter(torch.zeros(sizes[number]))
        names = [(f"weight{number}", weight)] if named else None
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), named_parameters=names)
        made.set()
        try:
            weight.sum().backward()
            optimizer.step()
        except hvd.HorovodInternalError as error:
            errors.append(str(error))

    run_threads(lambda: run(0), lambda: run(1))
    assert len(errors) == 2, errors
    if named:
        assert all("have other names" in error for error in errors), errors
    assert_usable()
