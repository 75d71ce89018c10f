"""Collectives on eager tensors that return a handle at once; a ``tf.function`` is asynchronous anyway."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from polyhvd.tensorflow import ops
from polyhvd.tensorflow.errors import as_tensorflow
from polyhvd.tensorflow.gradients import as_dense, reduction_of

from polyhvd.collectives.adapter import Handle, ReduceOp
from polyhvd.collectives.process_sets import ProcessSet, global_process_set

__all__ = [
    "allgather_async",
    "allreduce_async",
    "alltoall_async",
    "broadcast_async",
    "grouped_allgather_async",
    "grouped_allreduce_async",
    "grouped_reducescatter_async",
    "poll",
    "reducescatter_async",
    "synchronize",
]


def _start(start: Callable[..., Handle], tensor: Any, *inputs: Any, **arguments: Any) -> Handle:
    with as_tensorflow():
        return start(as_dense(tensor, "the tensor"), *inputs, **arguments)


def _start_group(start: Callable[..., Handle], tensors: Sequence[Any], **arguments: Any) -> Handle:
    with as_tensorflow():
        return start([as_dense(tensor, "a tensor") for tensor in tensors], **arguments)


def allreduce_async(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`allreduce` of a dense tensor; ``synchronize(handle)`` returns the result."""
    return _start(
        ops.collectives.allreduce_async,
        tensor,
        name=name,
        op=reduction_of(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


def grouped_allreduce_async(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`grouped_allreduce` of dense tensors; ``synchronize(handle)`` returns the list."""
    return _start_group(
        ops.collectives.grouped_allreduce_async,
        tensors,
        name=name,
        op=reduction_of(op, average),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


def allgather_async(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start :func:`allgather`."""
    return _start(ops.collectives.allgather_async, tensor, name=name, process_set=process_set)


def grouped_allgather_async(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start :func:`grouped_allgather`."""
    return _start_group(ops.collectives.grouped_allgather_async, tensors, name=name, process_set=process_set)


def broadcast_async(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start :func:`broadcast`."""
    return _start(ops.collectives.broadcast_async, tensor, root_rank, name=name, process_set=process_set)


def alltoall_async(
    tensor: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start :func:`alltoall`; ``synchronize(handle)`` returns the rows and how many came from each rank."""
    with as_tensorflow():
        rows = ops.rows_of(splits)
    return _start(ops.collectives.alltoall_async, tensor, rows, name=name, process_set=process_set)


def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: int = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start :func:`reducescatter`."""
    return _start(
        ops.collectives.reducescatter_async,
        tensor,
        name=name,
        op=reduction_of(op),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


def grouped_reducescatter_async(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start :func:`grouped_reducescatter`."""
    return _start_group(
        ops.collectives.grouped_reducescatter_async,
        tensors,
        name=name,
        op=reduction_of(op),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


def synchronize(handle: Handle) -> Any:
    """Wait for an asynchronous operation; return its result, or raise what it failed with."""
    with as_tensorflow():
        return ops.collectives.synchronize(handle)


def poll(handle: Handle) -> bool:
    """Whether :func:`synchronize` would return without waiting."""
    return ops.collectives.poll(handle)
