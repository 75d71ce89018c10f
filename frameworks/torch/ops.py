"""The reductions of tensors, with Horovod's signatures. What they mean stands in collectives.verbs.

Forms that return new tensors are differentiable. Asynchronous and in-place forms are not: their results
are unknown to autograd.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from polyhvd.torch.adapter import check
from polyhvd.torch.base import Compression, as_tensor, collectives, increment_version, synchronize
from polyhvd.torch.compiled import is_compiling, overwritten
from polyhvd.torch.derivatives import allreduce_group, reducescatter_group, wants_gradient

from polyhvd import _core
from polyhvd.collectives.adapter import Handle, OpKind, ReduceOp
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.collectives.verbs import resolve_op
from polyhvd.training.compression import Compressor

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
]

Tensor = torch.Tensor
Average = ReduceOp.Average
_ALLREDUCE = OpKind.ALLREDUCE  # read once: an enum's member takes a look-up


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
    """Reduce a tensor, or a number, over the ranks into a new one.

    See :meth:`Collectives.allreduce` for what the arguments mean.

    Differentiable for Average and Sum, where every rank runs the same backward.
    """
    sent, context = compression.compress(as_tensor(tensor))
    op = resolve_op(op, average)
    if is_compiling() or wants_gradient(sent):
        (result,) = allreduce_group(
            (sent,),
            name=name,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
        )
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
    """Reduce a tensor over the ranks in place; see :meth:`Collectives.allreduce`."""
    if is_compiling():
        new = allreduce(
            tensor.detach(),
            average,
            name,
            Compression.none,
            op,
            prescale_factor,
            postscale_factor,
            process_set,
        )
        return overwritten([tensor], [new])[0]
    op = resolve_op(op, average)
    try:
        done = not tensor.is_neg() and collectives.in_place(
            _core.run, _ALLREDUCE, tensor, name, op, -1, prescale_factor, postscale_factor, process_set, 0
        )
    except (AttributeError, RuntimeError, TypeError):
        check(tensor)
        raise
    if done:
        increment_version(tensor)
        return tensor
    handle = allreduce_async_(tensor, None, name, op, prescale_factor, postscale_factor, process_set)
    result: Tensor = synchronize(handle)
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
        as_tensor(tensor),
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
    tensors: Iterable[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce several tensors, of any dtypes, as one operation: all or none. Differentiable."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    results = allreduce_group(
        [tensor for tensor, _ in pairs],
        name=name,
        op=resolve_op(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )
    return [compression.decompress(t, context) for t, (_, context) in zip(results, pairs, strict=True)]


def grouped_allreduce_(
    tensors: Iterable[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce several tensors in place as one operation; see :func:`grouped_allreduce`."""
    if is_compiling():
        tensors = list(tensors)
        new = grouped_allreduce(
            [tensor.detach() for tensor in tensors],
            average,
            name,
            Compression.none,
            op,
            prescale_factor,
            postscale_factor,
            process_set,
        )
        return overwritten(tensors, new)
    return list(
        synchronize(
            _start_group_in_place(
                tensors, average, name, op, prescale_factor, postscale_factor, process_set, True
            )
        )
    )


def grouped_allreduce_async(
    tensors: Iterable[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`grouped_allreduce`, without gradient; ``synchronize(handle)`` returns the new tensors."""
    return collectives.grouped_allreduce_async(
        list(tensors),
        name=name,
        op=resolve_op(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


def grouped_allreduce_async_(
    tensors: Iterable[Tensor],
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
    tensors: Iterable[Tensor],
    average: bool | None,
    name: str | None,
    op: int | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    blocking: bool,
) -> Handle:
    tensors = list(tensors)
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


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    exact_gradient: bool | None = None,
) -> Tensor:
    """Reduce a tensor and keep this rank's rows; see :meth:`Collectives.reducescatter`.

    Differentiable for Average and Sum, where every rank runs the same backward. ``exact_gradient``: as for
    :func:`allgather`.
    """
    (result,) = grouped_reducescatter(
        (tensor,), name, compression, op, process_set, prescale_factor, postscale_factor, exact_gradient
    )
    return result


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start :func:`reducescatter`, without gradient; ``synchronize(handle)`` returns the rows."""
    return collectives.reducescatter_async(
        tensor,
        name=name,
        op=resolve_op(op),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


def grouped_reducescatter(
    tensors: Iterable[Tensor],
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    exact_gradient: bool | None = None,
) -> list[Tensor]:
    """Reduce several tensors and keep this rank's rows, as one operation: all or none.

    Differentiable; see :func:`reducescatter`.
    """
    pairs = [compression.compress(tensor) for tensor in tensors]
    results = reducescatter_group(
        [tensor for tensor, _ in pairs],
        name=name,
        op=resolve_op(op),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        exact_gradient=exact_gradient,
    )
    return [compression.decompress(t, context) for t, (_, context) in zip(results, pairs, strict=True)]


def grouped_reducescatter_async(
    tensors: Iterable[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start :func:`grouped_reducescatter`, without gradient; ``synchronize(handle)`` returns the rows."""
    return collectives.grouped_reducescatter_async(
        list(tensors),
        name=name,
        op=resolve_op(op),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )
