"""The functions of every framework, between their arguments and the collectives.

The verbs.py of each framework has the signatures and the documentation, and is generated from
:mod:`polyhvd.collectives.table`. Its functions call the methods here by the names of the table. Older
forms of arguments, defaults and conversions are handled here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from polyhvd import _core
from polyhvd.collectives import membership
from polyhvd.collectives.adapter import Handle, OpKind, ReduceOp
from polyhvd.collectives.operation import process_set_id, resolve_op
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.collectives.verbs import (
    Arguments,
    Collectives,
    CopyArguments,
    ReductionArguments,
    ScatterArguments,
)
from polyhvd.errors import InvalidArgumentError
from polyhvd.runtime import current

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Functions"]

T = TypeVar("T")
R = TypeVar("R")

_ALLREDUCE = OpKind.ALLREDUCE  # read once: an enum's member takes a look-up
_BROADCAST = OpKind.BROADCAST
_SUM = ReduceOp.Sum


class _Compressor(Protocol):
    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """See :class:`polyhvd.training.compression.Compressor`."""

    def decompress(self, tensor: Any, context: Any) -> Any:
        """See :class:`polyhvd.training.compression.Compressor`."""


class _Keyed(Protocol):
    def for_operation(self, name: str | None) -> _Compressor:
        """See :class:`polyhvd.training.compression.KeyedCompressor`."""


class Functions(Generic[T]):
    """The public collectives of one framework. Stateless; thread-safe.

    A framework derives a class where its tensors need more. Methods whose names end in ``_one`` and
    ``_group``, and :meth:`exchange`, are what a function that returns new tensors runs in the end:
    a framework that records gradients, or makes graphs, replaces these.

    Args:
        collectives: of the framework's adapter.
    """

    def __init__(self, collectives: Collectives[T]) -> None:
        self.collectives = collectives
        self._world = collectives.in_world
        self._direct = collectives.is_direct

    # What a framework may change -------------------------------------------------------------------

    def value(self, tensor: Any) -> T:
        """The tensor that an argument stands for, where a number will do, too."""
        return self.checked(tensor)

    def checked(self, tensor: Any) -> T:
        """The tensor itself; raises TypeError for what is none, unless the adapter does."""
        given: T = tensor
        return given

    def resolved(self, op: int | None, average: bool | None = None) -> int:
        """See :func:`resolve_op`."""
        return resolve_op(op, average)

    def overwritten(self, tensors: Sequence[T]) -> None:
        """These tensors are overwritten by an operation that has started."""

    def finished(self, handle: Handle[R]) -> R:
        """The result of an operation, for a function that returns no handle."""
        return self.collectives.synchronize(handle)

    def allreduce_one(
        self,
        tensor: T,
        name: str | None,
        op: int,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
        priority: int,
    ) -> T:
        """A tensor reduced into a new one; by position: a small one takes no longer than its arguments."""
        handle = self.collectives.allreduce_async(
            tensor,
            name=name,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
            priority=priority,
            blocking=True,
        )
        return self.finished(handle)

    def allreduce_group(
        self, tensors: Sequence[T], *, op: int, **arguments: Unpack[ReductionArguments]
    ) -> list[T]:
        """Tensors reduced into new ones, as one operation."""
        handle = self.collectives.grouped_allreduce_async(tensors, blocking=True, op=op, **arguments)
        return list(self.finished(handle))

    def allgather_group(self, tensors: Sequence[T], **arguments: Unpack[CopyArguments]) -> list[T]:
        """The ranks' tensors, concatenated, as one operation."""
        handle = self.collectives.grouped_allgather_async(tensors, blocking=True, **arguments)
        return list(self.finished(handle))

    def broadcast_one(self, tensor: T, root_rank: int, **arguments: Unpack[CopyArguments]) -> T:
        """The root's tensor as a new one."""
        return self.finished(self.collectives.broadcast_async(tensor, root_rank, blocking=True, **arguments))

    def exchange(self, tensor: T, splits: Any, **arguments: Unpack[Arguments]) -> T | tuple[T, T]:
        """The rows that all ranks have sent, and with ``splits`` how many came from each."""
        handle = self.collectives.alltoall_async(tensor, splits, blocking=True, **arguments)
        received = self.finished(handle)
        return received[0] if splits is None else received

    def reducescatter_group(
        self, tensors: Sequence[T], *, op: int, **arguments: Unpack[ScatterArguments]
    ) -> list[T]:
        """This rank's rows of tensors reduced into new ones, as one operation."""
        handle = self.collectives.grouped_reducescatter_async(tensors, blocking=True, op=op, **arguments)
        return list(self.finished(handle))

    # The functions, by the names and in the order of the table --------------------------------------

    def allreduce(
        self,
        tensor: Any,
        average: bool | None = None,
        name: str | None = None,
        compression: _Compressor | _Keyed | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        priority: int = 0,
    ) -> T:
        """Reduce a tensor, or a number, into a new one."""
        sent, context = self.value(tensor), None
        op = self.resolved(op, average)
        if compression is not None:
            compression = self.compressor(compression, name)
            sent, context = compression.compress(sent)
        result = self.allreduce_one(sent, name, op, prescale_factor, postscale_factor, process_set, priority)
        return result if compression is None else compression.decompress(result, context)

    def allreduce_(
        self,
        tensor: T,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        priority: int = 0,
    ) -> T:
        """Reduce a tensor in place. For a small one, arguments cost what the collective does."""
        self.checked(tensor)
        if self._direct:
            world = self._world or current.world()
            number = 0 if process_set is global_process_set else process_set_id(process_set, world)
            try:
                _core.run(
                    world.engine,
                    _ALLREDUCE,
                    name,
                    tensor,
                    resolve_op(op, average),
                    -1,
                    prescale_factor,
                    postscale_factor,
                    number,
                    priority,
                )
                return tensor
            except BufferError:  # not dense
                pass
        return self._reduced_in_place(
            tensor, average, name, op, prescale_factor, postscale_factor, process_set, priority
        )

    def _reduced_in_place(
        self,
        tensor: T,
        average: bool | None,
        name: str | None,
        op: int | None,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
        priority: int = 0,
    ) -> T:
        """:meth:`allreduce_` of a tensor whose memory the core does not work on."""
        handle = self.collectives.allreduce_async(
            tensor,
            name=name,
            op=self.resolved(op, average),
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
            priority=priority,
            in_place=True,
            blocking=True,
        )
        self.overwritten((tensor,))
        return self.finished(handle)

    def allreduce_async(
        self,
        tensor: Any,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        priority: int = 0,
    ) -> Handle[T]:
        """Start the reduction of a tensor, or a number, into a new one."""
        return self.collectives.allreduce_async(
            self.value(tensor),
            name=name,
            op=self.resolved(op, average),
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
            priority=priority,
        )

    def allreduce_async_(
        self,
        tensor: T,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        priority: int = 0,
    ) -> Handle[T]:
        """Start the reduction of a tensor in place."""
        handle = self.collectives.allreduce_async(
            self.checked(tensor),
            name=name,
            op=self.resolved(op, average),
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
            priority=priority,
            in_place=True,
        )
        self.overwritten((tensor,))
        return handle

    def grouped_allreduce(
        self,
        tensors: Iterable[T],
        average: bool | None = None,
        *,
        compression: _Compressor | _Keyed | None = None,
        op: int | None = None,
        **arguments: Unpack[ReductionArguments],
    ) -> list[T]:
        """Reduce several tensors into new ones, as one operation."""
        sent, restore = self._compressed(tensors, compression, arguments.get("name"))
        return restore(self.allreduce_group(sent, op=self.resolved(op, average), **arguments))

    def grouped_allreduce_(
        self,
        tensors: Iterable[T],
        average: bool | None = None,
        *,
        op: int | None = None,
        **arguments: Unpack[ReductionArguments],
    ) -> list[T]:
        """Reduce several tensors in place, as one operation."""
        handle = self._group_in_place(tensors, average, op, blocking=True, **arguments)
        return list(self.finished(handle))

    def grouped_allreduce_async(
        self,
        tensors: Iterable[T],
        average: bool | None = None,
        *,
        op: int | None = None,
        **arguments: Unpack[ReductionArguments],
    ) -> Handle[list[T]]:
        """Start the reduction of several tensors into new ones, as one operation."""
        return self.collectives.grouped_allreduce_async(
            self._all_checked(tensors), op=self.resolved(op, average), **arguments
        )

    def grouped_allreduce_async_(
        self,
        tensors: Iterable[T],
        average: bool | None = None,
        *,
        op: int | None = None,
        **arguments: Unpack[ReductionArguments],
    ) -> Handle[list[T]]:
        """Start the reduction of several tensors in place, as one operation."""
        return self._group_in_place(tensors, average, op, blocking=False, **arguments)

    def _group_in_place(
        self,
        tensors: Iterable[T],
        average: bool | None,
        op: int | None,
        *,
        blocking: bool,
        **arguments: Unpack[ReductionArguments],
    ) -> Handle[list[T]]:
        targets = self._all_checked(tensors)
        handle = self.collectives.grouped_allreduce_async(
            targets, op=self.resolved(op, average), in_place=True, blocking=blocking, **arguments
        )
        self.overwritten(targets)
        return handle

    def allgather(self, tensor: T, **arguments: Unpack[CopyArguments]) -> T:
        """Concatenate the ranks' tensors."""
        (result,) = self.allgather_group((self.checked(tensor),), **arguments)
        return result

    def allgather_async(self, tensor: T, **arguments: Unpack[CopyArguments]) -> Handle[T]:
        """Start the concatenation of the ranks' tensors."""
        return self.collectives.allgather_async(self.checked(tensor), **arguments)

    def grouped_allgather(self, tensors: Iterable[T], **arguments: Unpack[CopyArguments]) -> list[T]:
        """Gather several tensors as one operation."""
        return self.allgather_group(self._all_checked(tensors), **arguments)

    def grouped_allgather_async(
        self, tensors: Iterable[T], **arguments: Unpack[CopyArguments]
    ) -> Handle[list[T]]:
        """Start gathering several tensors as one operation."""
        return self.collectives.grouped_allgather_async(self._all_checked(tensors), **arguments)

    def broadcast(self, tensor: Any, root_rank: int, **arguments: Unpack[CopyArguments]) -> T:
        """The root's tensor, or number, as a new one."""
        return self.broadcast_one(self.value(tensor), root_rank, **arguments)

    def broadcast_(
        self,
        tensor: T,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        priority: int = 0,
    ) -> T:
        """Overwrite a tensor with the root's."""
        run, collectives = _core.run, self.collectives
        self.checked(tensor)
        if not collectives.in_place(
            run, _BROADCAST, tensor, name, _SUM, root_rank, 1.0, 1.0, process_set, priority
        ):
            self.finished(
                collectives.broadcast_async(
                    tensor,
                    root_rank,
                    name=name,
                    process_set=process_set,
                    priority=priority,
                    in_place=True,
                    blocking=True,
                )
            )
        self.overwritten((tensor,))
        return tensor

    def broadcast_async(self, tensor: Any, root_rank: int, **arguments: Unpack[CopyArguments]) -> Handle[T]:
        """Start copying the root's tensor, or number, into a new one."""
        return self.collectives.broadcast_async(self.value(tensor), root_rank, **arguments)

    def broadcast_async_(self, tensor: T, root_rank: int, **arguments: Unpack[Arguments]) -> Handle[T]:
        """Start overwriting a tensor with the root's."""
        handle = self.collectives.broadcast_async(self.checked(tensor), root_rank, in_place=True, **arguments)
        self.overwritten((tensor,))
        return handle

    def alltoall(self, tensor: T, splits: Any = None, **arguments: Unpack[Arguments]) -> T | tuple[T, T]:
        """Exchange rows with all ranks."""
        return self.exchange(self.checked(tensor), splits, **arguments)

    def alltoall_async(
        self, tensor: T, splits: Any = None, **arguments: Unpack[Arguments]
    ) -> Handle[tuple[T, T]]:
        """Start exchanging rows with all ranks."""
        return self.collectives.alltoall_async(self.checked(tensor), splits, **arguments)

    def reducescatter(
        self,
        tensor: T,
        *,
        compression: _Compressor | _Keyed | None = None,
        op: int = ReduceOp.Average,
        **arguments: Unpack[ScatterArguments],
    ) -> T:
        """Reduce a tensor and keep this rank's rows."""
        (result,) = self.grouped_reducescatter((tensor,), compression=compression, op=op, **arguments)
        return result

    def reducescatter_async(
        self, tensor: T, *, op: int = ReduceOp.Average, **arguments: Unpack[ScatterArguments]
    ) -> Handle[T]:
        """Start the reduction of a tensor, of which this rank keeps its rows."""
        return self.collectives.reducescatter_async(self.checked(tensor), op=self.resolved(op), **arguments)

    def grouped_reducescatter(
        self,
        tensors: Iterable[T],
        *,
        compression: _Compressor | _Keyed | None = None,
        op: int = ReduceOp.Average,
        **arguments: Unpack[ScatterArguments],
    ) -> list[T]:
        """Reduce several tensors and keep this rank's rows, as one operation."""
        sent, restore = self._compressed(tensors, compression, arguments.get("name"))
        return restore(self.reducescatter_group(sent, op=self.resolved(op), **arguments))

    def grouped_reducescatter_async(
        self, tensors: Iterable[T], *, op: int = ReduceOp.Average, **arguments: Unpack[ScatterArguments]
    ) -> Handle[list[T]]:
        """Start the reduction of several tensors, of which this rank keeps its rows."""
        return self.collectives.grouped_reducescatter_async(
            self._all_checked(tensors), op=self.resolved(op), **arguments
        )

    def barrier(self, process_set: ProcessSet = global_process_set) -> None:
        """Return when every rank of the process set has called it."""
        membership.barrier(process_set)

    def join(self) -> int:
        """Declare that this rank has run out of data; return the rank that joined last."""
        return membership.join()

    def poll(self, handle: Handle) -> bool:
        """Return whether :meth:`synchronize` would return without waiting."""
        return self.collectives.poll(handle)

    def synchronize(self, handle: Handle[R]) -> R:
        """Wait for an operation, and return its result."""
        return self.collectives.synchronize(handle)

    def _all_checked(self, tensors: Iterable[T]) -> list[T]:
        return [self.checked(tensor) for tensor in tensors]

    def compressor(self, compression: Any, name: str | None) -> _Compressor:
        """The compressor of one tensor: of a KeyedCompressor the instance for this name."""
        for_operation = getattr(compression, "for_operation", None)
        if for_operation is None:
            own: _Compressor = compression
            return own
        if isinstance(compression, type):
            raise InvalidArgumentError(
                f"compression={compression.__name__}: its state would be lost after the call; "
                "pass an instance"
            )
        keyed: _Compressor = for_operation(name)
        return keyed

    def _compressed(
        self, tensors: Iterable[T], compression: _Compressor | _Keyed | None, name: str | None
    ) -> tuple[list[T], Callable[[list[T]], list[T]]]:
        """The tensors to send, and a function that turns the results into results of the given tensors."""
        given = self._all_checked(tensors)
        if compression is None:
            return given, lambda results: results
        names = [name]
        if len(given) != 1:
            names = [None if name is None else f"{name}.{i}" for i in range(len(given))]
        compressors = [self.compressor(compression, each) for each in names]
        pairs = [each.compress(tensor) for each, tensor in zip(compressors, given, strict=True)]

        def restore(results: list[T]) -> list[T]:
            parts = zip(compressors, results, pairs, strict=True)
            return [each.decompress(result, context) for each, result, (_, context) in parts]

        return [sent for sent, _ in pairs], restore
