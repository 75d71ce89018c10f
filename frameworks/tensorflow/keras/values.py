"""Collectives on values, with the arguments that Horovod's Keras modules have."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from polyhvd.tensorflow import Compression
from polyhvd.tensorflow.names import do_not_convert

from polyhvd import tensorflow as hvd
from polyhvd.collectives.adapter import ReduceOp
from polyhvd.training.compression import Compressor

__all__ = ["allgather", "allreduce", "broadcast", "reducescatter"]


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
