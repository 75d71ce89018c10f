"""Allreduce of row_sparse arrays: the rows that any rank has, reduced as a dense array."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray
from mxnet.ndarray.sparse import RowSparseNDArray
from polyhvd.mxnet.errors import RankMismatchError
from polyhvd.mxnet.names import derived, unnamed

from polyhvd import context
from polyhvd.adapter import Handle, OpKind
from polyhvd.api import Collectives, process_set_id
from polyhvd.process_sets import ProcessSet

__all__ = ["allreduce_async", "collect", "spread"]


def _gather(name: str, numbers: np.ndarray[Any, Any], process_set: ProcessSet) -> np.ndarray[Any, Any]:
    handle = context.engine().submit(
        OpKind.ALLGATHER,
        derived(name, "indices"),
        (numbers,),
        None,
        process_set=process_set_id(process_set),
        blocking=True,
    )
    handle.wait()
    gathered: np.ndarray[Any, Any] = np.frombuffer(handle.buffers()[0], dtype=np.int64)
    return gathered


def spread(
    name: str, tensor: RowSparseNDArray, process_set: ProcessSet
) -> tuple[np.ndarray[Any, Any], NDArray]:
    """Sorted indices of the rows that any rank has, and this rank's values there, zero where it has none.

    Waits until the array is computed and all ranks have told their indices. When no rank has a row,
    there are no indices, and one row of zeros all the same, since MXNet has no arrays without any.

    Raises:
        RankMismatchError: the ranks' arrays differ in the number of rows.
    """
    own = tensor.indices.asnumpy()
    # What begins a rank's part is negative, as no index is.
    told = _gather(name, np.concatenate(([-1 - tensor.shape[0]], own)), process_set)
    heights = [-1 - int(number) for number in told if number < 0]
    if len(set(heights)) > 1:
        raise RankMismatchError(
            f"Mismatched allreduce tensor shapes: allreduce '{name}': the ranks' row_sparse arrays have "
            f"{heights} rows, in order of rank; give them the same shape"
        )
    indices = np.unique(told[told >= 0])
    values = mx.nd.zeros((max(indices.size, 1), *tensor.shape[1:]), dtype=tensor.dtype, ctx=tensor.ctx)
    if own.size:
        values[mx.nd.array(np.searchsorted(indices, own), dtype=np.int64)] = tensor.data
    return indices, values


def collect(indices: np.ndarray[Any, Any], values: NDArray, like: RowSparseNDArray) -> RowSparseNDArray:
    """The array with these rows; waits for the values."""
    options = {"dtype": like.dtype, "ctx": like.ctx}
    if not indices.size:
        return mx.nd.sparse.zeros("row_sparse", like.shape, **options)
    return mx.nd.sparse.row_sparse_array((values, indices), shape=like.shape, **options)


def allreduce_async(
    collectives: Collectives[NDArray], tensor: RowSparseNDArray, in_place: bool, arguments: dict[str, Any]
) -> Handle:
    """Start the allreduce of a row_sparse array; ``arguments`` as of :meth:`Collectives.allreduce_async`."""
    if arguments["name"] is None:
        set_id = process_set_id(arguments["process_set"])
        arguments = {**arguments, "name": unnamed(OpKind.ALLREDUCE, set_id)}
    with mx.autograd.pause():
        indices, values = spread(arguments["name"], tensor, arguments["process_set"])
    # A group of one, since what finish() makes is then handed on as it is.
    handle = collectives.grouped_allreduce_async([values], in_place=True, **arguments)

    def finish(_: Handle) -> RowSparseNDArray:
        result = collect(indices, values, tensor)
        return result.copyto(tensor) if in_place else result

    handle.finish = finish
    return handle
