"""broadcast_parameters and broadcast_optimizer_state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import polyhvd.torch as hvd
import pytest
import torch
from torch_common import (
    Tensor,
    assert_same_bits,
    assert_usable,
    batches,
    everyones,
    loss_of,
    model,
    own,
    raises,
    rank_tensor,
)

pytestmark = pytest.mark.ranks(2, 3, framework="torch")


def _differs() -> torch.nn.Module:
    """Other weights on each rank; buffers and an integer counter too."""
    torch.manual_seed(50 + hvd.rank())
    module = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
    module(torch.randn(4 + hvd.rank(), 5))
    for _ in range(hvd.rank()):
        module(torch.randn(4, 5))
    return module


@pytest.mark.parametrize("form", ["state_dict", "pairs", "iterator", "tensors", "module"])
def test_parameters_and_buffers_become_the_roots(form: str) -> None:
    forms: dict[str, Callable[[torch.nn.Module], Any]] = {
        "state_dict": lambda m: m.state_dict(),
        "pairs": lambda m: list(m.state_dict().items()),
        "iterator": lambda m: iter(m.state_dict().items()),
        "tensors": lambda m: list(m.state_dict().values()),
        "module": lambda m: m,
    }
    module = _differs()
    hvd.broadcast_parameters(forms[form](module), root_rank=1)
    torch.manual_seed(51)
    mine = list(module.state_dict().values())
    assert_same_bits(mine)
    assert module[1].num_batches_tracked.item() == 2, "the root's count"
    named = dict(module.named_parameters())
    hvd.broadcast_parameters(module.named_parameters(), root_rank=0)
    assert all(p.requires_grad and p.is_leaf for p in named.values())


def test_tensors_that_share_memory_become_the_roots() -> None:
    base = rank_tensor(4, 3)
    expected = everyones(4, 3)[1]
    hvd.broadcast_parameters(
        {"a": base, "b": base, "row": base[0], "transposed": base.t(), "other": rank_tensor(2)}, root_rank=1
    )
    assert torch.equal(base, expected)


def test_empty_and_strided_parameters_become_the_roots() -> None:
    empty, strided = torch.empty(0, 3), rank_tensor(3, 2).t()
    hvd.broadcast_parameters([empty, strided, torch.empty(0)], root_rank=1)
    assert torch.equal(strided, everyones(3, 2)[1].t())


def test_what_is_no_tensor_is_refused() -> None:
    for params, part in (
        ({"epoch": 3}, "'epoch'"),
        (3, "int"),
        (torch.ones(2), "Tensor"),
        (torch.nn.LazyLinear(3), "no shape yet"),
    ):
        with raises(ValueError, part):
            hvd.broadcast_parameters(params)
    assert_usable()


def test_mismatched_parameters_are_an_error_on_every_rank() -> None:
    odd = hvd.rank() == 1
    params = {"a": torch.ones(2), "b": torch.ones(3 + odd), "c": rank_tensor(2)}
    with raises(hvd.RankMismatchError, "parameter.b", "[3]", "[4]"):
        hvd.broadcast_parameters(params)
    assert_usable()
    del params["b"]
    hvd.broadcast_parameters(params)
    assert_same_bits(list(params.values()))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=4),
}


def _train(module: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x, y = torch.randn(4, 5, generator=generator), torch.randn(4, 2, generator=generator)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(module, x, y)
            loss.backward()
            return loss

        optimizer.step(closure)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for key in sorted(value, key=str) for leaf in (key, *_leaves(value[key]))]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _leaves(item)]
    return [(value.dtype, value.tolist()) if isinstance(value, Tensor) else value]


def optimizer_state(kind: str, steps_of_rank: str, wrapped: bool) -> None:
    """The root is rank 1; others have no state, the same kind of state, or more than the root."""
    module = model(hvd.rank())
    optimizer = OPTIMIZERS[kind](module.parameters())
    steps = {"root only": int(hvd.rank() == 1) * 2, "all": 2 + hvd.rank(), "others": int(hvd.rank() != 1)}
    _train(module, optimizer, steps[steps_of_rank], seed=hvd.rank())
    optimizer.param_groups[0]["lr"] = 0.001 * (hvd.rank() + 1)
    optimizer.param_groups[0]["initial_lr"] = float(hvd.rank())
    mine = _leaves(optimizer.state_dict())
    before = [p.detach().clone() for p in module.parameters()]
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    expected = hvd.broadcast_object(mine, root_rank=1, name="expected")
    assert _leaves(optimizer.state_dict()) == expected
    assert optimizer.param_groups[0]["lr"] == 0.002
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True)), "took a step"


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "distributed"])
@pytest.mark.parametrize("steps", ["root only", "all", "others"])
@pytest.mark.parametrize(
    "kind",
    ["momentum", "plain", "adam", "adagrad", "lbfgs", "adamw foreach", "adam fused", "rmsprop"],
)
def test_optimizer_state_becomes_the_roots_without_a_step(kind: str, steps: str, wrapped: bool) -> None:
    optimizer_state(kind, steps, wrapped)


def test_training_goes_on_alike_after_both_broadcasts() -> None:
    module = model(hvd.rank())
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01 * (hvd.rank() + 1))
    if hvd.rank() == 0:
        _train(module, optimizer, 3, seed=1)
    optimizer = hvd.DistributedOptimizer(optimizer, module.named_parameters())
    hvd.broadcast_parameters(module.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for x, y in batches(3):
        optimizer.zero_grad()
        loss_of(module, own(x), own(y)).backward()
        optimizer.step()
    assert_same_bits(module)


def test_state_keeps_its_own_dtype() -> None:
    p = torch.nn.Parameter(rank_tensor(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    exact = torch.full((3,), 1.0 + 2.0**-20)
    if hvd.rank() == 0:
        optimizer.state[p]["momentum_buffer"] = exact.clone()
    hvd.broadcast_optimizer_state(optimizer, 0)
    found = optimizer.state[p]["momentum_buffer"]
    assert found.dtype == torch.float32
    assert torch.equal(found, exact)


def test_the_root_keeps_its_state_untouched() -> None:
    module = model()
    optimizer = torch.optim.Adam(module.parameters())
    _train(module, optimizer, 1, seed=1)
    state = optimizer.state[module[0].weight]["exp_avg"]
    before = copy.deepcopy(optimizer.state_dict())
    hvd.broadcast_optimizer_state(optimizer, 0, model=module)
    assert _leaves(optimizer.state_dict()) == _leaves(before)
    if hvd.rank() == 0:
        assert optimizer.state[module[0].weight]["exp_avg"] is state


def test_other_parameters_are_an_error_on_every_rank() -> None:
    width = 3 + (hvd.rank() == 1)
    optimizer = torch.optim.SGD(torch.nn.Linear(2, width).parameters(), lr=0.1)
    with raises(
        hvd.InvalidArgumentError, "root rank 7 is not one of the ranks that take part, which are 0, 1"
    ):
        hvd.broadcast_optimizer_state(optimizer, 7)
    with raises(hvd.RankMismatchError, "other parameters", "root rank 0"):
        hvd.broadcast_optimizer_state(optimizer, 0)
    kind = torch.optim.Adam if hvd.rank() == 1 else torch.optim.SGD
    with raises(hvd.RankMismatchError, "ranks [1] have Adam, and root rank 0 has SGD"):
        hvd.broadcast_optimizer_state(kind(model().parameters(), lr=0.1), 0)
    assert_usable()


@pytest.mark.ranks(3, framework="torch")
def test_optimizer_state_is_broadcast_in_a_process_set() -> None:
    pair = hvd.add_process_set([1, 2])
    module = model(hvd.rank())
    optimizer = torch.optim.Adam(module.parameters(), lr=0.001 * (hvd.rank() + 1))
    _train(module, optimizer, 2 * (hvd.rank() != 1), seed=hvd.rank())
    mine = _leaves(optimizer.state_dict())
    expected = hvd.allgather_object(mine)[2 if pair.included() else 0]
    if pair.included():
        hvd.broadcast_optimizer_state(optimizer, 2, process_set=pair)
    assert _leaves(optimizer.state_dict()) == expected
    assert hvd.remove_process_set(pair)


def test_four_threads_may_broadcast_states_at_once() -> None:
    """Each thread has its own optimizer, which gets the whole state of one of the root's optimizers."""

    def work(thread: int) -> float:
        parameters = [torch.nn.Parameter(torch.zeros(5)) for _ in range(3)]
        mark = 10.0 * hvd.rank() + thread
        optimizer = torch.optim.SGD(parameters, lr=mark, momentum=0.9)
        for parameter in parameters:
            optimizer.state[parameter]["momentum_buffer"] = torch.full((5,), mark)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        came: float = optimizer.param_groups[0]["lr"]
        for parameter in parameters:
            assert torch.equal(optimizer.state[parameter]["momentum_buffer"], torch.full((5,), came))
        return came

    with ThreadPoolExecutor(4) as threads:
        for _ in range(5):
            assert sorted(threads.map(work, range(4))) == [0, 1, 2, 3]


def test_groups_of_parameters_keep_their_own_rates() -> None:
    """Each group's options become those of the root's group, and the scheduler goes on from them."""
    module = model()
    rate = 0.1 * (hvd.rank() + 1)
    optimizer = torch.optim.SGD(
        [
            {"params": [module[2].weight, module[0].bias], "lr": rate},
            {"params": [module[0].weight, module[2].bias], "lr": rate / 10, "momentum": 0.9},
        ],
        lr=1.0,
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    if hvd.rank() == 1:
        _train(module, optimizer, 2, seed=1)
        scheduler.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    scheduler.load_state_dict(hvd.broadcast_object(scheduler.state_dict(), root_rank=1))
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01]
    assert [group["momentum"] for group in optimizer.param_groups] == [0, 0.9]
    assert scheduler.last_epoch == 1
    momentum = optimizer.state[module[0].weight]["momentum_buffer"]
    assert momentum.shape == module[0].weight.shape
    assert_same_bits([momentum])
    assert "momentum_buffer" not in optimizer.state[module[2].weight] or (
        optimizer.state[module[2].weight]["momentum_buffer"] is None
    )
    optimizer.zero_grad()
    scheduler.optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.005]
