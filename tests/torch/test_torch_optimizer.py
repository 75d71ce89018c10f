"""DistributedOptimizer: what it computes, against torch on the joined batch, and how it fails."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import polyhvd.torch as hvd
import pytest
import torch
from polyhvd.torch import rounds
from torch.utils.checkpoint import checkpoint
from torch_common import (
    Tensor,
    assert_close,
    assert_same_bits,
    assert_usable,
    batches,
    loss_of,
    model,
    own,
    raises,
)

from polyhvd.training.passes import drop_passes, passes_held

pytestmark = pytest.mark.ranks(2, 3, framework="torch")

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def sgd(parameters: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr)


def pair(make: Callable[[Any], torch.optim.Optimizer] = sgd, **options: Any) -> Any:
    """A distributed model with its optimizer, and the oracle's."""
    module, oracle = model(), model()
    return (
        module,
        hvd.DistributedOptimizer(make(module.parameters()), **options),
        oracle,
        make(oracle.parameters()),
    )


@pytest.mark.parametrize("clip", [None, 0.05], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
@pytest.mark.parametrize("kind", ["momentum", "adam", "adamw"])
def test_training_is_that_of_one_process_on_the_joined_batch(
    kind: str, set_to_none: bool, clip: float | None
) -> None:
    module, optimizer, oracle, oracle_optimizer = pair(OPTIMIZERS[kind])
    for x, y in batches(6):
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(module, own(x), own(y)).backward()
        oracle_optimizer.zero_grad()
        loss_of(oracle, x, y).backward()
        if clip is not None:
            for some in (module, oracle):
                norm = torch.nn.utils.clip_grad_norm_(some.parameters(), clip)
                assert norm > clip, "nothing was clipped"
        optimizer.step()
        oracle_optimizer.step()
    assert_close(module, oracle)
    assert_same_bits(module)


def has_averages_when_backward_returns() -> None:
    module, optimizer, oracle, _ = pair()
    ((x, y),) = batches(1)
    loss_of(module, own(x), own(y)).backward()
    loss_of(oracle, x, y).backward()
    for found, expected in zip(module.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)
    before = hvd.counters()["operations"]
    optimizer.step()
    assert hvd.counters()["operations"] == before, "step() had something left to do"


def test_backward_returns_with_averages_and_step_has_nothing_to_wait_for() -> None:
    has_averages_when_backward_returns()


def test_the_optimizer_stays_the_users_object_and_of_its_class() -> None:
    class Mine(torch.optim.SGD):
        pass

    plain = Mine(model().parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain)
    assert optimizer is plain
    assert isinstance(optimizer, Mine)
    assert type(optimizer).__name__ == "Mine"
    assert optimizer.defaults["lr"] == 0.1


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    module, optimizer, _, _ = pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step, (x, y) in enumerate(batches(4)):
        before = [p.detach().clone() for p in module.parameters()]
        optimizer.zero_grad()
        loss = loss_of(module, own(x), own(y))
        if step == 1 and hvd.rank() == hvd.size() - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        unchanged = all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
        assert unchanged == (step == 1)
    assert scaler.get_scale() == 512.0
    assert_same_bits(list(module.parameters()))


@pytest.mark.parametrize("passes", [2, 3])
def test_gradients_of_several_passes_are_added_up_locally(passes: int) -> None:
    module, optimizer, oracle, oracle_optimizer = pair(backward_passes_per_step=passes)
    parameters = len(list(module.parameters()))
    for _ in range(2):
        optimizer.zero_grad()
        oracle_optimizer.zero_grad()
        before = hvd.counters()["operations"]
        for number, (x, y) in enumerate(batches(passes)):
            assert hvd.counters()["operations"] == before, f"pass {number} has communicated"
            loss_of(module, own(x), own(y)).backward()
            loss_of(oracle, x, y).backward()
        assert hvd.counters()["operations"] == before + parameters + 1
        optimizer.step()
        oracle_optimizer.step()
    assert_close(module, oracle)
    assert_same_bits(module)


def test_a_step_within_an_accumulation_reduces_what_there_is() -> None:
    module, optimizer, oracle, oracle_optimizer = pair(backward_passes_per_step=3)
    for x, y in batches(2):
        loss_of(module, own(x), own(y)).backward()
        loss_of(oracle, x, y).backward()
    optimizer.step()
    oracle_optimizer.step()
    assert_close(module, oracle)
    assert_same_bits(module)


def test_a_layer_used_in_one_pass_of_several_is_complete_when_the_last_returns() -> None:
    """A layer that only the first pass of two has used is complete when the second returns."""
    module, optimizer, oracle, oracle_optimizer = _branches(backward_passes_per_step=2)
    for _ in range(2):
        optimizer.zero_grad()
        oracle_optimizer.zero_grad()
        for left, (x, y) in zip((True, False), batches(2), strict=True):
            (module(own(x), left) - own(y)).square().mean().backward()
            (oracle(x, left) - y).square().mean().backward()
        assert_same_bits(module)
        optimizer.step()
        oracle_optimizer.step()
    assert_close(module, oracle)


def test_the_number_of_passes_can_be_changed() -> None:
    module, optimizer, oracle, oracle_optimizer = pair()
    for passes in (1, 2, 1):
        optimizer.set_backward_passes_per_step(passes)
        optimizer.zero_grad()
        oracle_optimizer.zero_grad()
        for x, y in batches(passes):
            loss_of(module, own(x), own(y)).backward()
            loss_of(oracle, x, y).backward()
        assert_same_bits(module)
        optimizer.step()
        oracle_optimizer.step()
    assert_close(module, oracle)


class Branches(torch.nn.Module):
    """Uses some of its layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.common = torch.nn.Linear(5, 4)
        self.left = torch.nn.Linear(4, 2)
        self.right = torch.nn.Linear(4, 2)
        self.never = torch.nn.Linear(4, 2)

    def forward(self, x: Tensor, left: bool) -> Tensor:
        result: Tensor = (self.left if left else self.right)(self.common(x))
        return result


def _branches(**options: Any) -> Any:
    module, oracle, make = Branches(), Branches(), OPTIMIZERS["momentum"]
    optimizer = hvd.DistributedOptimizer(make(module.parameters()), **options)
    return module, optimizer, oracle, make(oracle.parameters())


@pytest.mark.parametrize("num_groups", [0, 2])
def test_a_parameter_unused_on_some_ranks_has_zero_gradients_there_before_clipping(num_groups: int) -> None:
    module, optimizer, oracle, oracle_optimizer = _branches(num_groups=num_groups)
    for step, (x, y) in enumerate(batches(5)):
        # In the last step, all ranks turn left.
        turns = [step == 4 or (rank + step) % 2 == 0 for rank in range(hvd.size())]
        optimizer.zero_grad()
        oracle_optimizer.zero_grad()
        (module(own(x), turns[hvd.rank()]) - own(y)).square().mean().backward()
        for rank, left in enumerate(turns):
            ((oracle(own(x, rank), left) - own(y, rank)).square().mean() / hvd.size()).backward()
        for some in (module, oracle):
            torch.nn.utils.clip_grad_norm_(some.parameters(), 0.1)
        assert_same_bits(module)
        optimizer.step()
        oracle_optimizer.step()
        assert (module.right.weight.grad is None) == (step == 4)
        assert module.never.weight.grad is None, "no rank has computed it"
    assert_close(module, oracle)
    assert_same_bits(module)


def test_a_rank_may_skip_backward() -> None:
    module, optimizer, oracle, oracle_optimizer = pair()
    last = hvd.size() - 1
    for x, y in batches(3):
        optimizer.zero_grad()
        oracle_optimizer.zero_grad()
        if hvd.rank() != last:
            loss_of(module, own(x), own(y)).backward()
        for rank in range(last):
            (loss_of(oracle, own(x, rank), own(y, rank)) / hvd.size()).backward()
        optimizer.step()
        oracle_optimizer.step()
    assert_close(module, oracle)
    assert_same_bits(module)


def two_losses_of_different_layers(op_name: str) -> None:
    """Each layer is reduced once, and those without a gradient stay without, until theirs comes."""
    op = getattr(hvd, op_name)
    module, optimizer, oracle, oracle_optimizer = _branches(op=op)
    factor = 1 if op == hvd.Average else hvd.size()
    for x, y in batches(3):
        optimizer.zero_grad()
        oracle_optimizer.zero_grad()
        for left in (True, False):
            before = hvd.counters()["operations"]
            layer = module.left if left else module.right
            (layer(own(x)[:, :4]) - own(y)).square().mean().backward()
            assert hvd.counters()["operations"] == before + 3
            assert_same_bits(module)
            layer = oracle.left if left else oracle.right
            ((layer(x[:, :4]) - y).square().mean() * factor).backward()
        optimizer.step()
        oracle_optimizer.step()
    assert_close(module, oracle)


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_layers_of_different_losses_are_reduced_once_each(op: str) -> None:
    two_losses_of_different_layers(op)


def test_a_rank_may_have_one_more_loss() -> None:
    """Rank 0 alone calls backward a second time; torch's own accumulation says what is right."""
    module, optimizer, oracle, oracle_optimizer = _branches()
    for x, y in batches(3):
        optimizer.zero_grad()
        oracle_optimizer.zero_grad()
        (module(own(x), True) - own(y)).square().mean().backward()
        if hvd.rank() == 0:
            (module(own(x), False) - own(y)).square().mean().backward()
        (oracle(x, True) - y).square().mean().backward()
        ((oracle(own(x, 0), False) - own(y, 0)).square().mean() / hvd.size()).backward()
        optimizer.step()
        oracle_optimizer.step()
    assert_close(module, oracle)
    assert_same_bits(module)


def test_backward_twice_before_a_step_adds_up() -> None:
    module, optimizer, oracle, oracle_optimizer = pair()
    for x, y in batches(2):
        loss_of(module, own(x), own(y)).backward()
        loss_of(oracle, x, y).backward()
        assert_same_bits(module)
    optimizer.step()
    oracle_optimizer.step()
    assert_close(module, oracle)


def test_backward_twice_before_a_step_is_an_error_for_sums() -> None:
    module, optimizer, _, _ = pair(op=hvd.Sum)
    ((x, y),) = batches(1)
    loss_of(module, own(x), own(y)).backward()
    with raises(hvd.InvalidArgumentError, "backward_passes_per_step", "zero_grad()"):
        loss_of(module, own(x), own(y)).backward()
    optimizer.zero_grad()
    loss_of(module, own(x), own(y)).backward()
    optimizer.step()
    assert_same_bits(module)


def test_an_extra_backward_on_one_rank_is_an_error_on_every_rank() -> None:
    """No rank waits without end, or uses the gradients of another step."""
    module, optimizer, _, _ = pair()
    ((x, y),) = batches(1)
    loss_of(module, own(x), own(y)).backward()
    with raises(hvd.RankMismatchError, "equally often"):
        if hvd.rank() != 0:
            optimizer.step()
        loss_of(module, own(x), own(y)).backward()
    assert_usable()


def test_a_closure_returns_to_averaged_gradients() -> None:
    module, optimizer, oracle, oracle_optimizer = pair(OPTIMIZERS["momentum"])
    for x, y in batches(3):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(module, own(x), own(y))
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        torch.testing.assert_close(loss, loss_of(module, own(x), own(y)), rtol=1.0, atol=1.0)
        oracle_optimizer.zero_grad()
        loss_of(oracle, x, y).backward()
        oracle_optimizer.step()
    assert_close(module, oracle)
    assert_same_bits(module)


def test_a_rank_may_skip_backward_in_its_closure() -> None:
    module, optimizer, oracle, oracle_optimizer = pair()
    last = hvd.size() - 1
    for x, y in batches(2):

        def closure(x: Tensor = x, y: Tensor = y) -> None:
            optimizer.zero_grad()
            if hvd.rank() != last:
                loss_of(module, own(x), own(y)).backward()

        optimizer.step(closure)
        oracle_optimizer.zero_grad()
        for rank in range(last):
            (loss_of(oracle, own(x, rank), own(y, rank)) / hvd.size()).backward()
        oracle_optimizer.step()
    assert_close(module, oracle)
    assert_same_bits(module)


def test_lbfgs_may_evaluate_its_closure_often() -> None:
    module, oracle = model(), model()
    optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS(module.parameters(), max_iter=5))
    oracle_optimizer = torch.optim.LBFGS(oracle.parameters(), max_iter=5)
    ((x, y),) = batches(1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(module, own(x), own(y))
        loss.backward()
        return hvd.allreduce(loss.detach())

    def oracle_closure() -> Tensor:
        oracle_optimizer.zero_grad()
        loss = loss_of(oracle, x, y)
        loss.backward()
        return loss

    optimizer.step(closure)
    oracle_optimizer.step(oracle_closure)
    assert_close(module, oracle)
    assert_same_bits(module)


def test_two_optimizers_in_one_backward_do_not_wait_for_each_other() -> None:
    """In the second step, each rank uses one of the two models only."""
    modules = [model(seed) for seed in (1, 2)]
    oracles = [model(seed) for seed in (1, 2)]
    optimizers = [hvd.DistributedOptimizer(sgd(m.parameters())) for m in modules]
    oracle_optimizers = [sgd(m.parameters()) for m in oracles]
    for step, (x, y) in enumerate(batches(3)):
        for optimizer in (*optimizers, *oracle_optimizers):
            optimizer.zero_grad()
        uses = [(0, 1) if step != 1 else (rank % 2,) for rank in range(hvd.size())]
        order = uses[hvd.rank()] if hvd.rank() == 0 else tuple(reversed(uses[hvd.rank()]))
        sum(loss_of(modules[i], own(x), own(y)) for i in order).backward()
        for rank, some in enumerate(uses):
            total = sum(loss_of(oracles[i], own(x, rank), own(y, rank)) for i in some)
            (total / hvd.size()).backward()
        for optimizer in (*optimizers, *oracle_optimizers):
            optimizer.step()
    for module, oracle in zip(modules, oracles, strict=True):
        assert_close(module, oracle)
        assert_same_bits(module)


def any_program(seed: int, num_groups: int) -> None:
    """Each rank calls backward as often as it likes, each time on some layers of two optimizers."""
    width, layers = 3, 6

    def build() -> tuple[list[torch.nn.Linear], list[torch.optim.Optimizer]]:
        torch.manual_seed(seed)
        # Nobody uses the last layer of each optimizer, so no backward can be known to be the last one.
        some = [torch.nn.Linear(width, 1) for _ in range(layers + 2)]
        halves = (
            some[: layers // 2] + some[layers : layers + 1],
            some[layers // 2 : layers] + some[layers + 1 :],
        )
        return some, [torch.optim.Adam([p for m in half for p in m.parameters()], lr=0.1) for half in halves]

    module, optimizers = build()
    optimizers = [hvd.DistributedOptimizer(o, num_groups=num_groups) for o in optimizers]
    oracle, oracle_optimizers = build()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(6):
        for optimizer in (*optimizers, *oracle_optimizers):
            optimizer.zero_grad()
        for rank in range(hvd.size()):  # every rank draws every rank's program
            for _ in range(int(torch.randint(0, 4, (), generator=generator))):
                order = torch.randperm(layers, generator=generator)
                used = order[: int(torch.randint(1, layers + 1, (), generator=generator))].tolist()
                x = torch.randn(2, width, generator=generator)
                if rank == hvd.rank():
                    sum(module[i](x).square().mean() for i in used).backward()
                (sum(oracle[i](x).square().mean() for i in used) / hvd.size()).backward()
        for optimizer in (*optimizers, *oracle_optimizers):
            optimizer.step()
        for found, expected in zip(module, oracle, strict=True):
            assert (found.weight.grad is None) == (expected.weight.grad is None)
            assert_close(found, expected)
            assert_same_bits(found)


@pytest.mark.parametrize("seed", range(8))
def test_ranks_may_compute_what_they_like_as_often_as_they_like(seed: int) -> None:
    any_program(seed, 3 * (seed % 2))


def test_two_optimizers_may_take_turns() -> None:
    """As in a GAN: the generator's loss reaches the discriminator's parameters, too."""

    def train(distributed: bool) -> tuple[torch.nn.Module, torch.nn.Module]:
        generator, discriminator = torch.nn.Linear(5, 4), torch.nn.Linear(4, 2)
        for number, module in enumerate((generator, discriminator)):
            torch.manual_seed(number)
            torch.nn.init.normal_(module.weight)
            torch.nn.init.zeros_(module.bias)
        optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (generator, discriminator)]
        if distributed:
            optimizers = [hvd.DistributedOptimizer(o) for o in optimizers]
        for x, y in batches(3):
            x, y = (own(x), own(y)) if distributed else (x, y)
            optimizers[1].zero_grad()
            loss_of(discriminator, generator(x).detach(), y).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            (discriminator(generator(x)).square().mean()).backward()
            optimizers[0].step()
        return generator, discriminator

    for found, expected in zip(train(True), train(False), strict=True):
        assert_close(found, expected)
        assert_same_bits(list(found.parameters()))


def test_frozen_parameters_are_left_alone_and_may_be_thawed() -> None:
    module, oracle = model(), model()
    for some in (module, oracle):
        some[0].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(sgd(module.parameters()))
    oracle_optimizer = sgd(oracle.parameters())
    for step, (x, y) in enumerate(batches(4)):
        if step == 2:
            for some in (module, oracle):
                some[0].requires_grad_(True)
        optimizer.zero_grad()
        oracle_optimizer.zero_grad()
        loss_of(module, own(x), own(y)).backward()
        loss_of(oracle, x, y).backward()
        assert (module[0].weight.grad is None) == (step < 2)
        assert_same_bits(module)
        optimizer.step()
        oracle_optimizer.step()
    assert_close(module, oracle)


def test_parameter_groups_added_later_are_reduced() -> None:
    module, oracle = model(), model()
    optimizer = hvd.DistributedOptimizer(sgd(module[0].parameters()))
    oracle_optimizer = sgd(oracle[0].parameters())
    for step, (x, y) in enumerate(batches(3)):
        if step == 1:
            optimizer.add_param_group({"params": module[2].parameters(), "lr": 0.2})
            oracle_optimizer.add_param_group({"params": oracle[2].parameters(), "lr": 0.2})
            module.zero_grad()
            oracle.zero_grad()
        optimizer.zero_grad()
        oracle_optimizer.zero_grad()
        loss_of(module, own(x), own(y)).backward()
        loss_of(oracle, x, y).backward()
        optimizer.step()
        oracle_optimizer.step()
    assert_close(module, oracle)
    assert_same_bits(module)


def test_replaced_parameters_are_an_error() -> None:
    """As by a program that resizes a layer and puts its new weight into the optimizer."""
    module = model()
    optimizer = hvd.DistributedOptimizer(sgd(module.parameters()))
    replaced = torch.nn.Parameter(module[2].weight.detach().clone())
    module[2].weight = optimizer.param_groups[0]["params"][2] = replaced
    loss_of(module, *map(own, batches(1)[0])).backward()
    with raises(hvd.InvalidArgumentError, "param_groups[0] of the optimizer has parameters that replace"):
        optimizer.step()


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = torch.nn.Linear(5, 5)
        self.second = torch.nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.last = torch.nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.second(self.first(x).tanh()).tanh())
        return result


def test_a_shared_parameter_is_reduced_once() -> None:
    module, oracle = Tied(), Tied()
    optimizer = hvd.DistributedOptimizer(sgd(module.parameters()), module.named_parameters())
    oracle_optimizer = sgd(oracle.parameters())
    for x, y in batches(3):
        optimizer.zero_grad()
        oracle_optimizer.zero_grad()
        before = hvd.counters()["operations"]
        loss_of(module, own(x), own(y)).backward()
        assert hvd.counters()["operations"] == before + 6
        loss_of(oracle, x, y).backward()
        optimizer.step()
        oracle_optimizer.step()
    assert_close(module, oracle)
    assert_same_bits(module)


def _in_segments(module: Any, x: Tensor, use_reentrant: bool = True) -> Tensor:
    layers = [module.first, module.second, module.last] if isinstance(module, Tied) else list(module)
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=use_reentrant)
    return x


def backward_within_backward(passes: int, tied: bool, op_name: str) -> None:
    """Reentrant checkpoints end a separate graph task for each segment."""
    module, oracle = (Tied(), Tied()) if tied else (model(), model())
    op = getattr(hvd, op_name)
    optimizer = hvd.DistributedOptimizer(sgd(module.parameters()), backward_passes_per_step=passes, op=op)
    oracle_optimizer = sgd(oracle.parameters())
    factor = hvd.size() if op == hvd.Sum else 1
    for _ in range(2):
        optimizer.zero_grad()
        oracle_optimizer.zero_grad()
        for x, y in batches(passes):
            x.requires_grad_(True)
            (_in_segments(module, own(x)) - own(y)).square().mean().backward()
            ((_in_segments(oracle, x) - y).square().mean() * factor).backward()
        assert_same_bits(module)
        optimizer.step()
        oracle_optimizer.step()
    assert_close(module, oracle)


@pytest.mark.parametrize(
    ("passes", "tied", "op"),
    [*((passes, tied, "Average") for passes in (1, 2) for tied in (False, True)), (1, False, "Sum")],
)
def test_checkpoints_that_call_backward_within_backward(passes: int, tied: bool, op: str) -> None:
    backward_within_backward(passes, tied, op)


def test_a_sum_of_a_parameter_in_two_reentrant_checkpoints_is_an_error() -> None:
    module, oracle = Tied(), Tied()
    optimizer = hvd.DistributedOptimizer(sgd(module.parameters()), op=hvd.Sum)
    ((x, y),) = batches(1)
    x.requires_grad_(True)
    with raises(hvd.InvalidArgumentError, "after its reduction"):
        (_in_segments(module, own(x)) - own(y)).square().mean().backward()
    with raises(hvd.InvalidArgumentError, "after its reduction"):
        optimizer.synchronize()
    optimizer.zero_grad()
    (_in_segments(module, own(x), use_reentrant=False) - own(y)).square().mean().backward()
    ((_in_segments(oracle, x) - y).square().mean() * hvd.size()).backward()
    for found, expected in zip(module.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


def test_backward_within_no_sync_may_come_before_or_after_another_collective() -> None:
    module, optimizer, oracle, oracle_optimizer = pair()
    for x, y in batches(2):
        loss = loss_of(module, own(x), own(y))
        acts: list[Callable[[], Any]] = [loss.backward, lambda z=loss: hvd.allreduce(z.detach(), name="loss")]
        optimizer.zero_grad()
        with optimizer.no_sync():
            for act in acts if hvd.rank() == 0 else acts[::-1]:
                act()
        optimizer.step()
        oracle_optimizer.zero_grad()
        loss_of(oracle, x, y).backward()
        oracle_optimizer.step()
    assert_close(module, oracle)


def test_gradients_set_by_hand_are_reduced_in_step() -> None:
    module, optimizer, oracle, oracle_optimizer = pair()
    ((x, y),) = batches(1)
    gradients = torch.autograd.grad(loss_of(module, own(x), own(y)), list(module.parameters()))
    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
        parameter.grad = gradient
    loss_of(oracle, x, y).backward()
    optimizer.step()
    oracle_optimizer.step()
    assert_close(module, oracle)
    assert_same_bits(module)


def test_synchronize_and_skip_synchronize_work_as_in_horovod() -> None:
    """The way of Horovod's scripts."""
    module, optimizer, oracle, oracle_optimizer = pair()
    for x, y in batches(3):
        optimizer.zero_grad()
        oracle_optimizer.zero_grad()
        loss_of(module, own(x), own(y)).backward()
        loss_of(oracle, x, y).backward()
        optimizer.synchronize()
        for some in (module, oracle):
            torch.nn.utils.clip_grad_norm_(some.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
        oracle_optimizer.step()
    assert_close(module, oracle)
    assert_same_bits(module)


@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zero"])
def test_gradients_may_be_cleared_through_the_model(set_to_none: bool) -> None:
    module, optimizer, oracle, oracle_optimizer = pair(op=hvd.Sum)
    for x, y in batches(3):
        module.zero_grad(set_to_none=set_to_none)
        oracle.zero_grad(set_to_none=set_to_none)
        loss_of(module, own(x), own(y)).backward()
        (loss_of(oracle, x, y) * hvd.size()).backward()
        optimizer.step()
        oracle_optimizer.step()
    assert_close(module, oracle)
    assert_same_bits(module)


def test_memory_layouts_may_differ_between_ranks() -> None:
    def build() -> torch.nn.Module:
        torch.manual_seed(6)
        return torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)

    module, oracle = build(), build()
    if hvd.rank() == 0:  # ranks may differ
        module = module.to(memory_format=torch.contiguous_format)
    optimizer = hvd.DistributedOptimizer(sgd(module.parameters()))
    oracle_optimizer = sgd(oracle.parameters())
    generator = torch.Generator().manual_seed(7)
    for _ in range(2):
        x = torch.randn(hvd.size(), 3, 8, 8, generator=generator)
        optimizer.zero_grad()
        oracle_optimizer.zero_grad()
        module(x[hvd.rank() : hvd.rank() + 1]).square().mean().backward()
        oracle(x.to(memory_format=torch.channels_last)).square().mean().backward()
        optimizer.step()
        oracle_optimizer.step()
    assert_close(module, oracle)
    assert_same_bits(module)


@pytest.mark.parametrize("kind", ["none", "fp16", "bf16"])
def test_compressed_gradients_are_near_and_alike(kind: str) -> None:
    module, optimizer, oracle, oracle_optimizer = pair(
        compression=getattr(hvd.Compression, kind), gradient_predivide_factor=2.0
    )
    tolerance = {"none": 1e-5, "fp16": 1e-3, "bf16": 1e-2}[kind]
    ((x, y),) = batches(1)
    loss_of(module, own(x), own(y)).backward()
    loss_of(oracle, x, y).backward()
    for found, expected in zip(module.parameters(), oracle.parameters(), strict=True):
        assert found.grad.dtype == torch.float32
        torch.testing.assert_close(found.grad, expected.grad, rtol=tolerance, atol=tolerance)
    optimizer.step()
    assert_same_bits(module)
    del oracle_optimizer


def half_precision_parameters(dtype_name: str) -> None:
    dtype = getattr(torch, dtype_name)
    module = model().to(dtype)
    optimizer = hvd.DistributedOptimizer(sgd(module.parameters()))
    for x, y in batches(2):
        optimizer.zero_grad()
        loss_of(module, own(x).to(dtype), own(y).to(dtype)).backward()
        optimizer.step()
    assert all(p.dtype == dtype for p in module.parameters())
    assert_same_bits(module)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_parameters_of_half_precision_stay_alike(dtype: str) -> None:
    half_precision_parameters(dtype)


def test_step_hooks_run_once() -> None:
    module, optimizer, _, _ = pair()
    optimizer.load_state_dict(optimizer.state_dict())
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    ((x, y),) = batches(1)
    loss_of(module, own(x), own(y)).backward()
    optimizer.step()
    assert seen == ["before", "after"]


def hooks_that_step_within_backward(before: bool, op_name: str, clear: str, layers: int) -> None:
    """One parameter's hook steps for all: those after it get their turn in the next backward."""

    def train(distributed: bool) -> list[list[float]]:
        parameters = [torch.nn.Parameter(torch.full((2,), i + 1.0)) for i in range(layers)]
        optimizer = torch.optim.SGD(parameters, lr=0.125)

        def step(_: Tensor) -> None:
            optimizer.step()
            if clear != "keep":
                optimizer.zero_grad(set_to_none=clear == "none")

        def wrap() -> None:
            if distributed:
                hvd.DistributedOptimizer(optimizer, op=getattr(hvd, op_name))

        if not before:
            wrap()
        parameters[-1].register_post_accumulate_grad_hook(step)
        if before:
            wrap()
        total = sum(rank + 1.0 for rank in range(hvd.size()))
        scale = hvd.rank() + 1.0 if distributed else total / (hvd.size() if op_name == "Average" else 1)
        found = []
        for number in range(4):
            sum(p.sum() * (i + number + 1) * scale for i, p in enumerate(parameters)).backward()
            found.append([p[0].item() for p in parameters])
        return found

    torch.testing.assert_close(train(True), train(False))


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("clear", ["none", "zero", "keep"])
@pytest.mark.parametrize("op", ["Average", "Sum"])
@pytest.mark.parametrize("before", [True, False], ids=["hook first", "optimizer first"])
def test_a_hook_of_a_parameter_may_step(before: bool, op: str, clear: str, layers: int) -> None:
    hooks_that_step_within_backward(before, op, clear, layers)


@pytest.mark.parametrize("before", [True, False], ids=["hook first", "optimizer first"])
def test_a_hook_of_a_parameter_may_step_every_second_time(before: bool) -> None:
    def train(distributed: bool) -> list[float]:
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = sgd([parameter], lr=1.0)
        passes: list[int] = []

        def step(_: Tensor) -> None:
            passes.append(0)
            if len(passes) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()

        if before:
            parameter.register_post_accumulate_grad_hook(step)
        if distributed:
            hvd.DistributedOptimizer(optimizer)
        if not before:
            parameter.register_post_accumulate_grad_hook(step)
        found = []
        for number in range(6):
            scale = hvd.rank() + 1.0 if distributed else (hvd.size() + 1) / 2
            (parameter * scale * (number + 1)).sum().backward()
            found.append(parameter.item())
        return found

    assert train(True) == train(False)


def test_a_hook_that_steps_after_a_second_backward_is_an_error_for_sums() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = sgd([parameter])
    steps = False
    parameter.register_post_accumulate_grad_hook(lambda _: optimizer.step() if steps else None)
    hvd.DistributedOptimizer(optimizer, op=hvd.Sum)
    parameter.sum().backward()
    steps = True
    with raises(hvd.InvalidArgumentError, "after its reduction", "zero_grad()"):
        parameter.sum().backward()
    optimizer.zero_grad()
    parameter.sum().backward()
    assert_same_bits([parameter.detach()])


@pytest.mark.parametrize("before", [True, False], ids=["scheduler first", "optimizer first"])
def test_schedulers_work_without_warnings(before: bool) -> None:
    module, oracle = model(), model()
    plain, oracle_optimizer = sgd(module.parameters()), sgd(oracle.parameters())
    oracle_scheduler = torch.optim.lr_scheduler.StepLR(oracle_optimizer, 1, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if before:
            scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
            optimizer = hvd.DistributedOptimizer(plain)
        else:
            optimizer = hvd.DistributedOptimizer(plain)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for x, y in batches(4):
            optimizer.zero_grad()
            oracle_optimizer.zero_grad()
            loss_of(module, own(x), own(y)).backward()
            loss_of(oracle, x, y).backward()
            optimizer.step()
            oracle_optimizer.step()
            scheduler.step()
            oracle_scheduler.step()
    assert optimizer.param_groups[0]["lr"] == oracle_optimizer.param_groups[0]["lr"]
    assert_close(module, oracle)
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, hvd.rank())  # only our own step() reduces these
    optimizer.step()
    assert_same_bits(module)


def _heads(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[Any, Any]:
    """An encoder with two heads, and an optimizer for each head and the encoder."""
    torch.manual_seed(3)
    parts = torch.nn.ModuleList(torch.nn.Linear(*sizes) for sizes in ((5, 4), (4, 2), (4, 2)))
    encoder, *heads = parts
    return parts, [make([*encoder.parameters(), *head.parameters()]) for head in heads]


def _losses(parts: Any, x: Tensor, y: Tensor) -> list[Tensor]:
    between = parts[0](x).tanh()
    return [(head(between) - y).square().mean() for head in parts[1:]]


Program = Callable[[Any, list[Any], Callable[[], list[Tensor]]], None]


def _in_turns(parts: Any, optimizers: list[Any], losses: Callable[[], list[Tensor]]) -> None:
    for number, optimizer in enumerate(optimizers):
        optimizer.zero_grad()
        losses()[number].backward()
        torch.nn.utils.clip_grad_norm_(parts.parameters(), 0.1)
        optimizer.step()


def _older_twice(parts: Any, optimizers: list[Any], losses: Callable[[], list[Tensor]]) -> None:
    _in_turns(parts, [optimizers[0]], losses)
    _in_turns(parts, optimizers, losses)


def _without_zeroing(parts: Any, optimizers: list[Any], losses: Callable[[], list[Tensor]]) -> None:
    for number in (0, 0, 1, 0):
        losses()[number].backward()
        optimizers[number].step()


def _together(parts: Any, optimizers: list[Any], losses: Callable[[], list[Tensor]]) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    first, second = losses()
    first.backward(retain_graph=True)
    second.backward()
    torch.nn.utils.clip_grad_norm_(parts.parameters(), 0.1)
    for optimizer in optimizers:
        optimizer.step()


def _together_reversed(parts: Any, optimizers: list[Any], losses: Callable[[], list[Tensor]]) -> None:
    _together(parts, optimizers[::-1], losses)


def _one_backward(parts: Any, optimizers: list[Any], losses: Callable[[], list[Tensor]]) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    sum(losses()).backward()
    for optimizer in optimizers:
        optimizer.step()


def _twice_each(parts: Any, optimizers: list[Any], losses: Callable[[], list[Tensor]]) -> None:
    """As with ``backward_passes_per_step=2``."""
    for number, optimizer in enumerate(optimizers):
        optimizer.zero_grad()
        for _ in range(2):
            losses()[number].backward()
        optimizer.step()


def _twice_crossed(parts: Any, optimizers: list[Any], losses: Callable[[], list[Tensor]]) -> None:
    """The older one steps while the other is in the middle of its passes."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    losses()[1].backward()
    losses()[0].backward()
    optimizers[0].step()
    losses()[1].backward()
    optimizers[1].step()


def _no_sync(parts: Any, optimizers: list[Any], losses: Callable[[], list[Tensor]]) -> None:
    for number, optimizer in enumerate(optimizers):
        optimizer.zero_grad()
        with optimizer.no_sync() if hasattr(optimizer, "no_sync") else contextlib.nullcontext():
            losses()[number].backward()
        losses()[number].backward()
        optimizer.step()


SHARING: dict[str, Program] = {
    "in turns": _in_turns,
    "older twice": _older_twice,
    "without zeroing": _without_zeroing,
    "together": _together,
    "together reversed": _together_reversed,
    "one backward": _one_backward,
    "twice each": _twice_each,
    "twice crossed": _twice_crossed,
    "no_sync": _no_sync,
}


def optimizers_share_parameters(kind: str, op_name: str, **options: Any) -> None:
    program, op = SHARING[kind], getattr(hvd, op_name)
    parts, optimizers = _heads(OPTIMIZERS["momentum"])
    oracle, oracle_optimizers = _heads(OPTIMIZERS["momentum"])
    optimizers = [hvd.DistributedOptimizer(optimizer, op=op, **options) for optimizer in optimizers]
    factor = hvd.size() if op == hvd.Sum else 1
    for x, y in batches(3):
        program(parts, optimizers, lambda x=x, y=y: _losses(parts, own(x), own(y)))
        program(oracle, oracle_optimizers, lambda x=x, y=y: [factor * z for z in _losses(oracle, x, y)])
    assert_close(parts, oracle)
    assert_same_bits([p.detach() for p in parts.parameters()])


@pytest.mark.parametrize(
    ("kind", "op", "options"),
    [
        *((kind, "Average", {}) for kind in SHARING),
        ("twice each", "Average", {"backward_passes_per_step": 2}),
        ("twice crossed", "Average", {"backward_passes_per_step": 2}),
        ("together", "Average", {"num_groups": 1}),
        *((kind, "Sum", {}) for kind in ("in turns", "older twice", "without zeroing", "no_sync")),
        ("twice each", "Sum", {"backward_passes_per_step": 2}),
        ("one backward", "Sum", {"num_groups": 2}),
    ],
)
def test_optimizers_may_share_parameters(kind: str, op: str, options: dict[str, Any]) -> None:
    optimizers_share_parameters(kind, op, **options)


def test_ranks_may_skip_a_loss_of_a_shared_encoder() -> None:
    """In each step each rank draws the losses that it computes, and leaves zeros where it has none."""
    parts, optimizers = _heads(OPTIMIZERS["adam"])
    oracle, oracle_optimizers = _heads(OPTIMIZERS["adam"])
    optimizers = [hvd.DistributedOptimizer(optimizer) for optimizer in optimizers]
    generator = torch.Generator().manual_seed(9)
    for x, y in batches(6):
        for optimizer in (*optimizers, *oracle_optimizers):
            optimizer.zero_grad(set_to_none=False)
        for rank in range(hvd.size()):
            count = int(torch.randint(0, 3, (), generator=generator))
            for number in torch.randint(0, 2, (count,), generator=generator):
                if rank == hvd.rank():
                    _losses(parts, own(x), own(y))[number].backward()
                (_losses(oracle, own(x, rank), own(y, rank))[number] / hvd.size()).backward()
        for optimizer in (*optimizers, *oracle_optimizers):
            optimizer.step()
    assert_close(parts, oracle)
    assert_same_bits([p.detach() for p in parts.parameters()])


@pytest.mark.parametrize(("kind", "expected"), [("in turns", 11), ("one backward", 9), ("together", 12)])
def test_a_shared_gradient_is_sent_once_in_a_backward(kind: str, expected: int) -> None:
    """Rounds included: at the end of each backward, in a step of the older optimizer, and in the next one."""
    parts, optimizers = _heads(sgd)
    optimizers = [hvd.DistributedOptimizer(optimizer) for optimizer in optimizers]
    ((x, y),) = batches(1)
    before = hvd.counters()["operations"]
    SHARING[kind](parts, optimizers, lambda: _losses(parts, own(x), own(y)))
    assert hvd.counters()["operations"] - before == expected


def test_three_optimizers_may_share_parameters_and_the_newest_be_deleted() -> None:
    module, oracle = model(), model()
    optimizers = [hvd.DistributedOptimizer(sgd(module.parameters(), lr)) for lr in (0.1, 0.2, 0.3)]
    oracle_optimizers = [sgd(oracle.parameters(), lr) for lr in (0.1, 0.2, 0.3)]
    gc.collect()
    newest = hvd.DistributedOptimizer(sgd(module.parameters()))
    del newest  # the others go on
    for number, (x, y) in enumerate(batches(6)):
        for some, those, rows in ((module, optimizers, own), (oracle, oracle_optimizers, lambda t: t)):
            those[number % 3].zero_grad()
            loss_of(some, rows(x), rows(y)).backward()
            those[number % 3].step()
    assert_close(module, oracle)
    assert_same_bits([p.detach() for p in module.parameters()])


def test_shared_parameters_may_be_local() -> None:
    parts, optimizers = _heads(sgd)
    older, newer = (hvd.DistributedOptimizer(optimizer) for optimizer in optimizers)
    older.register_local_var(parts[0].weight)
    ((x, y),) = batches(1)
    alone = copy.deepcopy(parts)
    for number, optimizer in enumerate((older, newer)):
        optimizer.zero_grad()
        alone.zero_grad()
        _losses(parts, own(x), own(y))[number].backward()
        _losses(alone, own(x), own(y))[number].backward()
        torch.testing.assert_close(parts[0].weight.grad, alone[0].weight.grad / hvd.size())
        torch.testing.assert_close(parts[0].bias.grad, hvd.allreduce(alone[0].bias.grad))
        optimizer.step()
        alone.load_state_dict(parts.state_dict())


@pytest.mark.parametrize("before", [True, False], ids=["hook first", "optimizer first"])
def test_hooks_may_step_with_shared_parameters(before: bool) -> None:
    def train(distributed: bool) -> float:
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizers = [sgd([parameter], lr) for lr in (1.0, 0.5)]
        turns: list[int] = []

        def step(_: Tensor) -> None:
            turns.append(len(turns) % 2)
            optimizers[turns[-1]].step()
            optimizers[turns[-1]].zero_grad()

        if before:
            parameter.register_post_accumulate_grad_hook(step)
        if distributed:
            for optimizer in optimizers:
                hvd.DistributedOptimizer(optimizer)
        if not before:
            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(5):
            (parameter * (hvd.rank() + 1.0 if distributed else (hvd.size() + 1) / 2)).sum().backward()
        return parameter.item()

    assert train(True) == train(False)


def test_a_newer_optimizer_of_another_op_takes_over() -> None:
    module, old, oracle, oracle_optimizer = pair(op=hvd.Sum)
    new = hvd.DistributedOptimizer(sgd(module.parameters()))
    for x, y in batches(2):
        new.zero_grad()
        oracle_optimizer.zero_grad()
        loss_of(module, own(x), own(y)).backward()
        loss_of(oracle, x, y).backward()
        new.step()
        oracle_optimizer.step()
    assert_close(module, oracle)
    with raises(hvd.InvalidArgumentError, "newer", "the same op"):
        old.step()
    part = hvd.DistributedOptimizer(sgd(module[0].parameters()), op=hvd.Sum)
    x, y = batches(1)[0]
    loss_of(module, own(x), own(y)).backward()
    part.step()
    assert not new._gradients.in_flight
    with raises(hvd.InvalidArgumentError, "newer"):
        new.step()


class _Gone(rounds.Section):
    """Of an optimizer without parameters, which is deleted at once."""

    def parameter_names(self) -> list[str]:
        raise AssertionError("it is gone")

    def report(self, *, at_step: bool) -> bytes:
        raise AssertionError("it is gone")

    def start_missing(self, states: bytes) -> None: ...

    def finish(self) -> None: ...

    def compare_values(self) -> None: ...

    def drop(self) -> None: ...


def test_a_deleted_optimizer_leaves_no_trace() -> None:
    module = model()
    optimizer = hvd.DistributedOptimizer(sgd(module.parameters()))
    del optimizer
    gc.collect()
    ((x, y),) = batches(1)
    before = hvd.counters()["operations"]
    loss_of(module, own(x), own(y)).backward()
    assert hvd.counters()["operations"] == before
    other, optimizer, _, _ = pair()
    board = optimizer._gradients.board
    for _ in range(2):
        for _ in range(rounds.GONE_BYTES_MAX // 4 + 1):
            board.add(_Gone())
        gc.collect()
        loss_of(other, own(x), own(y)).backward()
        assert all(place.section() is not None for place in board.places), (
            "the places of the deleted are left"
        )


def test_a_copy_does_not_train_silently_alone() -> None:
    _, optimizer, _, _ = pair()
    with raises(hvd.InvalidArgumentError, "copy"):
        copy.deepcopy(optimizer).step()


def test_bad_arguments_are_refused_and_leave_the_optimizer_as_it_was() -> None:
    module = model()
    plain = sgd(module.parameters())
    named = list(module.named_parameters())
    own = [parameter for _, parameter in named]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"backward_passes_per_step": 0}, "backward_passes_per_step=0"),
        ({"backward_passes_per_step": True}, "backward_passes_per_step=True"),
        ({"backward_passes_per_step": 2.5}, "backward_passes_per_step=2.5"),
        ({"num_groups": -1}, "num_groups=-1"),
        ({"num_groups": 1.5}, "num_groups=1.5"),
        ({"num_groups": 2, "groups": [own]}, "num_groups=2"),
        ({"groups": -1}, "groups=-1"),
        ({"groups": "all"}, "groups='all'"),
        ({"groups": own}, "groups[0]: expected a list"),
        ({"groups": [own[:1], [own[1], own[0]]]}, "groups[1][1] is in groups[0]"),
        ({"groups": [[*own, torch.ones(1)]]}, "groups[0][4]"),
        ({"op": 6}, "op=6"),
        ({"op": hvd.Adasum, "gradient_predivide_factor": 2.0}, "op=Average"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "op=Average"),
        ({"named_parameters": named[:-1]}, "[3]"),
        ({"named_parameters": [*named, named[0]]}, "0.weight"),
        ({"named_parameters": module.parameters()}, "model.named_parameters()"),
    ]
    for options, part in cases:
        with raises(ValueError, part):
            hvd.DistributedOptimizer(plain, **options)
    assert type(plain) is torch.optim.SGD
    for options in ({}, {"op": hvd.Adasum}):
        optimizer = hvd.DistributedOptimizer(sgd(module.parameters()), **options)
        for passes in (0, True, 2.5):
            with raises(ValueError, f"backward_passes_per_step={passes}"):
                optimizer.set_backward_passes_per_step(passes)
    with raises(TypeError, "Sequential"):
        hvd.DistributedOptimizer(module)  # type: ignore[arg-type]
    with raises(ValueError, "already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(plain))
    with raises(ValueError, "lazy"):
        hvd.DistributedOptimizer(sgd(torch.nn.LazyLinear(3).parameters()))


@pytest.mark.parametrize(
    "kind", ["number", "number as groups", "more than parameters", "lists", "compressed"]
)
def test_a_group_is_reduced_by_one_operation(kind: str) -> None:
    """And what they compute is what single reductions do. The bias of the last layer is in no group."""
    module, oracle = model(), model()
    first, second, third, _ = module.parameters()
    dtypes = [torch.float32, torch.float64]
    for some in (module, oracle):
        for layer, dtype in zip((some[0], some[2]), dtypes, strict=True):
            layer.to(dtype)
    options, operations = {
        "number": ({"num_groups": 3}, 3),
        "number as groups": ({"groups": 1}, 1),
        "more than parameters": ({"num_groups": 9}, 4),
        "lists": ({"groups": [[third, first], [second]]}, 3),
        "compressed": ({"groups": [[first, third]], "compression": hvd.Compression.bf16}, 3),
    }[kind]
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](module.parameters()), **options)
    oracle_optimizer = OPTIMIZERS["momentum"](oracle.parameters())
    for x, y in batches(3):
        optimizer.zero_grad()
        oracle_optimizer.zero_grad()
        before = hvd.counters()["operations"]
        (module[2](module[0](own(x)).double()) - own(y)).square().mean().backward()
        assert hvd.counters()["operations"] == before + operations + 1
        (oracle[2](oracle[0](x).double()) - y).square().mean().backward()
        for found, expected in zip(module.parameters(), oracle.parameters(), strict=True):
            tolerance = 1e-2 if kind == "compressed" else 1e-5
            torch.testing.assert_close(found.grad, expected.grad, rtol=tolerance, atol=tolerance)
            found.grad.copy_(expected.grad)
        optimizer.step()
        oracle_optimizer.step()


def test_frozen_parameters_do_not_hold_their_group_up() -> None:
    module, oracle = model(), model()
    for some in (module, oracle):
        some[0].bias.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(sgd(module.parameters()), groups=[list(module.parameters())])
    oracle_optimizer = sgd(oracle.parameters())
    for step, (x, y) in enumerate(batches(3)):
        if step == 2:
            module[0].bias.requires_grad_(True)
            oracle[0].bias.requires_grad_(True)
        optimizer.zero_grad()
        oracle_optimizer.zero_grad()
        before = hvd.counters()["operations"]
        loss_of(module, own(x), own(y)).backward()
        loss_of(oracle, x, y).backward()
        assert hvd.counters()["operations"] == before + 2 + (step == 2)
        optimizer.step()
        oracle_optimizer.step()
    assert_close(module, oracle)


def test_other_shapes_in_a_group_are_an_error_on_every_rank() -> None:
    width = 3 + (hvd.rank() == 1)
    module = torch.nn.Sequential(torch.nn.Linear(5, width), torch.nn.Linear(width, 2))
    optimizer = hvd.DistributedOptimizer(sgd(module.parameters()), module.named_parameters(), num_groups=1)
    ((x, y),) = batches(1)
    with raises(hvd.RankMismatchError, "group.0", "'1.weight'", "[3, 5]", "[4, 5]"):
        loss_of(module, own(x), own(y)).backward()
    assert not optimizer._gradients.in_flight
    assert_usable()


class Words(torch.nn.Module):
    """An embedding, of which each rank may use other rows, and a layer."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.embedding = torch.nn.Embedding(12, 3, sparse=sparse)
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, words: list[int]) -> Tensor:
        rows = self.embedding(torch.tensor(words)) if words else torch.ones(2, 3)
        result: Tensor = self.layer(rows).square().sum()
        return result


def _words(rank: int, step: int) -> list[int]:
    """Some rows occur twice. In the first step rank 0 has none, in the second no rank has any."""
    if step == 1 or (step == 0 and rank == 0):
        return []
    return [(rank + step + i) % 5 for i in range(rank + 2)] * 2


@pytest.mark.parametrize(
    "kind", ["sparse", "sum", "grouped", "compressed", "as dense", "as dense in a group", "two passes"]
)
def test_sparse_gradients_train_like_dense_ones(kind: str) -> None:
    options = {
        "sparse": {},
        "sum": {"op": hvd.Sum},
        "grouped": {"num_groups": 2},
        "compressed": {"compression": hvd.Compression.bf16},
        "as dense": {"sparse_as_dense": True},
        "as dense in a group": {"sparse_as_dense": True, "num_groups": 1},
        "two passes": {"backward_passes_per_step": 2},
    }[kind]
    passes = options.get("backward_passes_per_step", 1)
    divisor = 1 if kind == "sum" else hvd.size()
    module, oracle = Words(sparse=True), Words(sparse=False)
    optimizer = hvd.DistributedOptimizer(sgd(module.parameters(), 0.01), **options)
    oracle_optimizer = sgd(oracle.parameters(), 0.01)
    for step in range(0, 4 * passes, passes):
        optimizer.zero_grad()
        oracle_optimizer.zero_grad()
        for number in range(step, step + passes):
            module(_words(hvd.rank(), number)).backward()
            for rank in range(hvd.size()):
                (oracle(_words(rank, number)) / divisor).backward()
        gradient, expected = module.embedding.weight.grad, oracle.embedding.weight.grad
        assert (gradient is None) == (expected is None)
        if gradient is not None:
            assert gradient.is_sparse
            if "dense" not in kind:
                touched = {w for r in range(hvd.size()) for n in range(passes) for w in _words(r, step + n)}
                assert gradient.is_coalesced()
                assert gradient.indices().tolist() == [sorted(touched)]
            tolerance = 3e-2 if kind == "compressed" else 1e-5
            torch.testing.assert_close(gradient.to_dense(), expected, rtol=tolerance, atol=tolerance)
        optimizer.step()
        if kind != "compressed":
            oracle_optimizer.step()
            assert_close(module, oracle)
        else:
            oracle.load_state_dict(module.state_dict())
        assert_same_bits(list(module.parameters()))


def test_zeros_take_the_layout_of_what_another_rank_has_computed() -> None:
    """Zeros of another layout, as ``zero_grad(set_to_none=False)`` leaves them, do not matter."""
    module = Words(sparse=True)
    optimizer = hvd.DistributedOptimizer(sgd(module.parameters()))
    weight = module.embedding.weight
    if hvd.rank() == 0:
        weight.grad = torch.zeros_like(weight)
    module(_words(hvd.rank(), 0)).backward()
    optimizer.step()
    assert weight.grad.is_sparse
    assert_same_bits([weight])
    optimizer.zero_grad(set_to_none=hvd.rank() == 0)
    if hvd.rank() == 0:
        (weight.sum() + module([])).backward()
    else:
        module([]).backward()
    assert not weight.grad.is_sparse
    torch.testing.assert_close(weight.grad, torch.full_like(weight, 1 / hvd.size()))
    optimizer.step()
    assert_same_bits([weight])


def test_sparse_here_and_dense_there_is_an_error_on_every_rank() -> None:
    module = Words(sparse=hvd.rank() == 0)
    optimizer = hvd.DistributedOptimizer(sgd(module.parameters()), module.named_parameters())
    with raises(hvd.RankMismatchError, "'embedding.weight'", "allgather", "allreduce"):
        module([1, 2]).backward()
    assert not optimizer._gradients.in_flight
    assert_usable()


def test_sparse_gradients_are_refused_where_their_zeros_count() -> None:
    for op in (hvd.Product, hvd.Max):
        layer = torch.nn.Embedding(4, 3, sparse=True)
        optimizer = hvd.DistributedOptimizer(sgd(layer.parameters()), layer.named_parameters(), op=op)
        with raises(hvd.InvalidArgumentError, "'weight'", "sparse_as_dense=True", f"op={op.name}"):
            layer(torch.tensor([1])).sum().backward()
        assert not optimizer._gradients.in_flight
    assert_usable()


def _adasum(a: Tensor, b: Tensor) -> Tensor:
    dot = (a * b).sum()
    return (1 - dot / (2 * a.square().sum())) * a + (1 - dot / (2 * b.square().sum())) * b


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("kind", "num_groups"), [("momentum", 0), ("adam", 1)])
def test_adasum_combines_what_optimizers_make_of_gradients(kind: str, num_groups: int) -> None:
    """Three steps, so that the state of the optimizer, which is the rank's own, has its part in them."""
    module, optimizer, _, _ = pair(OPTIMIZERS[kind], op=hvd.Adasum, num_groups=num_groups)
    oracles = [model(), model()]  # both ranks, each with its own optimizer
    steppers = [OPTIMIZERS[kind](oracle.parameters()) for oracle in oracles]
    for x, y in batches(3):
        before = hvd.counters()["operations"]
        optimizer.zero_grad()
        loss_of(module, own(x), own(y)).backward()
        assert hvd.counters()["operations"] == before
        optimizer.step()
        starts = [p.detach().clone() for p in oracles[0].parameters()]
        for rank, (oracle, stepper) in enumerate(zip(oracles, steppers, strict=True)):
            stepper.zero_grad()
            loss_of(oracle, own(x, rank), own(y, rank)).backward()
            stepper.step()
        with torch.no_grad():
            for start, a, b in zip(starts, *(oracle.parameters() for oracle in oracles), strict=True):
                moved = start + _adasum(a - start, b - start)
                a.copy_(moved)
                b.copy_(moved)
    assert_close(module, oracles[0])
    assert_same_bits([p.detach() for p in module.parameters()])


@pytest.mark.ranks(2)
def test_adasum_works_with_closures_scalers_and_schedulers() -> None:
    module, optimizer, _, _ = pair(op=hvd.Adasum)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    ((x, y),) = batches(1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(module, own(x), own(y))
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    scheduler.step()
    assert_same_bits([p.detach() for p in module.parameters()])
    # A rank that overflows adds nothing: Adasum of one step and nothing is that step.
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    started = copy.deepcopy(module.state_dict())
    optimizer.zero_grad()
    loss = loss_of(module, own(x, 1), own(y, 1))
    scaler.scale(loss * float("inf") if hvd.rank() == 0 else loss).backward()
    scaler.step(optimizer)
    scaler.update()
    expected = model()
    expected.load_state_dict(started)
    loss_of(expected, own(x, 1), own(y, 1)).backward()
    torch.optim.SGD(expected.parameters(), 0.05).step()
    assert_close(module, expected)
    assert_same_bits([p.detach() for p in module.parameters()])
    assert scaler.get_scale() == (2.0 if hvd.rank() == 0 else 4.0)
    # What cannot be combined leaves the model as it was.
    width = 3 + (hvd.rank() == 1)
    other = torch.nn.Linear(2, width)
    stepper = hvd.DistributedOptimizer(sgd(other.parameters()), op=hvd.Adasum)
    before = [p.detach().clone() for p in other.parameters()]
    other(torch.ones(1, 2)).sum().backward()
    with raises(hvd.RankMismatchError, "adasum"):
        stepper.step()
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))
    mine = torch.nn.Linear(2, 2)
    local = hvd.DistributedOptimizer(sgd(mine.parameters()), op=hvd.Adasum)
    local.register_local_var(mine.weight)
    with torch.no_grad():
        mine.weight.zero_()
    mine(torch.full((1, 2), hvd.rank() + 1.0)).sum().backward()
    local.step()
    torch.testing.assert_close(mine.weight.detach(), torch.full((2, 2), -0.1 * (hvd.rank() + 1)))
    with raises(hvd.InvalidArgumentError, "copy"):
        copy.deepcopy(local).step()


def test_adasum_holds_passes_until_the_step() -> None:
    """An elastic state is not to commit between passes: their gradients are not part of it."""
    module, optimizer, _, _ = pair(op=hvd.Adasum, backward_passes_per_step=2)
    held = optimizer._steps.passes_held
    ((x, y),) = batches(1)

    def make_pass() -> None:
        loss_of(module, own(x), own(y)).backward()

    for use in (optimizer.step, optimizer.zero_grad, drop_passes):
        assert held() == 0
        make_pass()
        assert held() == 2
        assert passes_held() >= 2
        make_pass()
        use()
    assert held() == 0
    optimizer.set_backward_passes_per_step(1)
    make_pass()
    assert held() == 0
    optimizer.set_backward_passes_per_step(3)
    make_pass()
    assert held() == 3
    optimizer.zero_grad()


@pytest.mark.parametrize("num_groups", [0, 1])
def test_ranks_may_join_before_others(num_groups: int) -> None:
    """Rank r has r + 1 batches; those that have joined add zeros, and count as ranks."""
    module, oracle = Words(sparse=True), Words(sparse=False)
    optimizer = hvd.DistributedOptimizer(sgd(module.parameters(), 0.01), num_groups=num_groups)
    oracle_optimizer = sgd(oracle.parameters(), 0.01)
    for step in range(hvd.rank() + 1):
        optimizer.zero_grad()
        oracle_optimizer.zero_grad()
        module(_words(hvd.rank(), step + 2)).backward()
        for rank in range(step, hvd.size()):
            (oracle(_words(rank, step + 2)) / hvd.size()).backward()
        optimizer.step()
        oracle_optimizer.step()
    last = hvd.join()
    assert last == hvd.size() - 1
    assert_close(module, oracle)
    hvd.broadcast_parameters(module.state_dict(), last)
    module(_words(hvd.rank(), 9)).backward()
    optimizer.step()
    assert_same_bits(module.parameters())


@pytest.mark.parametrize("kind", ["scaled", "unscaled", "sum", "two passes", "sparse", "grouped"])
def test_local_gradients_stay_on_their_rank(kind: str) -> None:
    """The embedding, or the first layer, has gradients of this rank's rows alone."""
    options: dict[str, dict[str, Any]] = {
        "unscaled": {"scale_local_gradients": False},
        "sum": {"op": hvd.Sum},
        "two passes": {"backward_passes_per_step": 2},
        "grouped": {"num_groups": 1},
    }
    torch.manual_seed(1)
    first = torch.nn.Embedding(9, 4, sparse=kind == "sparse")
    module = torch.nn.Sequential(first, torch.nn.Linear(4, 2))
    alone = copy.deepcopy(module)
    optimizer = hvd.DistributedOptimizer(sgd(module.parameters()), **options.get(kind, {}))
    optimizer.register_local_var(first.weight)
    optimizer.register_local_var(first.weight)  # once more changes nothing
    divisor = 1 if kind in ("sum", "unscaled") else hvd.size()
    before = hvd.counters()["operations"]
    for step in range(2):
        optimizer.zero_grad()
        alone.zero_grad()
        for number in range(2 if kind == "two passes" else 1):
            words = torch.tensor(_words(hvd.rank(), step + number), dtype=torch.int64)
            module(words).square().sum().backward()
            alone(words).square().sum().backward()
        found = first.weight.grad
        assert found is not None
        torch.testing.assert_close(found.to_dense(), alone[0].weight.grad.to_dense() / divisor)
        for p, q in zip(module[1].parameters(), alone[1].parameters(), strict=True):
            torch.testing.assert_close(
                p.grad, hvd.allreduce(q.grad, op=hvd.Sum if kind == "sum" else hvd.Average)
            )
        if step == 0:
            # A round, the two of the linear layer, and as many of the test.
            assert hvd.counters()["operations"] == before + (2 if kind == "grouped" else 3) + 2
        optimizer.step()
        alone.load_state_dict(module.state_dict())
    assert_same_bits(list(module[1].parameters()))


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_what_is_local_on_one_rank_is_reduced_by_the_others(sparse: bool) -> None:
    torch.manual_seed(1)
    table = torch.nn.Embedding(9, 4, sparse=sparse)
    alone = copy.deepcopy(table)
    optimizer = hvd.DistributedOptimizer(sgd(table.parameters()), op=hvd.Sum)
    if hvd.rank() == 1:
        optimizer.register_local_var(table.weight)
    table(torch.tensor(_words(hvd.rank(), 0), dtype=torch.int64)).square().sum().backward()
    for rank in range(hvd.size()):
        if rank == hvd.rank() if hvd.rank() == 1 else rank != 1:
            alone(torch.tensor(_words(rank, 0), dtype=torch.int64)).square().sum().backward()
    assert table.weight.grad is not None
    torch.testing.assert_close(table.weight.grad.to_dense(), alone.weight.grad.to_dense())
    optimizer.step()
    assert_usable()


def test_local_parameters_are_declared_before_backward() -> None:
    module = model()
    optimizer = hvd.DistributedOptimizer(sgd(module.parameters()), module.named_parameters())
    with raises(hvd.InvalidArgumentError, "no such parameter"):
        optimizer.register_local_var(torch.nn.Parameter(torch.ones(2)))
    ((x, y),) = batches(1)
    loss_of(module, own(x), own(y)).backward()
    with raises(hvd.InvalidArgumentError, "'0.weight'", "before backward()"):
        optimizer.register_local_var(module[0].weight)
    optimizer.step()
    optimizer.zero_grad()
    frozen = module[0].weight.requires_grad_(False)
    optimizer.register_local_var(frozen)
    frozen.requires_grad_(True)
    oracle = copy.deepcopy(module)
    loss_of(module, own(x), own(y)).backward()
    loss_of(oracle, own(x), own(y)).backward()
    torch.testing.assert_close(frozen.grad, oracle[0].weight.grad / hvd.size())
    newer = hvd.DistributedOptimizer(sgd(module.parameters()), op=hvd.Sum)
    newer.zero_grad()
    loss_of(module, own(x), own(y)).backward()
    torch.testing.assert_close(frozen.grad, hvd.allreduce(oracle[0].weight.grad, op=hvd.Sum))
    newer.step()
    with raises(hvd.InvalidArgumentError, "newer"):
        optimizer.register_local_var(frozen)


def test_gradients_with_a_graph_are_refused() -> None:
    module, optimizer, _, _ = pair()
    ((x, y),) = batches(1)
    with raises(hvd.InvalidArgumentError, "create_graph"):
        loss_of(module, own(x), own(y)).backward(create_graph=True)
    module.zero_grad()
    gradients = weakref.ref(optimizer._gradients)
    del optimizer
    gc.collect()  # the graph has made reference cycles
    assert gradients() is None, "the next init() would take it for an optimizer in use"


class _Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise ArithmeticError("a backward of the user's")


def test_a_backward_that_fails_can_be_recovered_from() -> None:
    module, optimizer, oracle, oracle_optimizer = pair()
    ((x, y),) = batches(1)
    broken = module[2](_Breaks.apply(module[1](module[0](own(x)))))
    with raises(ArithmeticError, "user's"):
        (broken - own(y)).square().mean().backward()
    with raises(hvd.InvalidArgumentError, "synchronize()"):
        optimizer.zero_grad()
    optimizer.synchronize()
    optimizer.zero_grad()
    loss_of(module, own(x), own(y)).backward()
    loss_of(oracle, x, y).backward()
    optimizer.step()
    oracle_optimizer.step()
    assert_close(module, oracle)
    assert_same_bits(module)


def test_gradients_of_other_shapes_are_an_error_on_every_rank() -> None:
    width = 3 + (hvd.rank() == 1)
    module = torch.nn.Sequential(torch.nn.Linear(5, width), torch.nn.Linear(width, 2))
    optimizer = hvd.DistributedOptimizer(sgd(module.parameters()), module.named_parameters())
    ((x, y),) = batches(1)
    with raises(hvd.RankMismatchError, "'1.weight'", "[2, 3]", "[2, 4]"):
        loss_of(module, own(x), own(y)).backward()
    assert not optimizer._gradients.in_flight
    assert_usable()


def test_other_numbers_of_parameters_are_an_error_on_every_rank() -> None:
    module = torch.nn.Linear(5, 2, bias=hvd.rank() == 0)
    optimizer = hvd.DistributedOptimizer(sgd(module.parameters()))
    ((x, y),) = batches(1)
    with raises(
        hvd.RankMismatchError, "number of parameters: 'parameter 1 of shape [2]' is on rank 0 and not"
    ):
        loss_of(module, own(x), own(y)).backward()
    assert not optimizer._gradients.in_flight
    with raises(hvd.InvalidArgumentError, "make new ones"):
        optimizer.step()
    if hvd.rank() == 0:  # its operation is pending on no other rank: if it left first, it would end the job
        with raises(hvd.HorovodInternalError):
            hvd.allreduce(torch.ones(1), name="until the others have left")
    hvd.shutdown()
    hvd.init()
    has_averages_when_backward_returns()


def test_ranks_outside_the_process_set_train_alone() -> None:
    hvd.shutdown()
    members = hvd.ProcessSet(range(hvd_size() - 1))
    hvd.init(process_sets=[members])
    module, optimizer, oracle, oracle_optimizer = pair(process_set=members)
    count = members.size()
    for x, y in batches(3):
        optimizer.zero_grad()
        oracle_optimizer.zero_grad()
        loss_of(module, own(x), own(y)).backward()
        some = [hvd.rank()] if not members.included() else list(range(count))
        for rank in some:
            (loss_of(oracle, own(x, rank), own(y, rank)) / len(some)).backward()
        optimizer.step()
        oracle_optimizer.step()
    assert_close(module, oracle)
    hvd.shutdown()
    hvd.init()


def models_may_be_cast_later(dtype_name: str) -> None:
    dtype = getattr(torch, dtype_name)
    module, optimizer, oracle, oracle_optimizer = pair(OPTIMIZERS["momentum"])
    module.to(dtype)
    oracle.to(dtype)
    for x, y in batches(3):
        x, y = x.to(dtype), y.to(dtype)
        optimizer.zero_grad()
        loss_of(module, own(x), own(y)).backward()
        optimizer.step()
        oracle_optimizer.zero_grad()
        loss_of(oracle, x, y).backward()
        oracle_optimizer.step()
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 0.05, "atol": 0.02}
    for found, expected in zip(module.parameters(), oracle.parameters(), strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, **tolerance)
    assert_same_bits(module)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_model_may_be_cast_after_its_optimizer_was_made(dtype: str) -> None:
    models_may_be_cast_later(dtype)


def test_state_goes_through_a_file_into_a_plain_optimizer_and_back() -> None:
    """A checkpoint has no trace of us: torch alone can read it, and so can another job."""
    module, optimizer, oracle, oracle_optimizer = pair(OPTIMIZERS["adam"])
    data = batches(4)
    for x, y in data[:2]:
        optimizer.zero_grad()
        loss_of(module, own(x), own(y)).backward()
        optimizer.step()
    file = io.BytesIO()
    torch.save({"model": module.state_dict(), "optimizer": copy.deepcopy(optimizer.state_dict())}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    oracle.load_state_dict(loaded["model"])
    oracle_optimizer.load_state_dict(loaded["optimizer"])
    again = model()
    again.load_state_dict(loaded["model"])
    resumed = hvd.DistributedOptimizer(OPTIMIZERS["adam"](again.parameters()))
    resumed.load_state_dict(copy.deepcopy(loaded["optimizer"]))
    for x, y in data[2:]:
        resumed.zero_grad()
        loss_of(again, own(x), own(y)).backward()
        resumed.step()
        oracle_optimizer.zero_grad()
        loss_of(oracle, x, y).backward()
        oracle_optimizer.step()
    assert_close(again, oracle)
    assert_same_bits(again)


def test_two_networks_that_play_against_each_other() -> None:
    """Each backward of one goes through the other, whose gradients are then thrown away."""

    def networks() -> tuple[torch.nn.Module, torch.nn.Module]:
        torch.manual_seed(2)
        return torch.nn.Linear(5, 2), torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))

    def train(distributed: bool) -> list[torch.nn.Module]:
        maker, judge = networks()
        optimizers = [torch.optim.Adam(net.parameters(), lr=0.01) for net in (maker, judge)]
        if distributed:
            optimizers = [hvd.DistributedOptimizer(optimizer) for optimizer in optimizers]
        for noise, real in batches(4):
            z, x = (own(noise), own(real)) if distributed else (noise, real)
            optimizers[1].zero_grad()
            torch.nn.functional.softplus(-judge(x)).mean().backward()
            torch.nn.functional.softplus(judge(maker(z).detach())).mean().backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            torch.nn.functional.softplus(-judge(maker(z))).mean().backward()
            optimizers[0].step()
        return [maker, judge]

    for found, expected in zip(train(True), train(False), strict=True):
        assert_close(found, expected)
        assert_same_bits([p.detach() for p in found.parameters()])


def test_channels_last_trains_like_row_major() -> None:
    def train(distributed: bool) -> torch.nn.Module:
        torch.manual_seed(4)
        module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 2))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        if distributed:
            module = module.to(memory_format=torch.channels_last)
            optimizer = hvd.DistributedOptimizer(optimizer)
        for step in range(3):
            x = torch.randn(4 * hvd.size(), 3, 6, 6, generator=torch.Generator().manual_seed(step))
            if distributed:
                x = own(x).to(memory_format=torch.channels_last)
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
        return module

    found = train(True)
    assert found[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert_close(found, train(False))
    assert_same_bits([p.detach() for p in found.parameters()])


def hvd_size() -> int:
    """Number of ranks, while hvd is shut down."""
    from polyhvd.config import Launched

    return Launched.from_environment().size


def test_before_init_it_says_so() -> None:
    hvd.shutdown()
    with raises(ValueError, "hvd.init()"):
        hvd.DistributedOptimizer(sgd(model().parameters()))
    hvd.init()


def test_passes_within_no_sync_only_add_up() -> None:
    expected, found = model(), model()
    reference = torch.optim.SGD(expected.parameters(), 0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(found.parameters(), 0.1, momentum=0.9))
    for steps in (batches(4)[:2], batches(4)[2:]):
        reference.zero_grad()
        for x, y in steps:
            loss_of(expected, x, y).backward()
        reference.step()
        optimizer.zero_grad()
        before = hvd.counters()["operations"]
        with optimizer.no_sync():
            loss_of(found, own(steps[0][0]), own(steps[0][1])).backward()
        assert hvd.counters()["operations"] == before
        loss_of(found, own(steps[1][0]), own(steps[1][1])).backward()
        optimizer.step()
    assert_close(found, expected)
    with optimizer.no_sync():
        loss_of(found, own(steps[0][0]), own(steps[0][1])).backward()
    optimizer.step()  # reduces what is there
    assert_same_bits(found)


def test_ranks_with_another_past_meet_after_init() -> None:
    """As survivors of a job and a rank that has just come to it."""
    if hvd.rank() == 0:
        for _ in range(2):
            dropped = hvd.DistributedOptimizer(sgd(model().parameters()))
            dropped.itself = dropped  # only the garbage collector frees it
        del dropped
        hvd.allreduce_async(torch.ones(1))  # no caller waits for it, so its name stays in use
        hvd.SyncBatchNorm(3).eval()(torch.ones(2, 3))
    hvd.shutdown()
    hvd.init()
    module, optimizer, oracle, oracle_optimizer = pair()
    for x, y in batches(2):
        optimizer.zero_grad()
        oracle_optimizer.zero_grad()
        loss_of(module, own(x), own(y)).backward()
        loss_of(oracle, x, y).backward()
        optimizer.step()
        oracle_optimizer.step()
    assert_close(module, oracle)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
