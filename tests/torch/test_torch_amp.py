"""Mixed precision: GradScaler and autocast, as scripts for Horovod use them and without their ritual."""

from __future__ import annotations

import contextlib
from typing import Any

import polyhvd.torch as hvd
import pytest
import torch
from torch_common import ROWS, Tensor, assert_close, assert_same_bits, batches, loss_of, model, own, raises

from polyhvd import parity
from polyhvd.errors import UnsupportedError

pytestmark = pytest.mark.ranks(2, 3, framework="torch")

STEPS = 4
OVERFLOW_AT = 2


def _scaler(scale: float = 1024.0) -> Any:
    return torch.amp.GradScaler("cpu", init_scale=scale)


def _step(optimizer: Any, scaler: Any, ritual: bool) -> None:
    """With the ritual of Horovod's documentation: reduce, unscale, clip, and keep step() from reducing."""
    if ritual:
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
    else:
        scaler.step(optimizer)
    scaler.update()


def scaled_training(ritual: bool, overflow: int | None, *, mapped: bool = False) -> None:
    module, oracle = model(), model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
        mapping=parity.mapping(module, prefix="amp") if mapped else None,
    )
    oracle_optimizer = torch.optim.SGD(oracle.parameters(), lr=0.1, momentum=0.9)
    scaler = _scaler()
    for step, (x, y) in enumerate(batches(STEPS)):
        before = [p.detach().clone() for p in module.parameters()]
        overflows = overflow is not None and step == OVERFLOW_AT
        (module if mapped else optimizer).zero_grad()
        loss = loss_of(module, own(x), own(y))
        if overflows and hvd.rank() == overflow:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        _step(optimizer, scaler, ritual)
        same = all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
        assert same == overflows, "exactly the step with the overflow is skipped"
        if not overflows:
            oracle_optimizer.zero_grad()
            loss_of(oracle, x, y).backward()
            oracle_optimizer.step()
    assert scaler.get_scale() == (1024.0 if overflow is None else 512.0)
    assert_close(module, oracle)
    assert_same_bits([p.detach() for p in module.parameters()])


@pytest.mark.parametrize(
    "overflow", [None, 0, 1], ids=["no overflow", "rank 0 overflows", "rank 1 overflows"]
)
@pytest.mark.parametrize("ritual", [True, False], ids=["ritual", "no ritual"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(ritual: bool, overflow: int | None) -> None:
    scaled_training(ritual, overflow)


@pytest.mark.parametrize("ritual", [True, False], ids=["ritual", "no ritual"])
def test_an_overflow_skips_the_step_on_all_ranks_of_a_mapping(ritual: bool) -> None:
    scaled_training(ritual, 1, mapped=True)


def test_gradients_of_a_mapping_are_all_reduced() -> None:
    """Those that were computed after a reduction, too. Parameters of later on are an error."""
    module, (x, y) = model(), batches(1)[0]
    module[0].bias.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1), mapping=parity.mapping(module, prefix="mapped")
    )
    for _ in range(2):
        loss_of(module, own(x), own(y)).backward()
        optimizer.synchronize()
    optimizer.step()
    assert_same_bits(module)
    module[0].bias.requires_grad_(True)
    with raises(UnsupportedError, "trains 1 parameters, the first of shape [7]"):
        optimizer.step()
    module[0].bias.requires_grad_(False)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    with raises(UnsupportedError, "the first of shape [3]"):
        optimizer.step()


@pytest.mark.parametrize("ritual", [True, False], ids=["ritual", "no ritual"])
def test_an_overflow_of_a_local_parameter_skips_the_step_on_all(ritual: bool) -> None:
    module = model()
    local, *shared = module.parameters()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1))
    if hvd.rank() > 0:
        optimizer.register_local_var(local)
    scaler = _scaler()
    for step, (x, y) in enumerate(batches(STEPS)):
        before = [p.detach().clone() for p in module.parameters()]
        optimizer.zero_grad()
        loss = loss_of(module, own(x), own(y))
        if step == OVERFLOW_AT and hvd.rank() == 1:
            loss = loss + local.sum() * float("inf")
        scaler.scale(loss).backward()
        _step(optimizer, scaler, ritual)
        same = all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
        assert same == (step == OVERFLOW_AT), "exactly the step with the overflow is skipped"
    assert scaler.get_scale() == 512.0
    assert_same_bits([p.detach() for p in shared])


def test_bfloat16_autocast_trains_near_the_joined_batch() -> None:
    module, oracle = model(), model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1))
    oracle_optimizer = torch.optim.SGD(oracle.parameters(), lr=0.1)

    def forward(some: torch.nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = some(x)
        assert y.dtype == torch.bfloat16
        return y.float()

    for x, y in batches(STEPS):
        optimizer.zero_grad()
        loss_of(lambda x: forward(module, x), own(x), own(y)).backward()
        optimizer.step()
        oracle_optimizer.zero_grad()
        loss_of(lambda x: forward(oracle, x), x, y).backward()
        oracle_optimizer.step()
    for found, expected in zip(module.parameters(), oracle.parameters(), strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=0.02, atol=5e-3)
    assert_same_bits(module)


def test_accumulated_scaled_gradients_are_unscaled_once() -> None:
    module, oracle = model(), model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1), backward_passes_per_step=2
    )
    oracle_optimizer = torch.optim.SGD(oracle.parameters(), lr=0.1)
    scaler = _scaler(64.0)
    for _ in range(2):
        optimizer.zero_grad()
        oracle_optimizer.zero_grad()
        for x, y in batches(2):
            scaler.scale(loss_of(module, own(x), own(y)) / 2).backward()
            (loss_of(oracle, x, y) / 2).backward()
        scaler.unscale_(optimizer)
        for some in (module, oracle):
            torch.nn.utils.clip_grad_norm_(some.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        oracle_optimizer.step()
    assert_close(module, oracle)
    assert_same_bits([p.detach() for p in module.parameters()])


@pytest.mark.parametrize("kind", ["on hold", "fewer passes"])
def test_gradients_that_the_step_reduces_are_reduced_before_they_are_unscaled(kind: str) -> None:
    """No backward pass reduces: it is on hold, or one of fewer than backward_passes_per_step."""
    module, oracle = model(), model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1),
        backward_passes_per_step=3 if kind == "fewer passes" else 1,
    )
    oracle_optimizer = torch.optim.SGD(oracle.parameters(), lr=0.1)
    scaler = _scaler()
    for step, (x, y) in enumerate(batches(STEPS)):
        before = [p.detach().clone() for p in module.parameters()]
        overflows = step == OVERFLOW_AT
        optimizer.zero_grad()
        with optimizer.no_sync() if kind == "on hold" else contextlib.nullcontext():
            loss = loss_of(module, own(x), own(y))
            scaler.scale(loss * float("inf") if overflows and hvd.rank() == 1 else loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        same = all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
        assert same == overflows, "exactly the step with the overflow is skipped"
        if not overflows:
            oracle_optimizer.zero_grad()
            loss_of(oracle, x, y).backward()
            torch.nn.utils.clip_grad_norm_(oracle.parameters(), 0.5)
            oracle_optimizer.step()
    assert scaler.get_scale() == 512.0
    assert_close(module, oracle)
    assert_same_bits([p.detach() for p in module.parameters()])


def test_a_rank_without_a_batch_steps_after_a_step_that_all_ranks_skipped() -> None:
    """The last rank has no batch right after a step that all ranks have skipped."""
    module, oracle = model(), model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1))
    oracle_optimizer = torch.optim.SGD(oracle.parameters(), lr=0.1)
    scaler, size = _scaler(), hvd.size()
    for step, (x, y) in enumerate(batches(STEPS)):
        is_short = step == OVERFLOW_AT + 1
        optimizer.zero_grad()
        if not (is_short and hvd.rank() == size - 1):
            loss = loss_of(module, own(x), own(y))
            overflows = step == OVERFLOW_AT and hvd.rank() == 0
            scaler.scale(loss * float("inf") if overflows else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step != OVERFLOW_AT:
            rows = ROWS * (size - is_short)
            oracle_optimizer.zero_grad()
            (loss_of(oracle, x[:rows], y[:rows]) * (size - is_short) / size).backward()
            oracle_optimizer.step()
    assert_close(module, oracle)
    assert_same_bits([p.detach() for p in module.parameters()])
