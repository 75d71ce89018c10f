"""The collectives on tensors, with Horovod's signatures. What they mean stands in polyhvd.api.

allreduce, grouped_allreduce, allgather and broadcast are differentiable. Asynchronous and in-place
forms are not: their results are unknown to autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from polyhvd.torch.adapter import TorchAdapter, check

from polyhvd.adapter import Handle, ReduceOp
from polyhvd.api import Collectives, resolve_op
from polyhvd.compression import Compression as _Compression
from polyhvd.compression import Compressor
from polyhvd.process_sets import ProcessSet, global_process_set

__all__ = [
    "Compression",
    "adapter",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "collectives",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "increment_version",
    "poll",
    "synchronize",
]

Tensor = torch.Tensor

adapter = TorchAdapter()
collectives: Collectives[Tensor] = Collectives(adapter)
Compression = _Compression(adapter)

poll = collectives.poll
synchronize = collectives.synchronize

# Tells autograd that a tensor was written to: a backward that needs its old values then fails.
increment_version: Any = getattr(torch.autograd.graph, "increment_version", torch._C._increment_version)


def _wants_gradient(tensor: Tensor) -> bool:
    # Anything that is not a tensor is refused by the adapter, with the name of the operation.
    return getattr(tensor, "requires_grad", False) and torch.is_grad_enabled()


def _gradient_name(name: str | None) -> str | None:
    return None if name is None else f"{name}.gradient"


def _check_linear(op: int) -> None:
    if op not in (ReduceOp.Average, ReduceOp.Sum):
        raise NotImplementedError(
            f"allreduce with op={ReduceOp(op).name} has no gradient; use Average or Sum, or detach()"
        )


class _Allreduce(torch.autograd.Function):
    """The gradient of a sum over ranks is the sum of the ranks' gradients, scaled alike."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: int,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.arguments = name, op, prescale_factor, postscale_factor, process_set
        handle = collectives.grouped_allreduce_async(
            tensors,
            name=name,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
            blocking=True,
        )
        results = tuple(collectives.synchronize(handle))
        ctx.mark_non_differentiable(*(t for t in results if not t.is_floating_point()))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        name, op, prescale_factor, postscale_factor, process_set = ctx.arguments
        _check_linear(op)
        chosen = [i for i, g in enumerate(gradients) if g is not None and g.is_floating_point()]
        reduced = grouped_allreduce(
            [gradients[i] for i in chosen],
            name=_gradient_name(name),
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
        )
        results: list[Tensor | None] = [None] * len(gradients)
        for i, gradient in zip(chosen, reduced, strict=True):
            results[i] = gradient
        return None, None, None, None, None, *results


class _Allgather(torch.autograd.Function):
    """The gradient of a rank's rows is the sum of all ranks' gradients of these rows."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.arguments = tensor.shape[0], name, process_set
        return collectives.allgather(tensor, name=name, process_set=process_set)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        count, name, process_set = ctx.arguments
        label = _gradient_name(name)
        counts = collectives.allgather(
            torch.tensor([count]), name=label and f"{label}.rows", process_set=process_set
        )
        first = int(counts[: process_set.rank()].sum())
        total = allreduce(gradient, name=label, op=ReduceOp.Sum, process_set=process_set)
        return total.narrow(0, first, count), None, None


class _Broadcast(torch.autograd.Function):
    """The gradient of the root's tensor is the sum of all ranks' gradients; of others, zero."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> Tensor:
        ctx.arguments = root_rank, name, process_set
        return collectives.broadcast(tensor, root_rank, name=name, process_set=process_set)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        root_rank, name, process_set = ctx.arguments
        total = allreduce(gradient, name=_gradient_name(name), op=ReduceOp.Sum, process_set=process_set)
        return (total if _world_rank() == root_rank else torch.zeros_like(total)), None, None, None


# torch declares no types for apply().
_apply_allreduce: Any = _Allreduce.apply
_apply_allgather: Any = _Allgather.apply
_apply_broadcast: Any = _Broadcast.apply


def _world_rank() -> int:
    return global_process_set.rank()


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce a tensor over the ranks into a new one; see :meth:`polyhvd.api.Collectives.allreduce`.

    Differentiable for Average and Sum, where every rank runs the same backward.
    """
    sent, context = compression.compress(tensor)
    op = resolve_op(op, average)
    result: Tensor
    if _wants_gradient(sent):
        (result,) = _apply_allreduce(name, op, prescale_factor, postscale_factor, process_set, sent)
    else:
        result = collectives.allreduce(
            sent,
            name=name,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
        )
    restored: Tensor = compression.decompress(result, context)
    return restored


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce a tensor over the ranks in place; see :meth:`polyhvd.api.Collectives.allreduce`."""
    check(tensor)
    if tensor.is_neg():
        synchronize(
            allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
        )
        return tensor
    result = collectives.allreduce(
        tensor,
        name=name,
        op=resolve_op(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        in_place=True,
    )
    increment_version(tensor)
    return result


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`allreduce`, without gradient; ``synchronize(handle)`` returns the new tensor."""
    return collectives.allreduce_async(
        tensor,
        name=name,
        op=resolve_op(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`allreduce_`; leave the tensor alone until ``synchronize(handle)``."""
    handle = collectives.allreduce_async(
        tensor,
        name=name,
        op=resolve_op(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        in_place=True,
    )
    increment_version(tensor)
    return handle


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce several tensors as one operation; the tensors of each dtype are all reduced, or none."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    sent = [tensor for tensor, _ in pairs]
    op = resolve_op(op, average)
    results: Sequence[Tensor]
    if any(_wants_gradient(tensor) for tensor in sent):
        results = _apply_allreduce(name, op, prescale_factor, postscale_factor, process_set, *sent)
    else:
        handle = collectives.grouped_allreduce_async(
            sent,
            name=name,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
            blocking=True,
        )
        results = collectives.synchronize(handle)
    return [compression.decompress(t, context) for t, (_, context) in zip(results, pairs, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce several tensors in place as one operation; see :func:`grouped_allreduce`."""
    return list(
        synchronize(
            _start_group_in_place(
                tensors, average, name, op, prescale_factor, postscale_factor, process_set, True
            )
        )
    )


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`grouped_allreduce`, without gradient; ``synchronize(handle)`` returns the new tensors."""
    return collectives.grouped_allreduce_async(
        tensors,
        name=name,
        op=resolve_op(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`grouped_allreduce_`; leave the tensors alone until ``synchronize(handle)``."""
    return _start_group_in_place(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set, False
    )


def _start_group_in_place(
    tensors: Sequence[Tensor],
    average: bool | None,
    name: str | None,
    op: int | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    blocking: bool,
) -> Handle:
    handle = collectives.grouped_allreduce_async(
        tensors,
        name=name,
        op=resolve_op(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        in_place=True,
        blocking=blocking,
    )
    for tensor in tensors:
        increment_version(tensor)
    return handle


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Concatenate the ranks' tensors; see :meth:`polyhvd.api.Collectives.allgather`. Differentiable."""
    if _wants_gradient(tensor):
        result: Tensor = _apply_allgather(tensor, name, process_set)
        return result
    return collectives.allgather(tensor, name=name, process_set=process_set)


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start :func:`allgather`, without gradient."""
    return collectives.allgather_async(tensor, name=name, process_set=process_set)


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the root's tensor as a new one; see :meth:`polyhvd.api.Collectives.broadcast`.

    Differentiable: pass tensors that require gradients on every rank, or on none.
    """
    if _wants_gradient(tensor):
        result: Tensor = _apply_broadcast(tensor, root_rank, name, process_set)
        return result
    return collectives.broadcast(tensor, root_rank, name=name, process_set=process_set)


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Overwrite a tensor with the root's."""
    check(tensor)
    if tensor.is_neg():
        synchronize(broadcast_async_(tensor, root_rank, name, process_set))
        return tensor
    result = collectives.broadcast(tensor, root_rank, name=name, process_set=process_set, in_place=True)
    increment_version(tensor)
    return result


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`broadcast`, without gradient."""
    return collectives.broadcast_async(tensor, root_rank, name=name, process_set=process_set)


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`broadcast_`; leave the tensor alone until ``synchronize(handle)``."""
    handle = collectives.broadcast_async(tensor, root_rank, name=name, process_set=process_set, in_place=True)
    increment_version(tensor)
    return handle
