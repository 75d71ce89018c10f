"""How the gradients of collectives are scaled: as in Horovod, or as the exact adjoints.

A gradient is made of a sum or of a gathering of the ranks' gradients; this file has the factors.
"""

from __future__ import annotations

from collections.abc import Sequence

from polyhvd.collectives.adapter import OpKind, ReduceOp
from polyhvd.errors import InvalidArgumentError
from polyhvd.runtime import current

__all__ = ["gradient_factor", "rows_before", "rows_kept"]


def gradient_factor(kind: int, size: int, exact: bool | None, op: int = ReduceOp.Sum) -> float:
    """The factor of the sum, or for a reducescatter of the concatenation, of the ranks' gradients.

    The exact adjoint is the derivative of the sum of all ranks' losses. Horovod divides it by ``size`` for
    allgather and broadcast, and multiplies it by ``size`` for reducescatter.

    Args:
        kind: an :class:`OpKind`: ALLGATHER, BROADCAST or REDUCESCATTER.
        size: number of ranks in the process set.
        exact: whether to use the exact adjoint; None: the value of POLYHVD_EXACT_GRADIENTS.
        op: of a reducescatter, Average or Sum.
    """
    if exact is None:
        exact = current.world().settings.exact_gradients
    if kind == OpKind.REDUCESCATTER:
        if op == ReduceOp.Average:
            return 1.0 / size if exact else 1.0
        return 1.0 if exact else float(size)
    return 1.0 if exact else 1.0 / size


def rows_kept(rows: int, size: int) -> list[int]:
    """Rows of each member after a reducescatter of so many: the first ones get one more if need be."""
    return [rows // size + (position < rows % size) for position in range(size)]


def rows_before(
    reported: Sequence[Sequence[int]], position: int, size: int, totals: Sequence[int], name: str
) -> list[int]:
    """Return for each tensor of an allgather the number of rows that precede those of one member.

    Ranks may have joined since the forward pass; their rows are then among the others, and not reported.

    Args:
        reported: for each member that still takes part its position, then its rows of each tensor.
        position: of the member.
        size: number of members.
        totals: rows of each result of the forward pass.
        name: of the operation, for the error.

    Raises:
        InvalidArgumentError: the positions of rows are unknown; on every member.
    """
    before = [0] * len(totals)
    missing = list(totals)
    for other, *rows in reported:
        for i, count in enumerate(rows):
            missing[i] -= count
            before[i] += count if other < position else 0
    joined = sorted(set(range(size)) - {other for other, *_ in reported})
    if not joined or not any(missing):
        return before
    if joined[-1] - joined[0] + 1 != len(joined):  # members between them would not know where they begin
        raise InvalidArgumentError(
            f"allgather {name!r}: ranks have joined between it and its gradient, of those at "
            f"{joined} in the process set, so the ranks of the rows are unknown; call join() after backward()"
        )
    return [b + m if joined[0] < position else b for b, m in zip(before, missing, strict=True)]
