"""Collectives on values, and the optimizer, with the arguments that Horovod's Keras modules have."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from polyhvd.tensorflow import Compression
from polyhvd.tensorflow.names import do_not_convert

from polyhvd import tensorflow as hvd
from polyhvd.collectives.adapter import ReduceOp
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.training.compression import Compressor

__all__ = [
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allreduce",
    "broadcast",
    "reducescatter",
]


@do_not_convert  # whose locals() would have other names, too
def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = ReduceOp.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    mapping: Any = None,
) -> Any:
    """Wrap an optimizer of Keras so that it applies gradients reduced over the ranks.

    Args:
        optimizer: of Keras 3, Keras 2 or tf.compat.v1. The result shares its state.
        name: begins the names of the operations; the default is the optimizer's class.
        device_dense, device_sparse: accepted for Horovod's sake; collectives run on the host.
        compression: of the gradients on the wire: ``Compression.none``, ``.fp16``, ``.bf16``, one of your
            own, or a :class:`polyhvd.training.compression.KeyedCompressor`, which may keep state for each.
        sparse_as_dense: reduce tf.IndexedSlices (of embeddings) as dense tensors; else their rows are
            gathered, and come back with each index once.
        gradient_predivide_factor: splits the division of an average around the sum.
        op: Average, Sum or Adasum.
        backward_passes_per_step: how many calls make a step. Gradients are added up on the rank; every n-th
            call reduces and applies the sum. The others change no variable, nor ``iterations``. What is left
            at the end of an epoch counts for the next one. Ranks have to make equally many calls. Keras 3's
            own ``gradient_accumulation_steps`` reduces in each call, and averages; if both are given, their
            product is the number of calls in a step.
        average_aggregated_gradients: divide the sum of several calls by their number.
        num_groups: the same as a number for ``groups``.
        groups: how to split the gradients of a step into operations: into this many, or one for each list of
            variables and one for each variable in none; None: one for all.
        process_set: the ranks that take part. Others keep their gradients as they are.
        scale_local_gradients: divide gradients that stay local by the number of ranks.
        mapping: of the model, by :func:`polyhvd.parity.mapping`, where ranks have different frameworks.

    Raises:
        InvalidArgumentError: an argument that cannot be used.

    Example::

        model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.Adam(1e-3 * hvd.size())), loss)
    """
    return hvd.DistributedOptimizer(**locals())


@do_not_convert  # whose locals() would have other names, too
def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = ReduceOp.Average,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    mapping: Any = None,
) -> Any:
    """A :func:`DistributedOptimizer` that leaves the gradients of some layers on their rank.

    Args:
        optimizer: of Keras 3, Keras 2 or tf.compat.v1. The result shares its state.
        name: begins the names of the operations; the default is the optimizer's class.
        device_dense, device_sparse: accepted for Horovod's sake; collectives run on the host.
        compression: of the gradients on the wire: ``Compression.none``, ``.fp16``, ``.bf16``, one of your
            own, or a :class:`polyhvd.training.compression.KeyedCompressor`, which may keep state for each.
        sparse_as_dense: reduce tf.IndexedSlices (of embeddings) as dense tensors; else their rows are
            gathered, and come back with each index once.
        gradient_predivide_factor: splits the division of an average around the sum.
        op: Average, Sum or Adasum.
        groups: how to split the gradients of a step into operations: into this many, or one for each list of
            variables and one for each variable in none; None: one for all.
        process_set: the ranks that take part. Others keep their gradients as they are.
        local_layers: a layer of Keras, or a list of them, whose gradients stay on their rank; they need not
            be built yet.
        scale_local_gradients: divide their gradients by the number of ranks.
        backward_passes_per_step: how many calls make a step. Gradients are added up on the rank; every n-th
            call reduces and applies the sum. The others change no variable, nor ``iterations``. What is left
            at the end of an epoch counts for the next one. Ranks have to make equally many calls. Keras 3's
            own ``gradient_accumulation_steps`` reduces in each call, and averages; if both are given, their
            product is the number of calls in a step.
        average_aggregated_gradients: divide the sum of several calls by their number.
        mapping: of the model, by :func:`polyhvd.parity.mapping`, where ranks have different frameworks.

    Raises:
        InvalidArgumentError: an argument that cannot be used, or ``local_layers`` are no layers.

    Example::

        optimizer = hvd.PartialDistributedOptimizer(optimizer, local_layers=[model.layers[0]])
    """
    return hvd.PartialDistributedOptimizer(**locals())


@do_not_convert
def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Compressor = Compression.none,
) -> tf.Tensor:
    """Reduce a value over the ranks.

    Args:
        value: a number, an array or a tensor; of the same shape and dtype on every rank.
        name: matches the calls of the ranks.
        average: older form of ``op``.
        prescale_factor, postscale_factor: multiply each rank's value, and the result.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        compression: of the value on the wire.

    Raises:
        RankMismatchError: shapes or dtypes differ between ranks; in TensorFlow a FailedPreconditionError.
        HorovodInternalError: a rank was lost; in TensorFlow an AbortedError.

    Example::

        mean_loss = hvd.allreduce(loss, name="loss")
    """
    return hvd.allreduce(
        tf.convert_to_tensor(value),
        average=average,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
    )


@do_not_convert
def allgather(value: Any, name: str | None = None) -> tf.Tensor:
    """Concatenate the ranks' values along the first dimension.

    Args:
        value: an array or a tensor; the first dimension may differ between ranks.
        name: matches the calls of the ranks.

    Raises:
        RankMismatchError: other dimensions or dtypes differ between ranks; in TensorFlow a
            FailedPreconditionError.
        HorovodInternalError: a rank was lost; in TensorFlow an AbortedError.

    Example::

        predictions = hvd.allgather(model.predict(my_part))
    """
    return hvd.allgather(tf.convert_to_tensor(value), name=name)


@do_not_convert
def broadcast(value: Any, root_rank: int, name: str | None = None) -> tf.Tensor:
    """The root's value, on every rank.

    Args:
        value: a number, an array or a tensor; of the same shape and dtype on every rank.
        root_rank: world rank of the sender.
        name: matches the calls of the ranks.

    Raises:
        tf.errors.FailedPreconditionError: shapes or dtypes differ between ranks.
        tf.errors.AbortedError: a rank was lost.

    Example::

        start = hvd.broadcast(start, root_rank=0)
    """
    return hvd.broadcast(tf.convert_to_tensor(value), root_rank, name=name)


@do_not_convert
def reducescatter(value: Any, name: str | None = None, op: int = ReduceOp.Average) -> tf.Tensor:
    """Reduce a value over the ranks, and keep this rank's part of its rows.

    Args:
        value: an array or a tensor; of the same shape and dtype on every rank.
        name: matches the calls of the ranks.
        op: Average (default) or another reduction.

    Raises:
        tf.errors.FailedPreconditionError: shapes or dtypes differ between ranks.
        tf.errors.AbortedError: a rank was lost.

    Example::

        my_rows = hvd.reducescatter(table, op=hvd.Sum)
    """
    return hvd.reducescatter(tf.convert_to_tensor(value), op=op, name=name)
