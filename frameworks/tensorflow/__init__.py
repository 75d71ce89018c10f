"""Collectives for TensorFlow 2.13 and later, eager and in ``tf.function``.

Example::

    import polyhvd.tensorflow as hvd
    hvd.init()
    hvd.broadcast_variables(model.variables, root_rank=0)
    with tf.GradientTape() as tape:
        loss = compute(model, batch)
    gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from polyhvd.tensorflow import ops
from polyhvd.tensorflow.compression import Compression
from polyhvd.tensorflow.errors import as_tensorflow
from polyhvd.tensorflow.gradient_tape import DistributedGradientTape
from polyhvd.tensorflow.gradients import accept_device, as_dense, grouped_by_dtype
from polyhvd.tensorflow.names import do_not_convert
from polyhvd.tensorflow.optimizer import DistributedOptimizer
from polyhvd.tensorflow.state import broadcast_, broadcast_object_fn, broadcast_variables

import polyhvd
from polyhvd import (
    Average,
    HorovodInternalError,
    InvalidArgumentError,
    Max,
    Min,
    NotInitializedError,
    ProcessSet,
    Product,
    RankMismatchError,
    Sum,
    allgather_object,
    broadcast_object,
    counters,
    cross_rank,
    cross_size,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from polyhvd.adapter import Handle
from polyhvd.api import resolve_op
from polyhvd.compression import Compressor


@do_not_convert
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> tf.Tensor:
    """Reduce a tensor elementwise over the ranks; see :meth:`polyhvd.api.Collectives.allreduce`.

    Args:
        tensor: any shape; the same shape and dtype on every rank.
        average: older form of ``op``.
        device_dense, device_sparse: accepted for Horovod's sake; collectives run on the host.
        compression: of the tensor on the wire.
        op: Average (default), Sum, Min, Max or Product.
        prescale_factor, postscale_factor: multiply each rank's tensor, and the result.
        name: matches the calls of the ranks.
        process_set: the ranks that take part.
        ignore_name_scope: accepted for Horovod's sake; name scopes are never part of names.

    Raises:
        tf.errors.InvalidArgumentError: a bad call; nothing was sent.
        tf.errors.FailedPreconditionError: the ranks' tensors or arguments differ.
        tf.errors.AbortedError: a rank was lost, or the engine was shut down. Outside of a ``tf.function``
            it is a HorovodInternalError as well.
    """
    result: tf.Tensor = grouped_allreduce(
        [tensor],
        average,
        device_dense,
        device_sparse,
        compression,
        op,
        prescale_factor,
        postscale_factor,
        name,
        process_set,
        ignore_name_scope,
    )[0]
    return result


@do_not_convert
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> list[tf.Tensor]:
    """Reduce several tensors, those of one dtype as one operation; see :func:`allreduce`."""
    accept_device("allreduce", device_dense=device_dense, device_sparse=device_sparse)
    reduction = resolve_op(op, average)
    pairs = [compression.compress(as_dense(tensor, "the tensor")) for tensor in tensors]
    results: list[Any] = [None] * len(pairs)
    groups = grouped_by_dtype([sent for sent, _ in pairs])
    for dtype, positions in groups.items():
        reduced = ops.allreduce(
            [pairs[i][0] for i in positions],
            name=f"{name}.{dtype}" if name is not None and len(groups) > 1 else name,
            op=reduction,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
        )
        for i, value in zip(positions, reduced, strict=True):
            results[i] = compression.decompress(value, pairs[i][1])
    return results


def allreduce_async(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`allreduce` of an eager tensor; ``synchronize(handle)`` returns the result."""
    with as_tensorflow():
        return ops.collectives.allreduce_async(
            as_dense(tensor, "the tensor"),
            name=name,
            op=resolve_op(op, average),
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
    """Start the reduction of eager tensors of one dtype; ``synchronize(handle)`` returns the list."""
    with as_tensorflow():
        return ops.collectives.grouped_allreduce_async(
            [as_dense(tensor, "the tensor") for tensor in tensors],
            name=name,
            op=resolve_op(op, average),
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
        )


@do_not_convert
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenate the ranks' tensors along the first dimension, whose size may differ between ranks."""
    return ops.allgather(as_dense(tensor, "the tensor"), name=name, process_set=process_set)


def allgather_async(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start :func:`allgather` of an eager tensor."""
    with as_tensorflow():
        return ops.collectives.allgather_async(
            as_dense(tensor, "the tensor"), name=name, process_set=process_set
        )


@do_not_convert
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """The root's tensor, on every rank."""
    return ops.broadcast([as_dense(tensor, "the tensor")], root_rank, name=name, process_set=process_set)[0]


def broadcast_async(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start :func:`broadcast` of an eager tensor."""
    with as_tensorflow():
        return ops.collectives.broadcast_async(
            as_dense(tensor, "the tensor"), root_rank, name=name, process_set=process_set
        )


@do_not_convert
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the process set has called it; not inside a ``tf.function``."""
    if not tf.executing_eagerly():
        raise NotImplementedError(
            "barrier() in a tf.function would run once, when the function is traced; call it outside"
        )
    with as_tensorflow():
        polyhvd.barrier(process_set)


def synchronize(handle: Handle) -> Any:
    """Wait for an asynchronous operation; return its result, or raise what it failed with."""
    with as_tensorflow():
        return ops.collectives.synchronize(handle)


def poll(handle: Handle) -> bool:
    """Whether :func:`synchronize` would return without waiting."""
    return ops.collectives.poll(handle)


__all__ = [
    "Average",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "InvalidArgumentError",
    "Max",
    "Min",
    "NotInitializedError",
    "ProcessSet",
    "Product",
    "RankMismatchError",
    "Sum",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "counters",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "grouped_allreduce",
    "grouped_allreduce_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
