"""MXNet arrays, as the collectives see them: each collective is an operation of MXNet's engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import mxnet as mx
import numpy as np
from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray
from polyhvd.mxnet import native, reads
from polyhvd.mxnet.derivatives import record
from polyhvd.mxnet.errors import InvalidArgumentError, UnsupportedError
from polyhvd.mxnet.names import unnamed
from polyhvd.mxnet.native import Handle

from polyhvd import _core
from polyhvd.collectives.adapter import Capability, Operation, OpKind, ReduceOp
from polyhvd.collectives.adapter import Handle as AnyHandle
from polyhvd.collectives.adjoints import rows_kept
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.collectives.verbs import Collectives, process_set_id
from polyhvd.runtime import current
from polyhvd.runtime.world import World

__all__ = ["MxnetAdapter", "MxnetCollectives"]

_ALLREDUCE = OpKind.ALLREDUCE  # read once: an enum's member takes a look-up
_BFLOAT16 = np.dtype([("bfloat16", np.uint16)])  # as MXNet spells it


def _empty(shape: tuple[int, ...], like: NDArray) -> NDArray:
    """A new array in ``like``'s element type and flavour (``mx.nd`` or ``mx.np``)."""
    make = mx.np.empty if isinstance(like, mx.np.ndarray) else mx.nd.empty
    if make is mx.np.empty and np.dtype(like.dtype) == _BFLOAT16:  # which mx.np does not know
        return mx.nd.empty(shape, dtype=_BFLOAT16, ctx=like.ctx).as_np_ndarray()
    if 0 not in shape:
        return make(shape, dtype=like.dtype, ctx=like.ctx)
    with mx.util.np_shape(True):  # no rows, and not: not known how many
        return make(shape, dtype=like.dtype, ctx=like.ctx)


def _with_rows(rows: int, like: NDArray) -> NDArray:
    return _empty((rows, *like.shape[1:]), like)


def _about(operation: Operation) -> str:
    return f"{OpKind(operation.kind).name.lower()} '{operation.label}'"


def _count(operation: Operation) -> None:
    """Take the turn of a call without a name; late, since a bad call takes none."""
    if operation.name is None:
        operation.name = unnamed(OpKind(operation.kind), operation.process_set)


def _read_only(about: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{about}: the array is read-only; pass a writable one")


def _no_array(about: str, found: object) -> TypeError:
    return TypeError(f"{about}: expected an MXNet array, found {type(found).__name__}; use mx.nd.array()")


def _check_members(about: str, world: World, number: int, root: int | None = None) -> None:
    """Raise where this rank, or the root, is not in a process set."""
    ranks: Sequence[int] = world.process_sets()[number] if number else range(world.placement.size)
    if world.placement.rank not in ranks:
        raise InvalidArgumentError(
            f"{about}: rank {world.placement.rank} is not in process set {number}, which has ranks "
            f"{list(ranks)}; call it on its members only"
        )
    if root is not None and root not in ranks:
        raise InvalidArgumentError(
            f"{about}: root rank {root} is not in process set {number}, which has ranks {list(ranks)}"
        )


def _place(operation: Operation) -> tuple[int, int]:
    """This rank's position in the process set, and how many members that has."""
    ranks = operation.world.process_sets()[operation.process_set]
    return ranks.index(operation.world.placement.rank), len(ranks)


def _checked(operation: Operation, tensors: Sequence[NDArray]) -> None:
    """Raise for what MXNet's engine would find later, or never."""
    if operation.process_set or operation.kind == OpKind.BROADCAST:
        root = operation.root if operation.kind == OpKind.BROADCAST else None
        _check_members(_about(operation), operation.world, operation.process_set, root)
    if operation.kind == OpKind.REDUCESCATTER and operation.op == ReduceOp.Adasum:
        raise UnsupportedError(f"{_about(operation)}: op=Adasum needs whole tensors; use allreduce")
    if not tensors:
        raise InvalidArgumentError(f"{_about(operation)}: there is no array")
    scalars_pass = operation.kind in (OpKind.ALLREDUCE, OpKind.BROADCAST)
    for tensor in tensors:
        if not isinstance(tensor, NDArray):
            raise _no_array(_about(operation), tensor)
        if not scalars_pass and not tensor.shape:
            raise InvalidArgumentError(
                f"{_about(operation)}: a scalar has no first dimension; reshape it to (1,)"
            )


def _checked_splits(operation: Operation, rows: int, members: int) -> Sequence[int]:
    """Rows for each member; equal parts unless the caller gave them."""
    splits = operation.numbers
    if not splits:
        if rows % members:
            raise InvalidArgumentError(
                f"{_about(operation)}: a first dimension of {rows} cannot be divided equally among {members} "
                "ranks; pass splits"
            )
        return [rows // members] * members
    if len(splits) != members:
        raise InvalidArgumentError(
            f"{_about(operation)}: splits has {len(splits)} entries for {members} ranks; give one for each"
        )
    if min(splits) < 0 or max(splits) >= 2**31:
        raise InvalidArgumentError(f"{_about(operation)}: splits={splits}: entries are from 0 to 2^31 - 1")
    if sum(splits) > rows:
        raise InvalidArgumentError(
            f"{_about(operation)}: splits {splits} sum to {sum(splits)}, more than the first dimension of "
            f"{rows}"
        )
    return splits


class MxnetAdapter:
    """See :class:`polyhvd.collectives.adapter.FrameworkAdapter`."""

    name = "mxnet"
    capabilities = frozenset(
        {
            Capability.IN_PLACE,
            Capability.ASYNC,
            Capability.BFLOAT16,
            Capability.BOOL,
            Capability.EMPTY,
            Capability.AUTOGRAD,
        }
    )

    def __init__(self) -> None:
        reads.install()
        current.on_change(self._on_engine_change)
        current.on_leave(self._on_leave)

    @staticmethod
    def _on_engine_change(engine: _core.Engine | None) -> None:
        native.set_engine(engine)
        if engine is not None:
            reads.forgive()

    @staticmethod
    def _on_leave(world: World) -> None:
        native.drain(world.settings.shutdown_drain_s)

    def submit(
        self, operation: Operation, tensors: Sequence[NDArray], out: Sequence[NDArray] | None
    ) -> Handle:
        """Give a collective to MXNet's engine, which runs it once the arrays are ready.

        Waits for nothing, except that an allgather and an alltoall wait until all ranks have agreed on
        the sizes of their results. Results in new arrays are known to autograd while it records.
        """
        _checked(operation, tensors)
        if out is not None:
            if not all(t.writable for t in out):
                raise _read_only(_about(operation))
            _count(operation)
            return native.push(operation, tensors, out)
        if operation.kind == OpKind.ALLGATHER:
            return self._gather(operation, tensors)
        if operation.kind == OpKind.ALLTOALL:
            return self._exchange(operation, tensors[0])
        _count(operation)
        if operation.kind == OpKind.REDUCESCATTER:
            position, members = _place(operation)
            out = [_with_rows(rows_kept(t.shape[0], members)[position], t) for t in tensors]
        else:
            out = [_empty(t.shape, t) for t in tensors]
        handle = native.push(operation, tensors, out)
        handle.result = record(operation, tensors, out, ())
        return handle

    @staticmethod
    def _gather(operation: Operation, tensors: Sequence[NDArray]) -> Handle:
        position, _ = _place(operation)
        _count(operation)
        handle, rows = native.push_sized(operation, tensors)
        count = len(tensors)
        rows_before = [sum(rows[i : position * count : count]) for i in range(count)]
        handle.result = record(operation, tensors, handle.result, rows_before)
        return handle

    @staticmethod
    def _exchange(operation: Operation, tensor: NDArray) -> Handle:
        _, members = _place(operation)
        splits = _checked_splits(operation, tensor.shape[0], members)
        _count(operation)
        handle, reported = native.push_sized(operation, (tensor,))
        received = [max(rows, 0) for rows in reported]  # below zero: the rank has joined
        rows = [(received[p], splits[p], reported[p] >= 0) for p in range(members)]
        (out,) = record(operation, (tensor,), handle.result, rows)
        make = mx.np.array if isinstance(tensor, mx.np.ndarray) else mx.nd.array
        handle.result = [out, make(received, dtype="int32", ctx=tensor.ctx)]
        return handle

    def is_plain(self, tensor: NDArray) -> bool:
        """None: the core does not read them itself."""
        return False

    def dtype(self, tensor: NDArray) -> str:
        """Name of the array's element type."""
        dtype = np.dtype(tensor.dtype)
        return "bfloat16" if dtype == _BFLOAT16 else dtype.name

    def cast(self, tensor: NDArray, dtype: str) -> NDArray:
        """``tensor.astype(dtype)``, without a copy when it has that type."""
        if dtype == "bfloat16" and isinstance(tensor, mx.np.ndarray):  # whose own astype() does not know it
            return tensor.as_nd_ndarray().astype(_BFLOAT16, copy=False).as_np_ndarray()
        return tensor.astype(_BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype), copy=False)

    def assign(self, target: NDArray, value: NDArray) -> None:
        """Copy ``value`` into ``target``; MXNet casts."""
        value.copyto(target)

    def named_parameters(self, owner: object) -> Iterable[tuple[str, NDArray]]:
        """Arrays of a dict by key; those of Gluon parameters by position.

        Gluon's own names have counters of the process in them (``dense3_weight``), which need not
        agree between ranks. Parameters that are not initialised yet are left out.
        """
        if not isinstance(owner, Mapping) and not hasattr(owner, "items"):
            raise InvalidArgumentError(
                f"expected a dict of arrays, or net.collect_params(); found {type(owner).__name__}"
            )
        for position, (key, value) in enumerate(owner.items()):
            if not isinstance(value, Parameter):
                yield str(key), value
            elif value._data is not None:
                yield str(position), value.data(value.list_ctx()[0])


class MxnetCollectives(Collectives[NDArray]):
    """:class:`Collectives`, with a fast path for calls that a step makes hundreds of times."""

    def allreduce_async(
        self,
        tensor: NDArray,
        *,
        name: str | None = None,
        op: int = ReduceOp.Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        priority: int = 0,
        in_place: bool = False,
        blocking: bool = False,
    ) -> AnyHandle[NDArray]:
        """Start the reduction of an array; see :meth:`Collectives.allreduce`."""
        if not in_place:
            return super().allreduce_async(
                tensor,
                name=name,
                op=op,
                prescale_factor=prescale_factor,
                postscale_factor=postscale_factor,
                process_set=process_set,
                priority=priority,
                in_place=in_place,
                blocking=blocking,
            )
        world = current.world()
        number = 0 if process_set is global_process_set else process_set_id(process_set)
        if number:
            _check_members(f"allreduce '{name or 'allreduce.noname'}'", world, number)
        if not isinstance(tensor, NDArray):
            raise _no_array(f"allreduce '{name or 'allreduce.noname'}'", tensor)
        if not tensor.writable:
            raise _read_only(f"allreduce '{name or 'allreduce.noname'}'")
        if name is None:
            name = unnamed(_ALLREDUCE, number)
        return native.push_in_place(
            _ALLREDUCE, name, tensor, op, prescale_factor, postscale_factor, number, priority
        )
