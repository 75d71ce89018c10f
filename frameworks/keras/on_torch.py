"""What polyhvd.keras is made of, with Keras on PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import torch
from polyhvd.keras.batch_norm import sync_batch_normalization
from polyhvd.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer, accept_device
from polyhvd.torch import Compression, join

from polyhvd import allgather_object, barrier, broadcast_object
from polyhvd import torch as hvd
from polyhvd.collectives.adapter import ReduceOp
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.training.compression import Compressor
from polyhvd.training.keras import callbacks as keras_callbacks

__all__ = [
    "BroadcastGlobalVariables",
    "Compression",
    "DistributedOptimizer",
    "MetricAverage",
    "PartialDistributedOptimizer",
    "allgather",
    "allgather_object",
    "allreduce",
    "as_polyhvd",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "join",
    "memory_of",
    "reducescatter",
    "sync_batch_normalization",
]

Tensor = torch.Tensor


def as_polyhvd(error: BaseException) -> BaseException:
    """The error itself: PyTorch raises polyhvd's as they are."""
    return error


def memory_of(variable: Any) -> np.ndarray[Any, Any]:
    """The value of a variable, to be looked at; not a copy where NumPy has its type and it is on a CPU."""
    array: np.ndarray[Any, Any] = np.asarray(variable.numpy())
    return np.ascontiguousarray(array) if array.ndim else array


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Compressor = Compression.none,
) -> Tensor:
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
        keras.ops.convert_to_tensor(value),
        average=average,
        name=name,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )


def allgather(value: Any, name: str | None = None) -> Tensor:
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
    return hvd.allgather(keras.ops.convert_to_tensor(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Tensor:
    """The root's value, on every rank.

    Args:
        value: a number, an array or a tensor; of the same shape and dtype on every rank.
        root_rank: world rank of the sender.
        name: matches the calls of the ranks.

    Raises:
        RankMismatchError: shapes or dtypes differ between ranks.
        HorovodInternalError: a rank was lost.

    Example::

        start = hvd.broadcast(start, root_rank=0)
    """
    return hvd.broadcast(keras.ops.convert_to_tensor(value), root_rank, name=name)


def reducescatter(value: Any, name: str | None = None, op: int = ReduceOp.Average) -> Tensor:
    """Reduce a value over the ranks, and keep this rank's part of its rows.

    Args:
        value: an array or a tensor; of the same shape and dtype on every rank.
        name: matches the calls of the ranks.
        op: Average (default) or another reduction.

    Raises:
        RankMismatchError: shapes or dtypes differ between ranks.
        HorovodInternalError: a rank was lost.

    Example::

        my_rows = hvd.reducescatter(table, op=hvd.Sum)
    """
    return hvd.reducescatter(keras.ops.convert_to_tensor(value), name=name, op=op)


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> None:
    """Overwrite variables with the root's.

    Args:
        variables: of Keras, in the same order on every rank.
        root_rank: world rank of the sender.
        process_set: the ranks that take part.
        inplace: accepted for Horovod's sake; variables are always overwritten.

    Raises:
        RankMismatchError: shapes or dtypes differ between ranks.
        HorovodInternalError: a rank was lost.

    Example::

        hvd.broadcast_variables(model.variables, root_rank=0)
    """
    values = [(str(i), variable.value.detach()) for i, variable in enumerate(variables)]
    hvd.broadcast_parameters(values, root_rank, process_set)


def broadcast_global_variables(root_rank: int) -> None:
    """Refuse: there are no global variables but in graphs of tf.compat.v1.

    Args:
        root_rank: world rank of the sender.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        "broadcast_global_variables() needs a graph of tf.compat.v1; use "
        "broadcast_variables(model.variables, root_rank), or BroadcastGlobalVariablesCallback"
    )


class _OnTheHost:
    def _accept_device(self, device: str) -> None:
        accept_device(type(self).__name__, device=device)

    def _reference(self, variable: Any) -> Any:
        return id(variable)


class BroadcastGlobalVariables(_OnTheHost, keras_callbacks.BroadcastGlobalVariables):  # noqa: D101
    __doc__ = keras_callbacks.BroadcastGlobalVariables.__doc__

    def _send(self, variables: Sequence[Any]) -> None:
        broadcast_variables(variables, self.root_rank)


class MetricAverage(_OnTheHost, keras_callbacks.MetricAverage):  # noqa: D101
    __doc__ = keras_callbacks.MetricAverage.__doc__
