"""What the ranks do in test_torch_optimizer_numbers.py. The oracle is torch itself on the joined batch."""

from __future__ import annotations

from typing import Any

import polyhvd.torch as hvd
import torch
from torch_common import (
    Tensor,
    assert_same_bits,
    assert_usable,
    batches,
    loss_of,
    model,
    own,
)


def lbfgs(parameters: Any, **arguments: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=1, max_iter=20, line_search_fn="strong_wolfe", **arguments)


def evaluations(
    optimizer: torch.optim.Optimizer, module: torch.nn.Module, x: Tensor, y: Tensor, steps: int
) -> list[float]:
    """Steps with a closure; the losses that the optimizer was given."""
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(module, x, y)
        loss.backward()
        return loss

    for _ in range(steps):
        losses.append(float(optimizer.step(closure)))
    return losses


def line_searches_branch_alike(kind: str) -> None:
    """Each rank's loss has its own scale, so that line searches would not agree on the length of a step."""
    options = {"sum": {"op": hvd.Sum}, "grouped": {"num_groups": 2}}.get(kind, {})
    dtype = torch.float64 if kind == "double" else torch.float32
    module, oracle = model().to(dtype), model().to(dtype)
    ((x, y),) = batches(1)
    x, y = x.to(dtype), y.to(dtype)
    y = torch.cat([own(y, rank) * (1 + 5 * rank) for rank in range(hvd.size())])
    optimizer = hvd.DistributedOptimizer(lbfgs(module.parameters()), **options)
    found = evaluations(optimizer, module, own(x), own(y), 8)
    factor = hvd.size() ** 0.5 if kind == "sum" else 1.0  # the loss is squared
    expected = evaluations(lbfgs(oracle.parameters()), lambda some: oracle(some) * factor, x, y * factor, 8)
    assert found[-1] < 0.5 * found[0], f"it did not converge: {found}"
    torch.testing.assert_close(found[0], expected[0])
    if kind == "double":
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert_same_bits(module)
    assert hvd.allgather_object(found) == [found] * hvd.size()


def closures_return_the_joint_loss(kind: str) -> None:
    """Rank r's loss is r + 1, but for the last rank's, which has none in some kinds."""
    weight = torch.nn.Parameter(torch.ones(2))
    op = hvd.Sum if kind == "sum" else hvd.Average
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), op=op)
    last = hvd.rank() == hvd.size() - 1
    value = hvd.rank() + 1.0
    losses: dict[str, Any] = {
        "tensor": torch.tensor(value),
        "sum": torch.tensor([value]),
        "number": value,
        "none on one rank": None if last else torch.tensor(value),
        "none": None,
        "no loss": {"loss": value},
        "half": torch.tensor(value, dtype=torch.bfloat16 if last else torch.float16),
    }
    result = optimizer.step(lambda: losses[kind])
    total = sum(range(1, hvd.size() + 1))
    if kind == "none":
        assert result is None
    elif kind == "no loss":
        assert result == {"loss": value}
    elif kind == "number":
        assert result == total / hvd.size()
        assert isinstance(result, float)
    else:
        total -= hvd.size() if kind == "none on one rank" else 0
        torch.testing.assert_close(float(result), total / (1 if kind == "sum" else hvd.size()))
        assert result.shape == ((1,) if kind == "sum" else ())
        assert not result.requires_grad
        assert_same_bits([result])
    assert_usable()


def closures_outside_of_the_process_set_keep_their_loss() -> None:
    members = hvd.add_process_set(range(hvd.size() - 1))
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), process_set=members)
    result = optimizer.step(lambda: torch.tensor(float(hvd.rank())))
    expected = sum(range(members.size())) / members.size() if members.included() else hvd.rank()
    assert float(result) == expected
    hvd.remove_process_set(members)
