"""Collectives inside of torch.compile, and optimizers outside of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polyhvd.torch as hvd
import pytest
import torch
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
    rank_tensor,
)

# A first graph of inductor compiles headers of C++.
pytestmark = pytest.mark.ranks(2, 3, framework="torch", timeout_s=400)

OPERATIONS = [
    "allreduce",
    "allreduce sum",
    "grouped_allreduce",
    "compressed",
    "allgather",
    "grouped_allgather",
    "broadcast",
    "reducescatter",
    "grouped_reducescatter",
    "alltoall",
    "alltoall with splits",
    "in place",
    "process set",
]


def _allreduce(x: Tensor) -> Tensor:
    return hvd.allreduce(x * 2, prescale_factor=0.5, name="compiled")


def _allreduce_sum(x: Tensor) -> Tensor:
    return hvd.allreduce(hvd.allreduce(x.t().sin(), op=hvd.Sum), op=hvd.Sum, postscale_factor=3.0)


def _grouped_allreduce(x: Tensor) -> Tensor:
    first, second, third = hvd.grouped_allreduce([x, x.double() + 1, x.detach().int()], op=hvd.Sum)
    return first * second * third


def _compressed(x: Tensor) -> Tensor:
    return hvd.allreduce(x, compression=hvd.Compression.bf16)


def _allgather(x: Tensor) -> Tensor:
    return hvd.allgather(x[: 1 + hvd.rank()] * 2).cos()


def _grouped_allgather(x: Tensor) -> Tensor:
    first, second = hvd.grouped_allgather([x * 2, x.detach().long()])
    return first * second


def _broadcast(x: Tensor) -> Tensor:
    return hvd.broadcast(x * 2, root_rank=1) * x


def _reducescatter(x: Tensor) -> Tensor:
    return hvd.reducescatter(x.repeat(2, 1)[:7], op=hvd.Average).exp()


def _grouped_reducescatter(x: Tensor) -> Tensor:
    first, second = hvd.grouped_reducescatter([x, x + 1], op=hvd.Sum, postscale_factor=0.1)
    return first * second


def _alltoall(x: Tensor) -> Tensor:
    return hvd.alltoall(x.repeat(hvd.size(), 1) * 2) ** 2


def _alltoall_splits(x: Tensor) -> Tensor:
    splits = [1] * hvd.size()
    splits[0] += hvd.rank()
    rows, received = hvd.alltoall(x.repeat(2, 1), splits)
    return rows.square().sum(0) * received.sum()


def _in_place(x: Tensor) -> Tensor:
    y, z = x.detach() * 2, x.detach() + 1
    hvd.allreduce_(y, op=hvd.Sum)
    (w,) = hvd.grouped_allreduce_([z])
    return hvd.broadcast_(y, 0) * w * x


EVEN: list[Any] = [None]


def _process_set(x: Tensor) -> Tensor:
    y = hvd.allreduce(x, process_set=EVEN[0]) * 2
    return hvd.reducescatter(hvd.allgather(y, process_set=EVEN[0]), process_set=EVEN[0])


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "allreduce": _allreduce,
    "allreduce sum": _allreduce_sum,
    "grouped_allreduce": _grouped_allreduce,
    "compressed": _compressed,
    "allgather": _allgather,
    "grouped_allgather": _grouped_allgather,
    "broadcast": _broadcast,
    "reducescatter": _reducescatter,
    "grouped_reducescatter": _grouped_reducescatter,
    "alltoall": _alltoall,
    "alltoall with splits": _alltoall_splits,
    "in place": _in_place,
    "process set": _process_set,
}


def _run(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor | None]:
    x = x.clone().requires_grad_()
    y = function(x)
    (y * torch.arange(1.0, y.numel() + 1).view(y.shape)).sum().backward()
    return y.detach(), x.grad


def _compare(function: Callable[[Tensor], Tensor], backend: str, x: Tensor) -> None:
    torch.compiler.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for step in range(2):
        expected, gradient = _run(function, x + step)
        before = hvd.counters()["operations"]
        found, own_gradient = _run(compiled, x + step)
        assert hvd.counters()["operations"] > before + 1, "the graph has not communicated both ways"
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(own_gradient, gradient)


def is_the_eager_operation(operation: str, backend: str) -> None:
    if operation == "process set":
        EVEN[0] = hvd.add_process_set(range(0, hvd.size(), 2))
        if EVEN[0].included():
            _compare(OPERATIONS[operation], backend, rank_tensor(4, 3))
        hvd.remove_process_set(EVEN[0])
    else:
        _compare(OPERATIONS[operation], backend, rank_tensor(4, 3))
    assert_usable()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_compiled_operation_is_the_eager_one(operation: str) -> None:
    is_the_eager_operation(operation, "aot_eager")


def several_in_one_graph(backend: str) -> None:
    """One of each kind: of one tensor, of several, of an unknown number of rows, in place."""
    some = [OPERATIONS[name] for name in ("allreduce sum", "grouped_allreduce", "allgather", "in place")]

    def everything(x: Tensor) -> Tensor:
        return torch.cat([f(x).reshape(-1).to(x.dtype) for f in some])

    # The others need not be as slow: what they run is the same operations.
    _compare(everything, backend if hvd.rank() == 0 else "aot_eager", rank_tensor(4, 3) / 8)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_inductor_compiles_operations_of_all_kinds_into_one_graph() -> None:
    several_in_one_graph("inductor")


@pytest.mark.ranks(2)
def test_operations_stay_in_the_order_of_the_program() -> None:
    """Results that this rank does not use are computed too: another rank may use them."""

    def program(x: Tensor, small: Tensor) -> Tensor:
        hvd.broadcast(small, 0, name="order.unused")
        y = hvd.allreduce(x, name="order.large")
        z = hvd.allreduce(small, name="order.small")
        return y.sum() + z.sum()

    compiled = torch.compile(program, backend="inductor", fullgraph=True)
    chosen = compiled if hvd.rank() == 0 else program
    before = hvd.counters()["operations"]
    with torch.no_grad(), torch.compiler.config.patch(force_disable_caches=True):  # they hide how it orders
        found = chosen(rank_tensor(300), rank_tensor(2))
    assert hvd.counters()["operations"] == before + 3
    assert found == program(rank_tensor(300), rank_tensor(2))


def test_one_rank_may_compile_again_and_another_not_at_all() -> None:
    """Names are taken when an operation runs, so what was compiled agrees with what was not."""
    torch.compiler.reset()
    traces = [0]

    def counting(graph: Any, inputs: Any) -> Any:
        traces[0] += 1
        return graph

    def program(x: Tensor, flag: int) -> Tensor:
        return hvd.allreduce(hvd.allreduce(x * flag, op=hvd.Sum).sin())

    compiled = torch.compile(program, backend=counting, fullgraph=True, dynamic=False)
    chosen = program if hvd.rank() == hvd.size() - 1 else compiled
    for step in range(4):
        flag = step if hvd.rank() == 0 else 1  # rank 0 has to compile again and again
        x = torch.full((3,), 1.0 + hvd.rank())
        terms = [torch.full((3,), 1.0 + rank) * (step if rank == 0 else 1) for rank in range(hvd.size())]
        torch.testing.assert_close(chosen(x, flag), torch.stack(terms).sum(0).sin())
    assert traces[0] == (4 if hvd.rank() == 0 else int(hvd.rank() < hvd.size() - 1))


@pytest.mark.ranks(2)
def test_sizes_may_be_dynamic() -> None:
    torch.compiler.reset()

    def program(x: Tensor) -> Tensor:
        rows = hvd.reducescatter(hvd.allreduce(x) * x, op=hvd.Sum)
        return hvd.allgather(rows).sum(0) + hvd.broadcast(x, 1).sum(0)

    compiled = torch.compile(program, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (3, 5, 8):
        for found, expected in zip(
            _run(compiled, rank_tensor(rows, 2)), _run(program, rank_tensor(rows, 2)), strict=True
        ):
            torch.testing.assert_close(found, expected)


@pytest.mark.ranks(2)
def test_names_that_are_given_reach_the_wire() -> None:
    torch.compiler.reset()
    size = 3 + hvd.rank()
    compiled = torch.compile(
        lambda x: hvd.allreduce(x, name="of the user"), backend="aot_eager", fullgraph=True
    )
    with raises(hvd.RankMismatchError, "of the user", "[3]", "[4]"):
        compiled(torch.ones(size))
    x = torch.ones(3 + hvd.rank(), requires_grad=True)
    same = torch.compile(
        lambda x: hvd.allreduce(x[:3], name="of the user"), backend="aot_eager", fullgraph=True
    )
    y = same(x)
    with raises(hvd.RankMismatchError, "of the user.gradient"):
        if hvd.rank() == 0:
            hvd.allreduce(torch.ones(9), name="of the user.gradient")
        else:
            y.sum().backward()
    assert_usable()


@pytest.mark.ranks(2)
def test_errors_come_out_of_a_graph_as_they_are() -> None:
    torch.compiler.reset()
    x = torch.ones(3, requires_grad=True)
    y = torch.compile(lambda x: hvd.allreduce(x, op=hvd.Max), backend="aot_eager", fullgraph=True)(x)
    assert y.tolist() == [1.0] * 3, "its gradient alone is impossible"
    with raises(hvd.InvalidArgumentError, "op=Max", "detach()"):
        y.sum().backward()
    broadcast = torch.compile(lambda x: hvd.broadcast(x, 99), backend="aot_eager", fullgraph=True)
    with raises(hvd.InvalidArgumentError, "99"):
        broadcast(x)
    assert_usable()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_model_trains_with_a_distributed_optimizer(backend: str) -> None:
    torch.compiler.reset()
    module, oracle = model(), model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(module.parameters(), lr=0.01), module.named_parameters()
    )
    oracle_optimizer = torch.optim.Adam(oracle.parameters(), lr=0.01)
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    for x, y in batches(4):
        optimizer.zero_grad()
        loss_of(compiled, own(x), own(y)).backward()
        optimizer.step()
        oracle_optimizer.zero_grad()
        loss_of(oracle, x, y).backward()
        oracle_optimizer.step()
    assert_close(module, oracle)
    assert_same_bits(module)


def test_sync_batch_norm_compiles_without_a_break() -> None:
    torch.compiler.reset()
    layer, oracle = hvd.SyncBatchNorm(3), hvd.SyncBatchNorm(3)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(2):
        x = torch.randn(3 + hvd.rank(), 3, 4, generator=generator)
        for found, expected in zip(_run(compiled, x), _run(oracle, x), strict=True):
            torch.testing.assert_close(found, expected)
        for (name, value), other in zip(
            layer.state_dict().items(), oracle.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(value, other, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.ranks(2)
def test_operators_are_what_torch_expects_of_operators() -> None:
    """torch's own checks: schema, shapes without data, autograd, and a graph against the eager result."""
    x = rank_tensor(4, 3).requires_grad_()
    reduction = ("sound", 1, 1.0, 2.0, 0)
    ops = torch.ops.polyhvd
    for op, arguments in (
        (ops.allreduce, ([x, x.detach() + 1], *reduction)),
        (ops.reducescatter, ([x], [2], *reduction, None)),
        (ops.allgather, ([x, x * 2], None, 0, True)),
        (ops.broadcast, (x, 1, None, 0, False)),
        (ops.alltoall, (x, None, hvd.size(), None, 0)),
    ):
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(op.default, arguments, test_utils=tests)
