"""The loss that an optimizer's closure returns: the same on all ranks, so all make the same decisions."""

from __future__ import annotations

import numbers
from typing import Any

import torch
from polyhvd.torch.derivatives import simple

from polyhvd.collectives.adapter import ReduceOp
from polyhvd.collectives.process_sets import ProcessSet

__all__ = ["joint_loss"]

Tensor = torch.Tensor


def joint_loss(loss: Any, *, name: str, op: int, process_set: ProcessSet) -> Any:
    """The loss whose gradient the ranks' gradients make together; its value has the same bits on every rank.

    A rank without a loss counts as one whose loss is zero, as its gradients do.

    Args:
        loss: of this rank: a tensor of one element, a number, or None.
        name: of the operation; every rank of the set takes part in it.
        op: of the gradients. With Sum losses are added up, else averaged.
        process_set: the ranks that take part.

    Returns:
        A number for a number, otherwise a tensor of float32, or of float64 where all losses are; None where
        no rank has a loss. Other values, such as a tensor of several elements, are returned unchanged.
    """
    value, is_wide = _value(loss)
    parts = torch.tensor([value or 0.0, value is not None, is_wide], dtype=torch.float64)
    simple.allreduce_(parts, name=name, op=ReduceOp.Sum, process_set=process_set)
    total, present, wide = parts.tolist()
    if present == 0 or (value is None and loss is not None):
        return loss
    dtype = torch.float64 if wide == present else torch.float32
    total = total if op == ReduceOp.Sum else total / process_set.size()
    joint = torch.tensor(total, dtype=torch.float64).to(dtype)
    if loss is None:
        return joint
    if not isinstance(loss, Tensor):
        return float(joint)
    return torch.full_like(loss, float(joint), dtype=dtype, requires_grad=False)


def _value(loss: Any) -> tuple[float | None, bool]:
    """A loss as a number, None if it is none, and whether its type has more bits than float32."""
    if isinstance(loss, Tensor):
        if loss.numel() != 1 or loss.is_complex():
            return None, False
        return float(loss.detach()), loss.dtype == torch.float64
    if isinstance(loss, numbers.Real):
        return float(loss), True
    return None, False
