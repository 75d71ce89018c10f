"""Batch normalization over the batches of all ranks, for Keras on PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from polyhvd.torch.derivatives import allreduce_group

from polyhvd.collectives.adapter import ReduceOp
from polyhvd.collectives.process_sets import ProcessSet
from polyhvd.training.batch_norm import BatchArrays, BatchNormProtocol
from polyhvd.training.keras.batch_norm import SynchronizedNormalization

__all__ = ["sync_batch_normalization"]

Tensor = torch.Tensor
_protocol = BatchNormProtocol(BatchArrays(lambda x: x.sum(0), lambda x: x.clamp(min=1)))


def moments(x: Tensor, axes: Sequence[int], mask: Tensor | None, process_set: ProcessSet) -> tuple[Any, Any]:
    """Mean and variance over some axes of all ranks' tensors together, with those axes kept.

    Combined as in :mod:`polyhvd.training.batch_norm`. One operation, and one for the gradient, which autograd
    makes.

    Args:
        x: float32 or float64; other axes than ``axes`` are equal on all ranks. It may have no elements.
        axes: which to reduce.
        mask: bool, of the shape of ``x``: what counts; None: everything.
        process_set: the ranks that take part.
    """
    axes = list(axes)
    counted = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
    count = counted.sum(axes, keepdim=True).double()
    shift = torch.where(counted, x.detach(), 0.0).sum(axes, keepdim=True) / count.clamp(min=1).to(x.dtype)
    deviations = torch.where(counted, x - shift, 0.0)
    sums, squares = (part.sum(axes, keepdim=True).double() for part in (deviations, deviations.square()))
    own = torch.stack((count, *_protocol.corrected(count, shift.double(), sums, squares)))
    # Every rank's row in a table of zeros: a sum has one operation as its gradient, a gathering two.
    rows = [torch.zeros_like(own)] * process_set.size()
    rows[process_set.rank()] = own
    (table,) = allreduce_group(
        [torch.stack(rows)],
        name=None,
        op=ReduceOp.Sum,
        prescale_factor=1.0,
        postscale_factor=1.0,
        process_set=process_set,
    )
    joined = _protocol.joined(table)
    return joined.mean.to(x.dtype), joined.variance.to(x.dtype)


class _Synchronized(SynchronizedNormalization):
    _reduction_axes: Sequence[int]

    def _moments(self, inputs: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        if mask is not None:
            mask = mask.bool()[..., None].expand(inputs.shape)
        wide = inputs.float() if inputs.element_size() < torch.float32.itemsize else inputs
        mean, variance = moments(wide, self._reduction_axes, mask, self._polyhvd_members())
        rest = [n for axis, n in enumerate(inputs.shape) if axis not in self._reduction_axes]
        return mean.to(inputs.dtype).reshape(rest), variance.to(inputs.dtype).reshape(rest)


@functools.cache
def sync_batch_normalization(keras: Any) -> type:
    """``SyncBatchNormalization`` of Keras."""
    names = {"__doc__": SynchronizedNormalization.__doc__, "__module__": __name__}
    layer = type("SyncBatchNormalization", (_Synchronized, keras.layers.BatchNormalization), names)
    registered: type = keras.utils.register_keras_serializable(package="polyhvd")(layer)
    return registered
