"""The collectives as users call them, eager and in ``tf.function``; handles.py has the asynchronous ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from polyhvd.tensorflow import ops, sparse
from polyhvd.tensorflow.compression import Compression, compressors_for
from polyhvd.tensorflow.gradients import accept_device, as_dense, reduction_of
from polyhvd.tensorflow.names import do_not_convert

from polyhvd.collectives.adapter import ReduceOp
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.training.compression import Compressor, KeyedCompressor

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "reducescatter",
]

_THE_TENSOR = "the tensor"


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
) -> Any:
    """Reduce a tensor elementwise over the ranks; see :meth:`Collectives.allreduce`.

    Args:
        tensor: any shape; the same shape and dtype on every rank. Of a tf.IndexedSlices, whose rows may
            differ in number, the result has the rows of all ranks; scaled integers, an average too, are
            added up first, and have each index once.
        average: older form of ``op``.
        device_dense, device_sparse: accepted for Horovod's sake; collectives run on the host.
        compression: of the tensor on the wire.
        op: Average (default), Sum, Adasum, Min, Max or Product; Average or Sum of tf.IndexedSlices.
        prescale_factor, postscale_factor: multiply each rank's tensor, and the result.
        name: matches the calls of the ranks.
        process_set: the ranks that take part.
        ignore_name_scope: accepted for Horovod's sake; name scopes are never part of names.

    Raises:
        tf.errors.InvalidArgumentError: a bad call; nothing was sent. Of an ``op`` that tf.IndexedSlices do
            not have, it is a NotImplementedError as well.
        tf.errors.FailedPreconditionError: the ranks' tensors or arguments differ.
        tf.errors.AbortedError: a rank was lost, or the engine was shut down. Outside of a ``tf.function``
            it is a HorovodInternalError as well.
    """
    return grouped_allreduce(
        [tensor],
        average,
        device_dense,
        device_sparse,
        compression,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        ignore_name_scope,
        name,
    )[0]


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
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Reduce several tensors, of any dtypes, as one operation: all or none; see :func:`allreduce`.

    Those that are tf.IndexedSlices are an operation of their own.
    """
    tensors = list(tensors)
    accept_device("allreduce", device_dense=device_dense, device_sparse=device_sparse)
    arguments: dict[str, Any] = {
        "op": reduction_of(op, average),
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
        "process_set": process_set,
    }
    results: list[Any] = [None] * len(tensors)
    slices = [i for i, tensor in enumerate(tensors) if isinstance(tensor, tf.IndexedSlices)]
    dense = [i for i in range(len(tensors)) if i not in slices]
    if slices:
        label = f"{name}.sparse" if name is not None and dense else name
        chosen = [tensors[i] for i in slices]
        # Of slices, other rows are sent in each call: a compressor with state has none for them.
        stateless = Compression.none if isinstance(compression, KeyedCompressor) else compression
        reduced = sparse.allreduce(chosen, name=label, compression=stateless, **arguments)
        for i, value in zip(slices, reduced, strict=True):
            results[i] = value
    if dense:
        each = compressors_for(compression, name, len(dense))
        pairs = [c.compress(as_dense(tensors[i], _THE_TENSOR)) for c, i in zip(each, dense, strict=True)]
        values = ops.allreduce([sent for sent, _ in pairs], name=name, **arguments)
        for i, tensor, c, (_, context) in zip(dense, values, each, pairs, strict=True):
            results[i] = c.decompress(tensor, context)
    return results


@do_not_convert
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    exact_gradient: bool | None = None,
) -> tf.Tensor:
    """Concatenate the ranks' tensors along the first dimension, whose size may differ between ranks.

    Args:
        tensor: at least one dimension; all but the first are the same on every rank.
        name: matches the calls of the ranks.
        ignore_name_scope: accepted for Horovod's sake.
        process_set: the ranks that take part.
        exact_gradient: True: the gradient is that of the sum of all ranks' losses; False: divided by the
            number of ranks, as in Horovod; None: as ``POLYHVD_EXACT_GRADIENTS`` says, which is False by
            default. The same on every rank.

    Raises:
        tf.errors.InvalidArgumentError, FailedPreconditionError, AbortedError: as :func:`allreduce`.
    """
    dense = [as_dense(tensor, _THE_TENSOR)]
    return ops.allgather(dense, name=name, process_set=process_set, exact_gradient=exact_gradient)[0]


@do_not_convert
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    exact_gradient: bool | None = None,
) -> list[tf.Tensor]:
    """Gather several tensors, of any dtypes, as one operation: all or none; see :func:`allgather`."""
    dense = [as_dense(tensor, "a tensor") for tensor in tensors]
    return ops.allgather(dense, name=name, process_set=process_set, exact_gradient=exact_gradient)


@do_not_convert
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    exact_gradient: bool | None = None,
) -> tf.Tensor:
    """The root's tensor, on every rank. ``exact_gradient``: as for :func:`allgather`."""
    dense = [as_dense(tensor, _THE_TENSOR)]
    return ops.broadcast(dense, root_rank, name=name, process_set=process_set, exact_gradient=exact_gradient)[
        0
    ]


@do_not_convert
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Exchange rows with all ranks; see :meth:`Collectives.alltoall`.

    Args:
        tensor: at least one dimension; all but the first are the same on every rank.
        splits: rows for each rank of the process set: a list, an array, or a tensor of int32 or int64, which
            in a ``tf.function`` need not be known before it runs; None: equal parts.
        name: matches the calls of the ranks.
        ignore_name_scope: accepted for Horovod's sake.
        process_set: the ranks that take part.

    Returns:
        The received rows; with ``splits`` a tuple of them and the number of rows received from each rank,
        as int32.

    Raises:
        tf.errors.InvalidArgumentError, FailedPreconditionError, AbortedError: as :func:`allreduce`.
    """
    return ops.alltoall(as_dense(tensor, _THE_TENSOR), splits, name=name, process_set=process_set)


@do_not_convert
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Compressor = Compression.none,
    op: int = ReduceOp.Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    exact_gradient: bool | None = None,
) -> tf.Tensor:
    """Reduce a tensor and keep this rank's rows; see :meth:`Collectives.reducescatter`.

    Arguments and errors are those of :func:`allreduce`; Adasum is not possible. ``exact_gradient``: as for
    :func:`allgather`.
    """
    result: tf.Tensor = grouped_reducescatter(
        [tensor],
        device_dense,
        compression,
        op,
        process_set,
        prescale_factor,
        postscale_factor,
        name,
        ignore_name_scope,
        exact_gradient,
    )[0]
    return result


@do_not_convert
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Compressor = Compression.none,
    op: int = ReduceOp.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    ignore_name_scope: bool = False,
    exact_gradient: bool | None = None,
) -> list[tf.Tensor]:
    """Reduce several tensors, of any dtypes, and keep this rank's rows, as one operation: all or none."""
    accept_device("reducescatter", device_dense=device_dense)
    each = compressors_for(compression, name, len(tensors))
    pairs = [c.compress(as_dense(tensor, "a tensor")) for c, tensor in zip(each, tensors, strict=True)]
    reduced = ops.reducescatter(
        [sent for sent, _ in pairs],
        name=name,
        op=reduction_of(op),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        exact_gradient=exact_gradient,
    )
    parts = zip(each, reduced, pairs, strict=True)
    return [c.decompress(value, context) for c, value, (_, context) in parts]


@do_not_convert
def barrier(process_set: ProcessSet = global_process_set) -> Any:
    """Return when every rank of the process set has called it.

    In a graph it runs after the collectives before it and before those after it; in one of tf.compat.v1 the
    operation to run is returned.
    """
    return ops.barrier(process_set)


@do_not_convert
def join() -> Any:
    """Say that this rank has run out of data, and wait until all have; see :func:`polyhvd.join`.

    Returns:
        The rank that joined last; in a graph, where it keeps its place among the collectives, a scalar of
        int32.
    """
    return ops.join()
