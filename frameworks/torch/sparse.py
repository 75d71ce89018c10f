"""Allreduce of sparse (COO) tensors: the nonzeros of all ranks are gathered, and duplicates merged.

They are sent as described in polyhvd.collectives.sparse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from polyhvd.torch.base import Compression, collectives, synchronize

from polyhvd.collectives.adapter import Handle, ReduceOp
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.collectives.sparse import check_shapes
from polyhvd.collectives.verbs import resolve_op
from polyhvd.errors import UnsupportedError
from polyhvd.training.compression import Compressor

__all__ = ["check_sparse_op", "sparse_allreduce_async", "start_sparse_allreduce"]

Tensor = torch.Tensor
_HALF = (torch.float16, torch.bfloat16)


class _SparseHandle:
    """A :class:`Handle`. Can be called, as Horovod's, for what ``synchronize`` returns."""

    finish: Callable[[Any], Any] | None = (
        None  # wait() makes the result, so that an error of its is raised at each call
    )

    def __init__(self, gathering: Any, merge: Callable[[list[Tensor]], Tensor]) -> None:
        self.name = gathering.name
        self.result: Any = None
        self.slot, gathering.slot = gathering.slot, None
        self._gathering = gathering
        self._merge = merge

    def done(self) -> bool:
        return bool(self._gathering.done())

    def wait(self) -> None:
        self._gathering.wait()
        if self.result is None:
            self.result = self._merge(self._gathering.finish(self._gathering))

    def __call__(self) -> Tensor:
        result: Tensor = synchronize(self)
        return result


def check_sparse_op(op: int) -> None:
    """Raise UnsupportedError for reductions that need the elements that are absent."""
    if op not in (ReduceOp.Average, ReduceOp.Sum):
        raise UnsupportedError(
            f"op={ReduceOp(op).name}: sparse tensors can be reduced only with Average and Sum; use one of "
            "them, or make the tensor dense"
        )


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start the reduction of a sparse tensor; ``synchronize(handle)`` returns a new, coalesced one.

    What it costs follows the number of nonzeros of all ranks, not the shape.

    Args:
        tensor: of layout ``torch.sparse_coo``; shape, dtype and sparse dimensions as on the other ranks, any
            number of nonzeros.
        name: matches the calls of the ranks; without one the order in which they are submitted does.
        op: Average or Sum.
        process_set: the ranks that take part.

    Raises:
        InvalidArgumentError, RankMismatchError, HorovodInternalError: as :func:`allreduce`.
        TypeError: the tensor is not sparse.

    Example::

        handle = hvd.sparse_allreduce_async(embedding.weight.grad, "embedding", hvd.Average)
        embedding.weight.grad = hvd.synchronize(handle)
    """
    return start_sparse_allreduce(tensor, name=name, op=resolve_op(op), process_set=process_set)


def start_sparse_allreduce(
    tensor: Tensor,
    *,
    name: str | None,
    op: int,
    process_set: ProcessSet,
    compression: Compressor = Compression.none,
    priority: int = 0,
) -> Handle:
    """:func:`sparse_allreduce_async` with values that travel compressed.

    Args:
        tensor, name, op, process_set: as there.
        compression: of the values, without state.
        priority: higher ones go first.

    Raises:
        InvalidArgumentError, RankMismatchError, HorovodInternalError, TypeError: as there.
    """
    check_sparse_op(op)
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.sparse_coo:
        found = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"sparse_allreduce {name!r}: expected a tensor of torch.sparse_coo, found {found}")
    own = tensor.detach().coalesce()
    shape = torch.tensor([[own.sparse_dim(), *own.shape]])
    values, context = compression.compress(own.values())
    gathering: Any = collectives.grouped_allgather_async(
        (own.indices().t().contiguous(), values, shape), name=name, process_set=process_set, priority=priority
    )
    divisor = process_set.size() if op == ReduceOp.Average else 1

    def merge(gathered: list[Tensor]) -> Tensor:
        indices, values, shapes = gathered
        check_shapes(gathering.name, shapes.tolist())
        values = compression.decompress(values, context)
        return _merged(indices.t(), values, own.shape, divisor)

    return _SparseHandle(gathering, merge)


def _merged(indices: Tensor, values: Tensor, shape: torch.Size, divisor: int) -> Tensor:
    dtype = values.dtype
    if dtype in _HALF:  # many terms of one row are to be rounded once
        values = values.float()
    # Indices of other ranks are not to be trusted with memory.
    total = torch.sparse_coo_tensor(indices, values, shape, check_invariants=True).coalesce()
    if divisor != 1:
        total.values().div_(divisor, rounding_mode=None if values.is_floating_point() else "trunc")
    return total.to(dtype)
