"""Allreduce of row_sparse arrays: sums by polyhvd.collectives.sparse, as in other frameworks.

Other reductions need the zeros that a rank has in rows of others: the rows that any rank has are reduced as a
dense array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray
from mxnet.ndarray.sparse import RowSparseNDArray
from polyhvd.mxnet.errors import RankMismatchError, as_mxnets
from polyhvd.mxnet.names import derived, unnamed

from polyhvd import _core
from polyhvd.collectives.adapter import Handle, OpKind, ReduceOp
from polyhvd.collectives.process_sets import ProcessSet
from polyhvd.collectives.sparse import check_shapes, merged
from polyhvd.collectives.verbs import Collectives, process_set_id
from polyhvd.runtime import current
from polyhvd.training.compression import NO_COMPRESSION, Compressor

__all__ = ["SUMS", "allreduce_async", "collect", "spread", "start_sum"]

#: Reductions to which rows that a rank does not have add nothing.
SUMS = (ReduceOp.Average, ReduceOp.Sum)
_BFLOAT16 = np.dtype([("bfloat16", np.uint16)])  # as MXNet spells it


class _Sum:
    """A :class:`Handle` of a sum, which is made by whoever waits for it."""

    finish: Callable[[Any], Any] | None = None

    def __init__(self, gathering: Any, merge: Callable[[Any], RowSparseNDArray]) -> None:
        self.name = gathering.name
        self.result: Any = None
        self.slot: Any = None
        self._gathering = gathering
        self._merge = merge

    def done(self) -> bool:
        return bool(self._gathering.done())

    def wait(self) -> None:
        with as_mxnets():
            self._gathering.wait()
            if self.result is None:
                self.result = self._merge(self._gathering.buffers())


def start_sum(
    tensor: RowSparseNDArray,
    *,
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    priority: int,
    compression: Compressor = NO_COMPRESSION,
) -> Handle[RowSparseNDArray]:
    """Start the sum or the average of a row_sparse array; waits until it is computed, and for no rank.

    Args:
        tensor: of any shape and dtype, and any rows.
        name, op, prescale_factor, postscale_factor, process_set, priority: as of
            :meth:`Collectives.allreduce_async`; ``op`` is one of :data:`SUMS`.
        compression: of the values on the wire, without state.

    Returns:
        A handle whose ``wait()`` makes the result, a new array, and raises RankMismatchError where the ranks'
        arrays have different shapes.
    """
    with mx.autograd.pause():
        indices = tensor.indices.asnumpy()
        sent, context = compression.compress(tensor.data) if indices.size else (None, None)
    values = np.empty((0, *tensor.shape[1:]), _wire_dtype(tensor, compression))
    if sent is not None:
        values = sent.asnumpy()
    set_id = process_set_id(process_set)
    own = np.array([[1, *tensor.shape]], np.int64)
    with as_mxnets():
        gathering: Any = current.world().engine.submit(
            OpKind.ALLGATHER,
            name,
            (indices.reshape(-1, 1), _readable(values), own),
            None,
            process_set=set_id,
            priority=priority,
        )
    factor = prescale_factor * postscale_factor / (process_set.size() if op == ReduceOp.Average else 1)

    def merge(buffers: Any) -> RowSparseNDArray:
        places, numbers, shapes = (memoryview(buffer) for buffer in buffers)
        check_shapes(gathering.name, np.frombuffer(shapes, np.int64).reshape(-1, own.size).tolist())
        found = np.frombuffer(numbers, values.dtype).reshape(-1, *tensor.shape[1:])
        if values.dtype != tensor.dtype and found.size:
            decompressed = compression.decompress(mx.nd.array(found, dtype=found.dtype), context)
            found = decompressed.asnumpy()
        rows, sums = merged(np.frombuffer(places, np.int64), found, factor)
        return collect(rows, sums, tensor)

    return _Sum(gathering, merge)


def _wire_dtype(tensor: RowSparseNDArray, compression: Compressor) -> Any:
    """Return the dtype of the values that are sent, also for a rank that does not have any."""
    if compression is NO_COMPRESSION:
        return tensor.dtype
    sent, _ = compression.compress(mx.nd.zeros((1,), dtype=tensor.dtype))
    return sent.dtype


def _readable(values: np.ndarray[Any, Any]) -> Any:
    """An array as the core reads it, which does not know how MXNet spells bfloat16."""
    if values.dtype != _BFLOAT16:
        return values
    return _core.TensorRef(values.ctypes.data, values.shape, "bfloat16", values)


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
    """The error of the operation; waits for it."""
    try:
        handle.wait()
    except Exception as error:
        return error
    return None


def spread(
    tensors: Mapping[str, RowSparseNDArray], process_set: ProcessSet
) -> list[tuple[np.ndarray[Any, Any], NDArray]]:
    """Return for each array sorted indices of the rows that any rank has, and this rank's values there.

    Values are zero where the rank has no row. When no rank has any, there are no indices, and one row of
    zeros all the same, since MXNet has no arrays without rows. Waits until the arrays are computed and all
    ranks have sent their indices, which are gathered together.

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
    gathered = _gather(tensors, parts, process_set)
    unions = [_union(name, numbers) for name, numbers in zip(tensors, gathered, strict=True)]
    return [
        (indices, _values(tensor, rows, indices))
        for tensor, rows, indices in zip(tensors.values(), own, unions, strict=True)
    ]


def _union(name: str, gathered: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    heights = [-1 - int(number) for number in gathered[gathered < 0]]
    if len(set(heights)) > 1:
        raise RankMismatchError(
            f"Mismatched allreduce tensor shapes: allreduce '{name}': the ranks' row_sparse arrays have "
            f"{heights} rows, in order of rank; give them the same shape"
        )
    return np.unique(gathered[gathered >= 0])


def _values(tensor: RowSparseNDArray, own: np.ndarray[Any, Any], indices: np.ndarray[Any, Any]) -> NDArray:
    """The array's rows at these indices, of which ``own`` are those that it has."""
    shape = (max(indices.size, 1), *tensor.shape[1:])
    if not own.size:
        return mx.nd.zeros(shape, dtype=tensor.dtype, ctx=tensor.ctx)
    places = mx.nd.array(np.searchsorted(indices, own)[None], dtype=np.int64, ctx=tensor.ctx)
    return mx.nd.scatter_nd(tensor.data, places, shape=shape)


def collect(indices: np.ndarray[Any, Any], values: Any, like: RowSparseNDArray) -> RowSparseNDArray:
    """The array with these rows; waits for the values."""
    options = {"dtype": like.dtype, "ctx": like.ctx}
    if not indices.size:
        return mx.nd.sparse.zeros("row_sparse", like.shape, **options)
    return mx.nd.sparse.row_sparse_array((values, indices), shape=like.shape, **options)


def allreduce_async(
    collectives: Collectives[NDArray], tensor: RowSparseNDArray, in_place: bool, arguments: dict[str, Any]
) -> Handle:
    """Start the allreduce of a row_sparse array; ``arguments`` as of :meth:`Collectives.allreduce_async`."""
    if arguments["op"] in SUMS:
        started: Any = start_sum(tensor, **arguments)
        # As a group's, it is handed on as it is; and as it has this, calls without a handle wait for it.
        started.slot = _unchanged
        started.finish = lambda sums: sums.result.copyto(tensor) if in_place else sums.result
        return started
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


def _unchanged(result: Any) -> Any:
    return result
