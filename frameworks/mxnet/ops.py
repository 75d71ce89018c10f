"""The collectives on MXNet arrays, with Horovod's signatures. What they mean stands in collectives.verbs.

Each verb is written once, as the form that returns a handle. The form without ``_async`` returns the
results themselves: MXNet's engine makes reads of them wait. Results in new arrays are known to
autograd; those of in-place forms are not.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray
from mxnet.ndarray.sparse import RowSparseNDArray
from polyhvd.mxnet import sparse
from polyhvd.mxnet.adapter import MxnetAdapter, MxnetCollectives
from polyhvd.mxnet.errors import InvalidArgumentError, UnsupportedError
from polyhvd.mxnet.native import Handle

from polyhvd.collectives import membership
from polyhvd.collectives.adapter import OpKind, ReduceOp
from polyhvd.collectives.operation import is_number
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.collectives.verbs import Collectives, process_set_id, resolve_op
from polyhvd.runtime import current
from polyhvd.training.compression import Compression as _Compression

__all__ = [
    "Compression",
    "adapter",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "collectives",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "synchronize",
]

P = ParamSpec("P")
_ALLREDUCE = OpKind.ALLREDUCE  # read once: an enum's member takes a look-up

adapter = MxnetAdapter()
collectives: Collectives[NDArray] = MxnetCollectives(adapter)
Compression = _Compression(adapter)

poll = collectives.poll
synchronize = collectives.synchronize


def _name(
    kind: OpKind, name: str | None, process_set: ProcessSet, root_rank: int | None = None
) -> str | None:
    """The operation's name, after the checks that MXNet's engine would otherwise make later."""
    current.world()
    if process_set is global_process_set and root_rank is None:
        return name
    process_set_id(process_set)
    about = f"{kind.name.lower()} '{name or 'without a name'}'"
    if process_set is not global_process_set and not process_set.included():
        raise InvalidArgumentError(
            f"{about}: rank {current.world().placement.rank} is not in {process_set}; call it on its "
            "members only"
        )
    ranks = process_set.ranks
    if root_rank is not None and not (
        0 <= root_rank < current.world().placement.size and (ranks is None or root_rank in ranks)
    ):
        raise InvalidArgumentError(f"{about}: root rank {root_rank} is not in {process_set}")
    return name


def _common(
    kind: OpKind, name: str | None, priority: int, process_set: ProcessSet, root_rank: int | None = None
) -> dict[str, Any]:
    """The arguments that every collective has."""
    return {
        "name": _name(kind, name, process_set, root_rank),
        "priority": priority,
        "process_set": process_set,
    }


def _reducing(
    kind: OpKind,
    name: str | None,
    priority: int,
    process_set: ProcessSet,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
) -> dict[str, Any]:
    """The arguments that every reduction has."""
    if kind == OpKind.REDUCESCATTER and op == ReduceOp.Adasum:
        raise UnsupportedError(
            f"reducescatter '{name or 'without a name'}': op=Adasum needs whole tensors; use allreduce"
        )
    return {
        **_common(kind, name, priority, process_set),
        "op": op,
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
    }


def _as_array(value: Any) -> Any:
    """A number of Python's or NumPy's as an array of one element; all else as it is."""
    if not is_number(value):
        return value
    number = np.asarray(value)
    return mx.nd.array([value], dtype=np.float32 if type(value) is float else number.dtype)


def _result(handle: Handle) -> Any:
    """What an operation writes, before it has."""
    if handle.finish is not None:  # the result is made on this thread, in the end
        return synchronize(handle)
    return collectives.result(handle)


def _returning(name: str, doc: str, start: Callable[P, Handle]) -> Callable[P, Any]:
    """The form of a verb that returns the results themselves."""

    @functools.wraps(start)
    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        return _result(start(*args, **kwargs))

    call.__name__ = call.__qualname__ = name
    call.__doc__ = doc
    call.__signature__ = inspect.signature(start).replace(  # type: ignore[attr-defined]
        return_annotation=inspect.Signature.empty
    )
    return call


def allreduce_async(
    tensor: NDArray,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Handle:
    """Start :func:`allreduce`; ``synchronize(handle)`` returns the new array, or raises."""
    arguments = _reducing(
        OpKind.ALLREDUCE,
        name,
        priority,
        process_set,
        resolve_op(op, average),
        prescale_factor,
        postscale_factor,
    )
    if isinstance(tensor, RowSparseNDArray):
        return sparse.allreduce_async(collectives, tensor, False, arguments)
    return collectives.allreduce_async(_as_array(tensor), **arguments)


def allreduce_async_(
    tensor: NDArray,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Handle:
    """Start :func:`allreduce_`; ``synchronize(handle)`` returns the array, or raises."""
    op = resolve_op(op, average)
    if isinstance(tensor, RowSparseNDArray):
        arguments = _reducing(_ALLREDUCE, name, priority, process_set, op, prescale_factor, postscale_factor)
        return sparse.allreduce_async(collectives, tensor, True, arguments)
    return collectives.allreduce_async(
        tensor,
        name=_name(_ALLREDUCE, name, process_set),
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
        priority=priority,
        in_place=True,
    )


def grouped_allreduce_async(
    tensors: Sequence[NDArray],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Handle:
    """Start :func:`grouped_allreduce`; ``synchronize(handle)`` returns the list of results."""
    arguments = _reducing(
        OpKind.ALLREDUCE,
        name,
        priority,
        process_set,
        resolve_op(op, average),
        prescale_factor,
        postscale_factor,
    )
    return collectives.grouped_allreduce_async(list(tensors), **arguments)


def grouped_allreduce_async_(
    tensors: Sequence[NDArray],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Handle:
    """Start :func:`grouped_allreduce_`; ``synchronize(handle)`` returns the list of arrays."""
    arguments = _reducing(
        OpKind.ALLREDUCE,
        name,
        priority,
        process_set,
        resolve_op(op, average),
        prescale_factor,
        postscale_factor,
    )
    return collectives.grouped_allreduce_async(list(tensors), in_place=True, **arguments)


def allgather_async(
    tensor: NDArray,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    exact_gradient: bool | None = None,
) -> Handle:
    """Start :func:`allgather`; ``synchronize(handle)`` returns the new array, or raises."""
    arguments = _common(OpKind.ALLGATHER, name, priority, process_set)
    return collectives.allgather_async(tensor, exact_gradient=exact_gradient, **arguments)


def grouped_allgather_async(
    tensors: Sequence[NDArray],
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    exact_gradient: bool | None = None,
) -> Handle:
    """Start :func:`grouped_allgather`; ``synchronize(handle)`` returns the list of new arrays."""
    arguments = _common(OpKind.ALLGATHER, name, priority, process_set)
    return collectives.grouped_allgather_async(list(tensors), exact_gradient=exact_gradient, **arguments)


def broadcast_async(
    tensor: NDArray,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    exact_gradient: bool | None = None,
) -> Handle:
    """Start :func:`broadcast`; ``synchronize(handle)`` returns the new array, or raises."""
    arguments = _common(OpKind.BROADCAST, name, priority, process_set, root_rank)
    return collectives.broadcast_async(
        _as_array(tensor), root_rank, exact_gradient=exact_gradient, **arguments
    )


def broadcast_async_(
    tensor: NDArray,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`broadcast_`; ``synchronize(handle)`` returns the array, or raises."""
    arguments = _common(OpKind.BROADCAST, name, priority, process_set, root_rank)
    return collectives.broadcast_async(tensor, root_rank, in_place=True, **arguments)


def alltoall_async(
    tensor: NDArray,
    splits: NDArray | Sequence[int] | None = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start :func:`alltoall`; ``synchronize(handle)`` returns the rows and how many came from each rank."""
    rows = splits.asnumpy() if isinstance(splits, NDArray) else splits
    return collectives.alltoall_async(tensor, rows, **_common(OpKind.ALLTOALL, name, priority, process_set))


def alltoall(
    tensor: NDArray,
    splits: NDArray | Sequence[int] | None = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send consecutive rows to the ranks in turn; return what they sent, in order of rank.

    ``splits``: rows for each rank, whole numbers; None: equal parts. With it the result is a tuple of
    the new array and the rows received from each rank, as int32. The call waits until all ranks have
    told their splits, not for the data. See :meth:`Collectives.alltoall`.
    """
    received = _result(alltoall_async(tensor, splits, name, priority, process_set))
    return received[0] if splits is None else received


def reducescatter_async(
    tensor: NDArray,
    op: int = ReduceOp.Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    exact_gradient: bool | None = None,
) -> Handle:
    """Start :func:`reducescatter`; ``synchronize(handle)`` returns the new array, or raises."""
    arguments = _reducing(
        OpKind.REDUCESCATTER,
        name,
        priority,
        process_set,
        resolve_op(op),
        prescale_factor,
        postscale_factor,
    )
    return collectives.reducescatter_async(tensor, exact_gradient=exact_gradient, **arguments)


def grouped_reducescatter_async(
    tensors: Sequence[NDArray],
    op: int = ReduceOp.Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    exact_gradient: bool | None = None,
) -> Handle:
    """Start :func:`grouped_reducescatter`; ``synchronize(handle)`` returns the list of new arrays."""
    arguments = _reducing(
        OpKind.REDUCESCATTER,
        name,
        priority,
        process_set,
        resolve_op(op),
        prescale_factor,
        postscale_factor,
    )
    return collectives.grouped_reducescatter_async(list(tensors), exact_gradient=exact_gradient, **arguments)


def join() -> int:
    """Say that this rank has run out of data; return the rank that joined last, when all have.

    Waits first for everything that MXNet's engine was given, and raises what of it failed unnoticed;
    see :func:`polyhvd.join`.
    """
    mx.nd.waitall()
    return membership.join()


allreduce = _returning(
    "allreduce",
    """Reduce an array over the ranks into a new array; see :meth:`Collectives.allreduce`.

    Returns at once; reads of the result wait. Of a row_sparse array only rows that a rank has are sent,
    and the call waits. ``priority``: higher ones go first. Sums and averages have a gradient.
    """,
    allreduce_async,
)
allreduce_ = _returning(
    "allreduce_",
    "Reduce an array over the ranks in place, and return it; see :func:`allreduce`.",
    allreduce_async_,
)
grouped_allreduce = _returning(
    "grouped_allreduce",
    "Reduce several arrays as one operation, all or none; see :func:`allreduce`. Dtypes may differ.",
    grouped_allreduce_async,
)
grouped_allreduce_ = _returning(
    "grouped_allreduce_",
    "Reduce several arrays in place as one operation; see :func:`grouped_allreduce`.",
    grouped_allreduce_async_,
)
allgather = _returning(
    "allgather",
    """Concatenate the ranks' arrays along the first dimension, in order of rank, into a new array.

    First dimensions may differ: the call waits until all ranks have told theirs, not for the data.
    ``exact_gradient``: True: the gradient is that of the sum of all ranks' losses; False: divided by the
    number of ranks, like Horovod's elsewhere; None: as ``POLYHVD_EXACT_GRADIENTS`` says, which is False by
    default. The same on every rank.
    """,
    allgather_async,
)
grouped_allgather = _returning(
    "grouped_allgather",
    "Gather several arrays as one operation, all or none; see :func:`allgather`.",
    grouped_allgather_async,
)
broadcast = _returning(
    "broadcast",
    """Return the root's array as a new array on every rank; reads of it wait.

    ``exact_gradient``: as for :func:`allgather`.
    """,
    broadcast_async,
)
broadcast_ = _returning(
    "broadcast_",
    "Overwrite an array with the root's, and return it; see :func:`broadcast`.",
    broadcast_async_,
)

reducescatter = _returning(
    "reducescatter",
    """Reduce an array over the ranks; return this rank's rows, one more on the first ranks if need be.

    See :meth:`Collectives.reducescatter`. Sums and averages have a gradient;
    ``exact_gradient``: as for :func:`allgather`.
    """,
    reducescatter_async,
)
grouped_reducescatter = _returning(
    "grouped_reducescatter",
    "Reduce and scatter several arrays as one operation, all or none; see :func:`reducescatter`.",
    grouped_reducescatter_async,
)
