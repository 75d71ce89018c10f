"""The derivatives of the collectives, scaled by polyhvd.collectives.adjoints.

A backward is a collective, too: every rank that takes part in the forward runs it, in the same order.
What it is called follows from the forward's name, so names agree between ranks and recur.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch
from polyhvd.torch import compiled
from polyhvd.torch.base import adapter, collectives

from polyhvd.collectives.adapter import OpKind, ReduceOp
from polyhvd.collectives.adjoints import gradient_factor, rows_before, rows_kept
from polyhvd.collectives.functions import Functions
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.collectives.verbs import Collectives, splits_of
from polyhvd.errors import InvalidArgumentError
from polyhvd.runtime import current
from polyhvd.runtime.world import World

__all__ = [
    "allgather_gradients",
    "allgather_group",
    "allreduce_gradients",
    "allreduce_group",
    "alltoall_gradient",
    "alltoall_parts",
    "broadcast_gradient",
    "broadcast_one",
    "equal_parts",
    "floating",
    "reducescatter_gradients",
    "reducescatter_group",
    "simple",
    "spread",
    "wants_gradient",
]

_functorch: Any = torch._C._functorch
Tensor = torch.Tensor
Gradients = list[Tensor | None]

#: Autograd knows nothing of its results.
simple = Functions(collectives)


def wants_gradient(tensor: Tensor) -> bool:
    """Return whether autograd is to know of an operation on ``tensor``; False for what is not a tensor."""
    # The adapter refuses that, with the name of the operation.
    if getattr(tensor, "requires_grad", False) and torch.is_grad_enabled():
        return True
    # Tensors of torch.func have no memory; autograd unwraps them.
    if _functorch.peek_interpreter_stack() is None:
        return False
    return isinstance(tensor, Tensor) and bool(_functorch.is_functorch_wrapped_tensor(tensor))


def _any_wants_gradient(tensors: Sequence[Tensor]) -> bool:
    return any(wants_gradient(tensor) for tensor in tensors)


def _within(world: World | None) -> Functions[Tensor]:
    """The collectives of one world; None: of the current one."""
    return simple if world is None else Functions(Collectives(adapter, world))


def _generation(world: World | None) -> int:
    """Return the generation of forward, because backward must not reach another world."""
    return (world or current.world()).placement.generation


def _world_of(ctx: Any, verb: str, name: str | None) -> World:
    """That of the forward pass; raises PeerLostError where another one is current."""
    return current.of_generation(ctx.generation, f"the gradient of {verb} {name or 'without a name'!r}")


def _gradient_name(name: str | None) -> str | None:
    return None if name is None else f"{name}.gradient"


def _check_linear(collective: str, op: int) -> None:
    if op not in (ReduceOp.Average, ReduceOp.Sum):
        raise InvalidArgumentError(
            f"op={ReduceOp(op).name}: {collective} has a gradient only for Average and Sum; use one of "
            "them, or detach()"
        )


def _mark_integers(ctx: Any, results: Sequence[Tensor]) -> None:
    ctx.mark_non_differentiable(*(t for t in results if not t.is_floating_point()))


def floating(gradients: Sequence[Tensor]) -> list[int]:
    """Positions of the outputs that have a gradient."""
    return [i for i, g in enumerate(gradients) if g is not None and g.is_floating_point()]


def spread(count: int, positions: list[int], values: Sequence[Tensor]) -> Gradients:
    """Values at their positions, and None elsewhere."""
    results: Gradients = [None] * count
    for position, value in zip(positions, values, strict=True):
        results[position] = value
    return results


# From gradients of the results to those of the tensors. They are differentiable, for second derivatives.


def allreduce_gradients(
    gradients: Sequence[Tensor], arguments: dict[str, Any], world: World | None = None
) -> list[Tensor]:
    """The gradient of a sum over ranks is the sum of the ranks' gradients, with the same factors."""
    _check_linear("allreduce", arguments["op"])
    changed = {**arguments, "name": _gradient_name(arguments["name"])}
    return allreduce_group(gradients, world=world, **changed)


def reducescatter_gradients(
    gradients: Sequence[Tensor],
    rows: Sequence[int],
    exact: bool | None,
    arguments: dict[str, Any],
    world: World | None = None,
) -> list[Tensor]:
    """The gradient of a term is that of its sum: every rank gathers the gradients of all ``rows``."""
    op, process_set = arguments["op"], arguments["process_set"]
    _check_linear("reducescatter", op)
    size = process_set.size()
    factor = arguments["prescale_factor"] * arguments["postscale_factor"]
    factor *= gradient_factor(OpKind.REDUCESCATTER, size, exact, op)
    scaled = [gradient if factor == 1 else gradient * factor for gradient in gradients]
    label = _gradient_name(arguments["name"])
    gathered = allgather_group(scaled, name=label, process_set=process_set, exact_gradient=exact, world=world)
    if all(t.shape[0] == count for t, count in zip(gathered, rows, strict=True)):
        return gathered
    # Ranks have joined; all others know it, and take part in this.
    (members,) = allgather_group(
        [torch.tensor([process_set.rank()])],
        name=label and f"{label}.ranks",
        process_set=process_set,
        world=world,
    )
    return [
        _in_their_places(t, rows_kept(count, size), members.tolist(), count)
        for t, count in zip(gathered, rows, strict=True)
    ]


def allgather_gradients(
    gradients: Sequence[Tensor],
    rows: Sequence[int],
    name: str | None,
    process_set: ProcessSet,
    exact: bool | None,
    world: World | None = None,
) -> list[Tensor]:
    """The gradient of a rank's rows is the sum of all ranks' gradients of these rows."""
    label = _gradient_name(name)
    own, size = process_set.rank(), process_set.size()
    # With the rank, since those that have joined are missing from it.
    (table,) = allgather_group(
        [torch.tensor([[own, *rows]])],
        name=label and f"{label}.rows",
        process_set=process_set,
        world=world,
    )
    before = rows_before(table.tolist(), own, size, [g.shape[0] for g in gradients], name or "without a name")
    totals = _sums(gradients, label, process_set, gradient_factor(OpKind.ALLGATHER, size, exact), world)
    return [t.narrow(0, begin, count) for t, begin, count in zip(totals, before, rows, strict=True)]


def broadcast_gradient(
    gradient: Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    exact: bool | None,
    world: World | None = None,
) -> Tensor:
    """The gradient of the root's tensor is the sum of all ranks' gradients; of others, zero."""
    factor = gradient_factor(OpKind.BROADCAST, process_set.size(), exact)
    (total,) = _sums([gradient], _gradient_name(name), process_set, factor, world)
    is_root = torch.tensor(global_process_set.rank() == root_rank)
    # Zeros with a graph: the second derivative is a collective of every rank.
    return torch.where(is_root, total, torch.zeros_like(total))


def alltoall_gradient(
    gradient: Tensor,
    rows: int,
    splits: Any,
    received: Sequence[int],
    name: str | None,
    process_set: ProcessSet,
    world: World | None = None,
) -> Tensor:
    """The gradients of rows travel back to the rank that has sent them.

    Args:
        rows: of the tensor that was sent.
        splits: its rows for each rank; None: equal parts.
        received: rows that came from each rank; none from those that had joined.
    """
    label = _gradient_name(name)
    returned, counts = alltoall_parts(gradient, received, name=label, process_set=process_set, world=world)
    if returned.shape[0] == rows:
        whole: Tensor = returned
        return whole
    members = [position for position, count in enumerate(counts.tolist()) if count]
    parts = splits_of(splits) or [rows // len(counts)] * len(counts)
    return _in_their_places(returned, parts, members, rows)


def _in_their_places(values: Tensor, counts: Sequence[int], members: Container[int], rows: int) -> Tensor:
    """``rows`` rows, of which those of ``members`` are given; zeros for all others, and at the end."""
    parts, begin = [], 0
    for position, count in enumerate(counts):
        if position in members:
            parts.append(values.narrow(0, begin, count))
            begin += count
        else:
            parts.append(values.new_zeros(count, *values.shape[1:]))
    parts.append(values.new_zeros(rows - sum(counts), *values.shape[1:]))
    return torch.cat(parts)


def _sums(
    gradients: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    factor: float,
    world: World | None,
) -> list[Tensor]:
    return allreduce_group(
        gradients,
        world=world,
        name=name,
        op=ReduceOp.Sum,
        prescale_factor=1.0,
        postscale_factor=factor,
        process_set=process_set,
    )


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        generation: int, world: World | None, arguments: dict[str, Any], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        return tuple(_within(world).allreduce_group(tensors, **arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.generation, _, ctx.arguments = inputs[:3]
        _mark_integers(ctx, output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        world, chosen = _world_of(ctx, "allreduce", ctx.arguments["name"]), floating(gradients)
        own = allreduce_gradients([gradients[i] for i in chosen], ctx.arguments, world)
        return None, None, None, *spread(len(gradients), chosen, own)


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        generation: int,
        world: World | None,
        exact: bool | None,
        arguments: dict[str, Any],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        return tuple(_within(world).reducescatter_group(tensors, **arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.generation, _, ctx.exact, ctx.arguments, *tensors = inputs
        ctx.rows = [tensor.shape[0] for tensor in tensors]
        _mark_integers(ctx, output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        world, chosen = _world_of(ctx, "reducescatter", ctx.arguments["name"]), floating(gradients)
        own = reducescatter_gradients(
            [gradients[i] for i in chosen], [ctx.rows[i] for i in chosen], ctx.exact, ctx.arguments, world
        )
        return None, None, None, None, *spread(len(gradients), chosen, own)


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(
        generation: int,
        world: World | None,
        name: str | None,
        process_set: ProcessSet,
        exact: bool | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        return tuple(_within(world).allgather_group(tensors, name=name, process_set=process_set))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.generation, _, name, process_set, exact, *tensors = inputs
        ctx.arguments = [tensor.shape[0] for tensor in tensors], name, process_set, exact
        _mark_integers(ctx, output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        rows, name, process_set, exact = ctx.arguments
        world, chosen = _world_of(ctx, "allgather", name), floating(gradients)
        own = allgather_gradients(
            [gradients[i] for i in chosen], [rows[i] for i in chosen], name, process_set, exact, world
        )
        return *[None] * 5, *spread(len(gradients), chosen, own)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        tensor: Tensor,
        generation: int,
        root_rank: int,
        name: str | None,
        process_set: ProcessSet,
        exact: bool | None,
    ) -> Tensor:
        return simple.broadcast_one(tensor, root_rank, name=name, process_set=process_set)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.generation, *ctx.arguments = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        root_rank, name, process_set, exact = ctx.arguments
        world = _world_of(ctx, "broadcast", name)
        own = broadcast_gradient(gradient, root_rank, name, process_set, exact, world)
        return own, *[None] * 5


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        tensor: Tensor,
        generation: int,
        world: World | None,
        splits: Any,
        name: str | None,
        process_set: ProcessSet,
    ) -> tuple[Tensor, Tensor]:
        output, received = _within(world).exchange(tensor, splits, name=name, process_set=process_set)
        return output, received

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        tensor, ctx.generation, _, splits, name, process_set = inputs
        ctx.arguments = tensor.shape[0], splits_of(splits), output[1].tolist(), name, process_set
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        rows, splits, received, name, process_set = ctx.arguments
        world = _world_of(ctx, "alltoall", name)
        own = alltoall_gradient(gradient, rows, splits, received, name, process_set, world)
        return own, *[None] * 5


# torch declares no types for apply().
_apply_allreduce: Any = _Allreduce.apply
_apply_reducescatter: Any = _Reducescatter.apply
_apply_allgather: Any = _Allgather.apply
_apply_broadcast: Any = _Broadcast.apply
_apply_alltoall: Any = _Alltoall.apply


# In `world`; None: in the current one. Graphs know none.


def allreduce_group(
    tensors: Sequence[Tensor], *, world: World | None = None, **arguments: Any
) -> list[Tensor]:
    """``Functions.allreduce_group`` with all its arguments named, differentiable."""
    if compiled.is_compiling():
        return compiled.allreduce(tensors, **arguments)
    if _any_wants_gradient(tensors):
        return list(_apply_allreduce(_generation(world), world, arguments, *tensors))
    return _within(world).allreduce_group(tensors, **arguments)


def reducescatter_group(
    tensors: Sequence[Tensor], *, exact_gradient: bool | None, world: World | None = None, **arguments: Any
) -> list[Tensor]:
    """``Functions.reducescatter_group`` with all its arguments named, differentiable."""
    if compiled.is_compiling():
        return compiled.reducescatter(tensors, exact_gradient, **arguments)
    if _any_wants_gradient(tensors):
        return list(_apply_reducescatter(_generation(world), world, exact_gradient, arguments, *tensors))
    return _within(world).reducescatter_group(tensors, **arguments)


def allgather_group(
    tensors: Sequence[Tensor],
    *,
    name: str | None,
    process_set: ProcessSet,
    exact_gradient: bool | None = None,
    world: World | None = None,
) -> list[Tensor]:
    """``Functions.allgather_group``, differentiable."""
    if compiled.is_compiling():
        return compiled.allgather(tensors, name, process_set, exact_gradient)
    if _any_wants_gradient(tensors):
        return list(_apply_allgather(_generation(world), world, name, process_set, exact_gradient, *tensors))
    return _within(world).allgather_group(tensors, name=name, process_set=process_set)


def broadcast_one(
    tensor: Tensor,
    root_rank: int,
    *,
    name: str | None,
    process_set: ProcessSet,
    exact_gradient: bool | None,
) -> Tensor:
    """``Functions.broadcast_one``, differentiable."""
    if compiled.is_compiling():
        return compiled.broadcast(tensor, root_rank, name, process_set, exact_gradient)
    if wants_gradient(tensor):
        result: Tensor = _apply_broadcast(
            tensor, _generation(None), root_rank, name, process_set, exact_gradient
        )
        return result
    return simple.broadcast_one(tensor, root_rank, name=name, process_set=process_set)


def alltoall_parts(
    tensor: Tensor, splits: Any, *, name: str | None, process_set: ProcessSet, world: World | None = None
) -> Any:
    """``Functions.exchange``, differentiable."""
    if compiled.is_compiling():
        return compiled.alltoall(tensor, splits, name, process_set)
    parts = splits
    if splits is None and wants_gradient(tensor):
        parts = equal_parts(tensor, process_set)
    if parts is None or not wants_gradient(tensor):
        return _within(world).exchange(tensor, splits, name=name, process_set=process_set)
    output, received = _apply_alltoall(tensor, _generation(world), world, parts, name, process_set)
    return output if splits is None else (output, received)


def equal_parts(tensor: Tensor, process_set: ProcessSet) -> list[int] | None:
    """The splits that None means; None for a call that the core refuses."""
    if tensor.dim() == 0 or process_set.process_set_id is None:
        return None
    rows, rest = divmod(tensor.shape[0], process_set.size())
    return [rows] * process_set.size() if rest == 0 else None
