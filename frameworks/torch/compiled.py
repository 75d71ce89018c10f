"""The collectives inside of torch.compile: what Dynamo traces, and puts into its graph as operators.

The operators are in polyhvd.torch.library. They run in the order of the program, and take their names
when they run, as all others do: ranks may compile at different times, again, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from polyhvd.collectives.process_sets import ProcessSet

__all__ = [
    "AVAILABLE",
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "is_compiling",
    "overwritten",
    "reducescatter",
]

Tensor = torch.Tensor

#: Before torch 2.4 operators cannot be given what a graph needs to know of them; compiled programs then
#: have a break at each collective.
AVAILABLE = hasattr(torch.library, "register_autograd") and hasattr(torch.compiler, "is_dynamo_compiling")


def _never() -> bool:
    return False


#: Whether this code is traced by Dynamo; it costs the others no more than a call.
is_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling if AVAILABLE else _never

_ops: Any = torch.ops.polyhvd


def allreduce(tensors: Sequence[Tensor], **arguments: Any) -> list[Tensor]:
    """``Collectives.grouped_allreduce`` with all its arguments named."""
    results: list[Tensor] = _ops.allreduce(list(tensors), *_reduction(**arguments))
    return results


def reducescatter(tensors: Sequence[Tensor], exact_gradient: bool | None, **arguments: Any) -> list[Tensor]:
    """``Collectives.grouped_reducescatter`` with all its arguments named."""
    process_set = arguments["process_set"]
    size, rank = process_set.size(), process_set.rank()
    # The first ranks get one row more; without a comparison, which sizes that are not known do not allow.
    rows = [(t.shape[0] + size - 1 - rank) // size for t in tensors]
    results: list[Tensor] = _ops.reducescatter(list(tensors), rows, *_reduction(**arguments), exact_gradient)
    return results


def allgather(
    tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, exact_gradient: bool | None
) -> list[Tensor]:
    """``Collectives.grouped_allgather``; the number of rows is known when it has run."""
    number = process_set.process_set_id
    results: list[Tensor] = _ops.allgather(list(tensors), name, number, exact_gradient)
    return results


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    exact_gradient: bool | None,
) -> Tensor:
    """``Collectives.broadcast``."""
    number = process_set.process_set_id
    result: Tensor = _ops.broadcast(tensor, root_rank, name, number, exact_gradient)
    return result


def alltoall(tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
    """``Collectives.alltoall``; the number of rows is known when it has run."""
    parts = splits
    if splits is not None and not isinstance(splits, Tensor):
        parts = torch.tensor(splits)
    output, received = _ops.alltoall(tensor, parts, process_set.size(), name, process_set.process_set_id)
    return output if splits is None else (output, received)


def overwritten(targets: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
    """The targets, with other values, as the forms in place have it."""
    with torch.no_grad():
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)
    return list(targets)


def _reduction(
    name: str | None, op: int, prescale_factor: float, postscale_factor: float, process_set: ProcessSet
) -> tuple[Any, ...]:
    number = process_set.process_set_id
    return name, int(op), float(prescale_factor), float(postscale_factor), number
