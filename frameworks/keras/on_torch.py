"""The parts of polyhvd.keras with Keras on PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import torch
from polyhvd.keras.batch_norm import sync_batch_normalization
from polyhvd.keras.optimizer import accept_device, distribute
from polyhvd.torch import Compression, join
from polyhvd.torch import data as torch_data
from torch.utils.data import DataLoader, IterableDataset

from polyhvd import allgather_object, barrier, broadcast_object
from polyhvd import torch as hvd
from polyhvd.collectives.adapter import ReduceOp
from polyhvd.collectives.operation import process_set_id
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.data.batches import mapped
from polyhvd.data.loader import Loader
from polyhvd.runtime import current
from polyhvd.training.compression import Compressor
from polyhvd.training.keras import callbacks as keras_callbacks
from polyhvd.training.naming import NUMBER_ADVICE, ORDER_ADVICE, require_same_order
from polyhvd.training.options import Options

__all__ = [
    "Batches",
    "BroadcastGlobalVariables",
    "Compression",
    "MetricAverage",
    "Options",
    "allgather",
    "allgather_object",
    "allreduce",
    "as_polyhvd",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "distribute",
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
        inplace: accepted for compatibility with Horovod; variables are always overwritten.

    Raises:
        RankMismatchError: shapes or dtypes differ between ranks, or the order of equal names does.
        HorovodInternalError: a rank was lost.

    Example::

        hvd.broadcast_variables(model.variables, root_rank=0)
    """
    variables = list(variables)
    values = [(str(i), variable.value.detach()) for i, variable in enumerate(variables)]
    world, number, call = (
        process_set.world or current.world(),
        process_set_id(process_set),
        "broadcast_variables",
    )
    with world.line(call, number):
        paths = [variable.path for variable in variables]
        require_same_order(world, number, call, paths, ORDER_ADVICE, advice_on_number=NUMBER_ADVICE)
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


class Batches(torch_data.Batches):
    """Iterates over a loader, with batches of tensors; :meth:`dataset` is for ``fit``.

    The position is that of the loader, and a batch counts as with the loader: when the next one is asked
    for. ``hvd.elastic.train`` takes it as data.

    Args:
        loader: an :class:`polyhvd.data.ArrayLoader` or :class:`polyhvd.data.ParquetLoader`.
        x: the column of the inputs; several inputs are a tuple, a list or a dict of columns. A column is a
            name, or a number where the loader has a sequence of arrays. None: batches have all columns, in
            the form that the loader gives them. Else a batch is a sequence of x, y and sample_weight, as far
            as they are given.
        y: the column, or columns, of the targets.
        sample_weight: the column of the weights of rows.

    Raises:
        ValueError: an argument cannot be used; or, in the loop, a batch has no such column.

    Example::

        batches = Batches(loader, x="image", y="label")
        model.fit(batches.dataset(), epochs=10, callbacks=[hvd.callbacks.DataPositionCallback(loader)])
    """

    def __init__(self, loader: Loader, x: Any = None, y: Any = None, sample_weight: Any = None) -> None:
        super().__init__(loader, x, y, sample_weight)

    def dataset(self) -> Any:
        """A ``DataLoader`` of the steps that are left in the epoch, each time that it is gone through.

        Its elements are ``(x, y, sample_weight)``. The weights are those of the column, if there is one,
        times the weight of the batch, so that the average of gradients over ranks is exact; without y they
        are ``(x,)``. ``x`` and ``y`` may be left out if the loader has a sequence of two or three arrays.

        The position moves by ``advance()`` of the loader. In ``fit`` a ``DataPositionCallback`` calls it.

        Raises:
            ValueError: no columns are named, or there are no such columns.

        Example::

            model.fit(batches.dataset(), callbacks=[hvd.callbacks.DataPositionCallback(batches.loader)])
        """
        self._template()  # raises where fit() could not go on
        return DataLoader(_Elements(self), batch_size=None, collate_fn=_as_it_is)


class _Elements(IterableDataset[Any]):
    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return self._batches.loader.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches.loader._read_ahead():
            yield mapped(self._batches._tensor, self._batches._element(batch))


def _as_it_is(element: Any) -> Any:
    return element


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
