"""What moves tensors, and join, with Horovod's signatures. What they mean stands in collectives.verbs.

Forms that return new tensors are differentiable. Asynchronous and in-place forms are not: their results
are unknown to autograd.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from polyhvd.torch.adapter import check
from polyhvd.torch.base import as_tensor, collectives, increment_version, synchronize
from polyhvd.torch.compiled import is_compiling, overwritten
from polyhvd.torch.derivatives import allgather_group, alltoall_parts, broadcast_one, wants_gradient

from polyhvd.collectives import membership
from polyhvd.collectives.adapter import Handle
from polyhvd.collectives.process_sets import ProcessSet, global_process_set

__all__ = [
    "allgather",
    "allgather_async",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "join",
]

Tensor = torch.Tensor


def allgather(
    tensor: Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    exact_gradient: bool | None = None,
) -> Tensor:
    """Concatenate the ranks' tensors; see :meth:`Collectives.allgather`. Differentiable.

    Args:
        exact_gradient: True: the gradient is that of the sum of all ranks' losses; False: divided by the
            number of ranks, as in Horovod; None: as ``POLYHVD_EXACT_GRADIENTS`` says, which is False by
            default. The same on every rank.
    """
    if not (is_compiling() or wants_gradient(tensor)):
        return collectives.allgather(tensor, name=name, process_set=process_set)
    (result,) = allgather_group((tensor,), name=name, process_set=process_set, exact_gradient=exact_gradient)
    return result


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start :func:`allgather`, without gradient."""
    return collectives.allgather_async(tensor, name=name, process_set=process_set)


def grouped_allgather(
    tensors: Iterable[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    exact_gradient: bool | None = None,
) -> list[Tensor]:
    """Gather several tensors, of any dtypes, as one operation: all or none. Differentiable.

    ``exact_gradient``: as for :func:`allgather`.
    """
    return allgather_group(list(tensors), name=name, process_set=process_set, exact_gradient=exact_gradient)


def grouped_allgather_async(
    tensors: Iterable[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start :func:`grouped_allgather`, without gradient."""
    return collectives.grouped_allgather_async(list(tensors), name=name, process_set=process_set)


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    exact_gradient: bool | None = None,
) -> Tensor:
    """Return the root's tensor as a new one; see :meth:`Collectives.broadcast`.

    Differentiable: pass tensors that require gradients on every rank, or on none. ``exact_gradient``: as for
    :func:`allgather`.
    """
    return broadcast_one(
        as_tensor(tensor), root_rank, name=name, process_set=process_set, exact_gradient=exact_gradient
    )


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Overwrite a tensor with the root's."""
    if is_compiling():
        return overwritten([tensor], [broadcast(tensor.detach(), root_rank, name, process_set)])[0]
    check(tensor)
    if tensor.is_neg():
        synchronize(broadcast_async_(tensor, root_rank, name, process_set))
        return tensor
    result = collectives.broadcast(tensor, root_rank, name=name, process_set=process_set, in_place=True)
    increment_version(tensor)
    return result


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`broadcast`, without gradient."""
    return collectives.broadcast_async(as_tensor(tensor), root_rank, name=name, process_set=process_set)


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`broadcast_`; leave the tensor alone until ``synchronize(handle)``."""
    handle = collectives.broadcast_async(tensor, root_rank, name=name, process_set=process_set, in_place=True)
    increment_version(tensor)
    return handle


def alltoall(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Exchange rows with all ranks; see :meth:`Collectives.alltoall`. Differentiable."""
    return alltoall_parts(tensor, splits, name=name, process_set=process_set)


def alltoall_async(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`alltoall`, without gradient.

    ``synchronize(handle)`` returns the rows and how many came from each rank, also where ``splits`` is None.
    """
    return collectives.alltoall_async(tensor, splits, name=name, process_set=process_set)


def join(device: int = -1) -> int:
    """Say that this rank has run out of data; see :func:`polyhvd.collectives.membership.join`.

    Args:
        device: does not matter: what stands in for this rank's tensors lies where the others' do, on a GPU
            on the one that this rank has used.

    Returns:
        The rank that joined last: it has seen the most data.
    """
    return membership.join()
