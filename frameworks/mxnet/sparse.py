"""Allreduce of row_sparse arrays: the rows that any rank has, reduced as a dense array."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray
from mxnet.ndarray.sparse import RowSparseNDArray
from polyhvd.mxnet.errors import RankMismatchError, as_mxnets
from polyhvd.mxnet.names import derived, unnamed

from polyhvd.collectives.adapter import Handle, OpKind
from polyhvd.collectives.process_sets import ProcessSet
from polyhvd.collectives.verbs import Collectives, process_set_id
from polyhvd.runtime import current

__all__ = ["allreduce_async", "collect", "spread"]


def _gather(
    names: Iterable[str], numbers: Iterable[np.ndarray[Any, Any]], process_set: ProcessSet
) -> list[np.ndarray[Any, Any]]:
    """All ranks' numbers, for each name; all of them travel together."""
    engine = current.world().engine
    with as_mxnets():
        handles = [
            engine.submit(
                OpKind.ALLGATHER,
                derived(name, "indices"),
                (own,),
                None,
                process_set=process_set_id(process_set),
                blocking=True,
            )
            for name, own in zip(names, numbers, strict=True)
        ]
        errors = [error for error in map(_failure, handles) if error is not None]
        if errors:
            raise errors[0]
    return [np.frombuffer(memoryview(handle.buffers()[0]), dtype=np.int64) for handle in handles]


def _failure(handle: Any) -> Exception | None:
    """What the operation fails with; waits for it."""
    try:
        handle.wait()
    except Exception as error:
        return error
    return None


def spread(
    tensors: Mapping[str, RowSparseNDArray], process_set: ProcessSet
) -> list[tuple[np.ndarray[Any, Any], NDArray]]:
    """For each array, sorted indices of the rows that any rank has, and this rank's values there.

    Values are zero where the rank has no row. When no rank has any, there are no indices, and one row of
    zeros all the same, since MXNet has no arrays without rows. Waits until the arrays are computed and all
    ranks have told their indices, which travel together.

    Args:
        tensors: by their names in the collectives; each of any shape and dtype.

    Raises:
        RankMismatchError: the ranks' arrays differ in the number of rows.
    """
    own = [tensor.indices.asnumpy() for tensor in tensors.values()]
    # What begins a rank's part is negative, as no index is.
    parts = [
        np.concatenate(([-1 - tensor.shape[0]], rows))
        for tensor, rows in zip(tensors.values(), own, strict=True)
    ]
    told = _gather(tensors, parts, process_set)
    unions = [_union(name, numbers) for name, numbers in zip(tensors, told, strict=True)]
    return [
        (indices, _values(tensor, rows, indices))
        for tensor, rows, indices in zip(tensors.values(), own, unions, strict=True)
    ]


def _union(name: str, told: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    heights = [-1 - int(number) for number in told[told < 0]]
    if len(set(heights)) > 1:
        raise RankMismatchError(
            f"Mismatched allreduce tensor shapes: allreduce '{name}': the ranks' row_sparse arrays have "
            f"{heights} rows, in order of rank; give them the same shape"
        )
    return np.unique(told[told >= 0])


def _values(tensor: RowSparseNDArray, own: np.ndarray[Any, Any], indices: np.ndarray[Any, Any]) -> NDArray:
    """The array's rows at these indices, of which ``own`` are those that it has."""
    shape = (max(indices.size, 1), *tensor.shape[1:])
    if not own.size:
        return mx.nd.zeros(shape, dtype=tensor.dtype, ctx=tensor.ctx)
    places = mx.nd.array(np.searchsorted(indices, own)[None], dtype=np.int64, ctx=tensor.ctx)
    return mx.nd.scatter_nd(tensor.data, places, shape=shape)


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
        ((indices, values),) = spread({arguments["name"]: tensor}, arguments["process_set"])
    # A group of one, since what finish() makes is then handed on as it is.
    handle = collectives.grouped_allreduce_async([values], in_place=True, **arguments)

    def finish(_: Handle) -> RowSparseNDArray:
        result = collect(indices, values, tensor)
        return result.copyto(tensor) if in_place else result

    handle.finish = finish
    return handle
