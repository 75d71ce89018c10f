"""DistributedOptimizer where wrong numbers would go unnoticed: closures, hooks, leftover gradients."""

from __future__ import annotations

import gc
from typing import Any

import polyhvd.torch as hvd
import pytest
import torch
from polyhvd.torch import rounds
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

import polyhvd

pytestmark = pytest.mark.ranks(2, 3, framework="torch")


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


@pytest.mark.parametrize("kind", ["average", "sum", "grouped", "double"])
def test_line_searches_take_the_same_steps_on_every_rank(kind: str) -> None:
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


@pytest.mark.parametrize("kind", ["tensor", "sum", "number", "none on one rank", "none", "no loss", "half"])
def test_a_closure_returns_the_joint_loss(kind: str) -> None:
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


def test_a_closure_outside_of_the_process_set_keeps_its_loss() -> None:
    members = hvd.add_process_set(range(hvd.size() - 1))
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), process_set=members)
    result = optimizer.step(lambda: torch.tensor(float(hvd.rank())))
    expected = sum(range(members.size())) / members.size() if members.included() else hvd.rank()
    assert float(result) == expected
    hvd.remove_process_set(members)


@pytest.mark.parametrize("kind", ["in place", "replaced", "removed", "grouped", "compressed", "on one rank"])
def test_a_hook_that_changes_a_gradient_on_its_way_is_an_error(kind: str) -> None:
    """The hook is rank 0's alone in some kinds; it comes after the one that submits the gradient."""
    module = model()
    options: dict[str, Any] = {
        "grouped": {"num_groups": 1},
        "compressed": {"compression": hvd.Compression.fp16},
    }
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(module.named_parameters(), lr=0.1), module.named_parameters(), **options.get(kind, {})
    )

    def change(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if kind == "replaced":
            parameter.grad = parameter.grad * 2
        elif kind == "removed":
            parameter.grad = None
        else:
            parameter.grad.clamp_(-0.1, 0.1)

    if kind != "on one rank" or hvd.rank() == 0:
        hook = module[2].weight.register_post_accumulate_grad_hook(change)
    ((x, y),) = batches(1)
    if kind != "on one rank" or hvd.rank() == 0:
        with raises(hvd.InvalidArgumentError, "parameter '2.weight'", "register hooks", "backward()"):
            loss_of(module, own(x), own(y)).backward()
        hook.remove()
    else:
        loss_of(module, own(x), own(y)).backward()
    optimizer.zero_grad()
    loss_of(module, own(x), own(y)).backward()
    optimizer.step()
    assert_same_bits(module)


def test_hooks_that_were_there_before_take_part_in_the_reduction() -> None:
    """Gradients may be changed and read after backward."""
    module, oracle = model(), model()
    seen: list[Any] = []

    def halve(parameter: Tensor) -> None:
        parameter.grad.mul_(0.5)

    hooks = [p.register_post_accumulate_grad_hook(halve) for p in module.parameters()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1))
    hooks += [
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape)) for p in module.parameters()
    ]
    hooks += [p.register_hook(lambda gradient: gradient * 4) for p in module.parameters()]
    plain = torch.optim.SGD(oracle.parameters(), lr=0.1)
    for x, y in batches(2):
        loss_of(module, own(x), own(y)).backward()
        loss_of(oracle, x, y).backward()
        for found, expected in zip(module.parameters(), oracle.parameters(), strict=True):
            found.grad.mul_(0.5)
            torch.testing.assert_close(found.grad, expected.grad, rtol=1e-5, atol=1e-6)
        for some in (optimizer, plain):
            some.step()
            some.zero_grad(set_to_none=False)
    assert len(seen) == 8
    assert_close(module, oracle)


def test_gradients_may_be_parts_of_one_buffer() -> None:
    """A write to one of them raises the version of all."""
    module, oracle = model(), model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1))
    plain = torch.optim.SGD(oracle.parameters(), lr=0.1)
    buffer = torch.zeros(sum(p.numel() for p in module.parameters()))
    begin = 0
    for parameter in module.parameters():
        parameter.grad = buffer[begin : begin + parameter.numel()].view_as(parameter)
        begin += parameter.numel()
    for x, y in batches(2):
        buffer.zero_()
        plain.zero_grad()
        loss_of(module, own(x), own(y)).backward()
        loss_of(oracle, x, y).backward()
        optimizer.step()
        plain.step()
    assert_close(module, oracle)
    assert_same_bits(module)


OPTIONS: dict[str, dict[str, Any]] = {
    "sum": {"op": hvd.Sum},
    "average": {"op": hvd.Average},
    "two passes": {"op": hvd.Sum, "backward_passes_per_step": 2},
    "grouped": {"op": hvd.Sum, "num_groups": 2},
    "compressed": {"op": hvd.Sum, "compression": hvd.Compression.bf16},
}


@pytest.mark.parametrize("used_by", ["no rank", "the first", "the last", "all but the first", "all"])
@pytest.mark.parametrize("kind", ["sum", "average", "two passes", "grouped", "compressed"])
def test_a_gradient_that_is_left_over_counts_once(kind: str, used_by: str) -> None:
    """Nobody sets gradients to zero; in the second step and the third, some ranks do not use some layers.

    Values are small whole numbers, times powers of two, so that all results are exact.
    """
    options = OPTIONS[kind]
    passes = options.get("backward_passes_per_step", 1)
    divisor = hvd.size() if kind == "average" else 1
    weights = [torch.nn.Parameter(torch.zeros(3)) for _ in range(4)]
    mirror = [torch.nn.Parameter(torch.zeros(3)) for _ in weights]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0), **options)
    plain = torch.optim.SGD(mirror, lr=1.0)

    def users(step: int, number: int) -> list[int]:
        everyone = list(range(hvd.size()))
        if step == 0 or number == 0:
            return everyone
        some = {
            "no rank": [],
            "the first": [0],
            "the last": [hvd.size() - 1],
            "all but the first": everyone[1:],
        }
        return everyone if used_by == "all" else some[used_by]

    for step in range(3):
        for pass_number in range(passes):
            terms = []
            for number, weight in enumerate(weights):
                for rank in users(step, number):
                    factor = float(6 * (1 + rank + number + pass_number))
                    (mirror[number].sum() * factor / divisor).backward()
                    if rank == hvd.rank():
                        terms.append(weight.sum() * factor)
            sum(terms).backward()
        optimizer.step()
        plain.step()
        for weight, expected in zip(weights, mirror, strict=True):
            torch.testing.assert_close(weight.grad, expected.grad, rtol=1e-6, atol=0)
            torch.testing.assert_close(weight, expected, rtol=1e-6, atol=0)
    assert_same_bits([t for w in weights for t in (w, w.grad)])


@pytest.mark.parametrize("how", ["replaced", "overwritten"])
def test_a_gradient_that_is_written_by_hand_in_each_step_is_added_up(how: str) -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)
    total = sum(range(1, hvd.size() + 1))
    for step in range(1, 4):
        gradient = torch.full((3,), float(step * (hvd.rank() + 1)))
        if how == "replaced" or step == 1:
            weight.grad = gradient
        else:
            weight.grad.copy_(gradient)
        optimizer.step()
        assert weight.grad.tolist() == [step * total] * 3
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    assert weight.grad.tolist() == [0.0] * 3
    assert weight.tolist() == [-6.0 * total] * 3


def test_leftovers_count_once_in_a_process_set() -> None:
    """Of which rank 0 is no member."""
    members = hvd.add_process_set(range(1, hvd.size()))
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0), op=hvd.Sum, process_set=members)
    total = sum(range(1, hvd.size())) if members.included() else hvd.rank()
    for step in range(3):
        loss = weights[0].sum() * hvd.rank()
        if step == 0 or hvd.rank() == hvd.size() - 1:
            loss = loss + weights[1].sum() * hvd.rank()
        loss.backward()
        optimizer.step()
        assert weights[0].grad.tolist() == [total * (step + 1)] * 2
        if members.included():
            assert weights[1].grad.tolist() == [total + step * (hvd.size() - 1)] * 2
    hvd.remove_process_set(members)


def test_sparse_leftovers_count_once() -> None:
    table = torch.nn.Embedding(6, 2, sparse=True)
    other = torch.nn.Parameter(torch.zeros(1))
    torch.nn.init.zeros_(table.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([table.weight, other], lr=1.0), op=hvd.Sum)
    expected = torch.zeros(6, 2)
    for step in range(3):
        loss = other.sum()
        used = [list(range(hvd.size())), [], [hvd.size() - 1]][step]
        for rank in used:
            expected[rank] += rank + 1
            expected[5] += rank + 1
        if hvd.rank() in used:
            loss = loss + table(torch.tensor([hvd.rank(), 5])).sum() * (hvd.rank() + 1)
        loss.backward()
        optimizer.step()
        assert torch.equal(table.weight.grad.to_dense(), expected)
    assert other.grad.tolist() == [3.0 * hvd.size()]


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("kind", ["average", "sum", "grouped"])
def test_process_sets_may_overlap_in_a_ring(kind: str) -> None:
    """Each rank shares one layer with its left neighbour and another with its right one.

    A rank that waited for its right neighbour before it has sent to its left one would wait for all of them.
    """
    size, me = hvd.size(), hvd.rank()
    sets = [hvd.add_process_set([r, (r + 1) % size]) for r in range(size)]
    mine = [sets[me], sets[me - 1]]
    layers = [torch.nn.Linear(3, 2, bias=False) for _ in mine]
    optimizers = []
    for layer, members in zip(layers, mine, strict=True):
        torch.nn.init.zeros_(layer.weight)
        options = {"grouped": {"num_groups": 1}, "sum": {"op": hvd.Sum}}.get(kind, {})
        made = torch.optim.SGD(layer.parameters(), lr=1.0)
        optimizers.append(hvd.DistributedOptimizer(made, process_set=members, **options))
    divisor = 1 if kind == "sum" else 2
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(layer(torch.full((1, 3), me + step + 1.0)).sum() for layer in layers).backward()
        for layer, neighbour in zip(layers, ((me + 1) % size, (me - 1) % size), strict=True):
            expected = (me + neighbour + 2 * (step + 1)) / divisor
            assert layer.weight.grad.tolist() == [[expected] * 3] * 2
        for optimizer in optimizers:
            optimizer.step()
    for members in sets:
        hvd.remove_process_set(members)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("gone_bytes_max", [0, 8192])
def test_a_rank_that_only_joins_knows_as_many_optimizers_as_the_others(gone_bytes_max: int) -> None:
    """The last rank has no data in the first fold, whose optimizers the others delete while it has joined."""
    before, rounds.GONE_BYTES_MAX = rounds.GONE_BYTES_MAX, gone_bytes_max
    ((x, y),) = batches(1)
    last = hvd.size() - 1
    module, other = model(), model(1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1))
    spare = hvd.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1))
    if hvd.rank() != last:
        loss_of(other, own(x), own(y)).backward()
        spare.step()
    del spare
    gc.collect()
    if hvd.rank() != last:
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(module, own(x), own(y)).backward()
            optimizer.step()
    hvd.join()
    places = None
    for _ in range(2):
        module = torch.nn.Linear(5, 2)
        hvd.broadcast_parameters(module.state_dict(), 0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1))
        gc.collect()
        loss_of(module, own(x), own(y)).backward()
        optimizer.step()
        assert_same_bits(module)
        places = [place.size for place in optimizer._gradients.board.places]
    assert hvd.allgather_object(places) == [places] * hvd.size()
    if gone_bytes_max == 0:
        assert places == [2], "the places of deleted optimizers are left"
    rounds.GONE_BYTES_MAX = before


def compiled_autograd_trains(op_name: str) -> None:
    """Whose programs have the hooks of gradients in them."""
    import torch._dynamo

    op = getattr(hvd, op_name)
    factor = hvd.size() if op == hvd.Sum else 1
    module, oracle = model(), model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), op=op)
    plain = torch.optim.SGD(oracle.parameters(), lr=0.1)

    @torch.compile(backend="eager")
    def backward(x: Tensor, y: Tensor) -> None:
        loss_of(module, x, y).backward()

    torch._dynamo.config.compiled_autograd = True
    try:
        for x, y in batches(3):
            optimizer.zero_grad()
            plain.zero_grad()
            backward(own(x), own(y))
            (loss_of(oracle, x, y) * factor).backward()
            optimizer.step()
            plain.step()
    finally:
        torch._dynamo.config.compiled_autograd = False
    assert_close(module, oracle)
    assert_same_bits(module)


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_compiled_autograd_trains_like_one_process(op: str) -> None:
    compiled_autograd_trains(op)


@pytest.mark.parametrize("kind", ["average", "sum", "grouped"])
def test_sparse_gradients_that_travel_dense_come_back_sparse(kind: str) -> None:
    """As SparseAdam needs them; also on rank 0, which in the first step sees none of the rows."""
    options = {"grouped": {"num_groups": 1}, "sum": {"op": hvd.Sum}}.get(kind, {})
    torch.manual_seed(3)
    table = torch.nn.Embedding(7, 2, sparse=True)
    mirror = torch.nn.Embedding(7, 2, sparse=True)
    mirror.load_state_dict(table.state_dict())
    made = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(made, sparse_as_dense=True, **options)
    plain = torch.optim.SparseAdam(mirror.parameters(), lr=0.1)
    divisor = 1 if kind == "sum" else hvd.size()
    for step in range(3):
        optimizer.zero_grad()
        plain.zero_grad()
        for rank in range(hvd.size()):
            if step == 0 and rank == 0:
                continue
            rows = torch.tensor([rank, (rank + step) % 5, 5])
            if rank == hvd.rank():
                table(rows).square().sum().backward()
            (mirror(rows).square().sum() / divisor).backward()
        optimizer.step()
        plain.step()
        assert table.weight.grad.layout is torch.sparse_coo
    assert_close(table, mirror)
    assert_same_bits([table.weight])


def test_a_frozen_parameter_may_be_of_integers() -> None:
    module = model()
    table = torch.nn.Parameter(torch.arange(3), requires_grad=False)
    for op in (hvd.Average, hvd.Sum, hvd.Adasum):
        if op == hvd.Adasum and hvd.size() == 3:
            continue
        made = torch.optim.SGD([*module.parameters(), table], lr=0.1)
        optimizer = hvd.DistributedOptimizer(made, op=op)
        ((x, y),) = batches(1)
        loss_of(module, own(x), own(y)).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert_same_bits(list(module.parameters()))
    assert table.tolist() == [0, 1, 2]


def process_sets_are_added_while_a_rank_has_joined(joined: int) -> None:
    """And removed; one of them has the rank, which takes part with zeros."""
    others = [rank for rank in range(hvd.size()) if rank != joined]
    if hvd.rank() != joined:
        sets = [hvd.add_process_set(others[:1])]
        if hvd.size() > 2:
            sets.append(hvd.add_process_set([joined, others[-1]]))
        for members, expected in zip(sets, (others[0], others[-1]), strict=False):
            if members.included():
                mine = torch.full((2,), float(hvd.rank()))
                assert hvd.allreduce(mine, op=hvd.Sum, process_set=members).tolist() == [expected] * 2
        for members in sets:
            hvd.remove_process_set(members)
    hvd.join()
    later = hvd.add_process_set([joined])
    assert later.process_set_id is not None
    if later.included():
        assert float(hvd.allreduce(torch.tensor(3.0), process_set=later)) == 3.0
    hvd.remove_process_set(later)
    assert_usable()


@pytest.mark.parametrize("joined", [0, -1], ids=["the first", "the last"])
@pytest.mark.ranks(2, 3, 4)
def test_process_sets_can_be_added_while_a_rank_has_joined(joined: int) -> None:
    process_sets_are_added_while_a_rank_has_joined(joined % polyhvd.size())


def test_leftovers_are_clipped_with_the_others() -> None:
    """Between backward and step, as one process would do it."""
    used, unused = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([used, unused], lr=1.0), op=hvd.Sum)
    (used.sum() + unused.sum()).backward()
    optimizer.step()
    for step in range(1, 4):
        used.sum().backward()
        for parameter in (used, unused):
            parameter.grad.mul_(0.5)
        optimizer.step()
        assert unused.grad.tolist() == [hvd.size() * 0.5**step] * 2
    assert_same_bits([used, used.grad, unused])
