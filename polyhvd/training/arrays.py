"""The functions of frameworks whose tensors are plain arrays, with Horovod's signatures: NumPy, CuPy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from polyhvd import _core
from polyhvd.collectives.adapter import FrameworkAdapter, Handle, OpKind, ReduceOp
from polyhvd.collectives.operation import is_number
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.collectives.verbs import Collectives, resolve_op
from polyhvd.runtime.world import World
from polyhvd.training.compression import NO_COMPRESSION, Compression, Compressor
from polyhvd.training.state import broadcast_named

__all__ = ["ArrayFunctions", "named_arrays"]

T = TypeVar("T")
_ALLREDUCE = OpKind.ALLREDUCE  # read once: an enum's member takes a look-up


def named_arrays(owner: Any) -> Iterable[tuple[str, Any]]:
    """Items of a mapping, or pairs, or a list of arrays named by position."""
    if isinstance(owner, Mapping):
        return sorted(owner.items())
    pairs = list(owner)
    if pairs and not isinstance(pairs[0], tuple):
        return [(str(i), array) for i, array in enumerate(pairs)]
    return pairs


class ArrayFunctions(Generic[T]):
    """What ``polyhvd.<framework>`` offers, each one a bound method.

    Args:
        adapter: the framework's.
        check: returns the array that it is given, or raises TypeError for what is none.
        from_number: an array without dimensions that holds a number of Python's or NumPy's.
        world: in which they are; None: in the current one of the process.
    """

    def __init__(
        self,
        adapter: FrameworkAdapter[T],
        check: Callable[[T], T],
        from_number: Callable[[Any], T],
        world: World | None = None,
    ) -> None:
        self._adapter = adapter
        self._check = check
        self._from_number = from_number
        self._collectives: Collectives[T] = Collectives(adapter, world)
        self.Compression = Compression(adapter)
        self.poll = self._collectives.poll
        self.synchronize = self._collectives.synchronize

    def _value(self, tensor: Any) -> T:
        """What a verb sends that returns something new: numbers will do, too."""
        return self._from_number(tensor) if is_number(tensor) else self._check(tensor)

    def _all_checked(self, tensors: Sequence[T]) -> list[T]:
        return [self._check(tensor) for tensor in tensors]

    def allreduce(
        self,
        tensor: T,
        average: bool | None = None,
        name: str | None = None,
        compression: Compressor = NO_COMPRESSION,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> T:
        """Reduce an array, or a number, over the ranks into a new array; see
        :meth:`Collectives.allreduce`.
        """
        sent, context = compression.compress(self._value(tensor))
        result = self._collectives.allreduce(
            sent,
            name=name,
            op=resolve_op(op, average),
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
        )
        restored: T = compression.decompress(result, context)
        return restored

    def allreduce_(
        self,
        tensor: T,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> T:
        """Reduce an array over the ranks in place; see :meth:`Collectives.allreduce`."""
        collectives, op = self._collectives, resolve_op(op, average)
        self._check(tensor)
        if collectives.in_place(
            _core.run, _ALLREDUCE, tensor, name, op, -1, prescale_factor, postscale_factor, process_set, 0
        ):
            return tensor
        return collectives.allreduce(
            tensor,
            name=name,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
            in_place=True,
        )

    def allreduce_async(
        self,
        tensor: T,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Handle:
        """Start :meth:`allreduce`; ``synchronize(handle)`` returns the new array."""
        return self._collectives.allreduce_async(
            self._value(tensor),
            name=name,
            op=resolve_op(op, average),
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
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
    ) -> Handle:
        """Start :meth:`allreduce_`; leave the array alone until ``synchronize(handle)``."""
        return self._collectives.allreduce_async(
            self._check(tensor),
            name=name,
            op=resolve_op(op, average),
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
            in_place=True,
        )

    def grouped_allreduce(
        self,
        tensors: Sequence[T],
        average: bool | None = None,
        name: str | None = None,
        compression: Compressor = NO_COMPRESSION,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> list[T]:
        """Reduce several arrays as one operation, into new arrays: all or none."""
        packed = [compression.compress(tensor) for tensor in self._all_checked(tensors)]
        results = self._collectives.grouped_allreduce(
            [sent for sent, _ in packed],
            name=name,
            op=resolve_op(op, average),
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
        )
        return [
            compression.decompress(result, context)
            for result, (_, context) in zip(results, packed, strict=True)
        ]

    def grouped_allreduce_(
        self,
        tensors: Sequence[T],
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> list[T]:
        """Reduce several arrays as one operation, in place."""
        return list(
            self.synchronize(
                self.grouped_allreduce_async_(
                    tensors, average, name, op, prescale_factor, postscale_factor, process_set
                )
            )
        )

    def grouped_allreduce_async(
        self,
        tensors: Sequence[T],
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Handle:
        """Start :meth:`grouped_allreduce`; ``synchronize(handle)`` returns the new arrays."""
        return self._collectives.grouped_allreduce_async(
            self._all_checked(tensors),
            name=name,
            op=resolve_op(op, average),
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
        )

    def grouped_allreduce_async_(
        self,
        tensors: Sequence[T],
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> Handle:
        """Start :meth:`grouped_allreduce_`; leave the arrays alone until ``synchronize(handle)``."""
        return self._collectives.grouped_allreduce_async(
            self._all_checked(tensors),
            name=name,
            op=resolve_op(op, average),
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
            in_place=True,
        )

    def allgather(
        self, tensor: T, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> T:
        """Concatenate the ranks' arrays; see :meth:`Collectives.allgather`."""
        return self._collectives.allgather(self._check(tensor), name=name, process_set=process_set)

    def allgather_async(
        self, tensor: T, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle:
        """Start :meth:`allgather`."""
        return self._collectives.allgather_async(self._check(tensor), name=name, process_set=process_set)

    def grouped_allgather(
        self, tensors: Sequence[T], name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> list[T]:
        """Gather several arrays as one operation: all or none."""
        return self._collectives.grouped_allgather(
            self._all_checked(tensors), name=name, process_set=process_set
        )

    def grouped_allgather_async(
        self, tensors: Sequence[T], name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> Handle:
        """Start :meth:`grouped_allgather`."""
        return self._collectives.grouped_allgather_async(
            self._all_checked(tensors), name=name, process_set=process_set
        )

    def alltoall(
        self,
        tensor: T,
        splits: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Any:
        """Exchange rows with all ranks; see :meth:`Collectives.alltoall`."""
        return self._collectives.alltoall(self._check(tensor), splits, name=name, process_set=process_set)

    def alltoall_async(
        self,
        tensor: T,
        splits: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Handle:
        """Start :meth:`alltoall`; ``synchronize(handle)`` returns rows and how many came from each rank."""
        return self._collectives.alltoall_async(
            self._check(tensor), splits, name=name, process_set=process_set
        )

    def reducescatter(
        self,
        tensor: T,
        name: str | None = None,
        compression: Compressor = NO_COMPRESSION,
        op: int = ReduceOp.Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> T:
        """Reduce an array and keep this rank's rows; see :meth:`Collectives.reducescatter`."""
        sent, context = compression.compress(self._check(tensor))
        result = self._collectives.reducescatter(
            sent,
            name=name,
            op=resolve_op(op),
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
        )
        restored: T = compression.decompress(result, context)
        return restored

    def reducescatter_async(
        self,
        tensor: T,
        name: str | None = None,
        op: int = ReduceOp.Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Handle:
        """Start :meth:`reducescatter`."""
        return self._collectives.reducescatter_async(
            self._check(tensor),
            name=name,
            op=resolve_op(op),
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
        )

    def grouped_reducescatter(
        self,
        tensors: Sequence[T],
        name: str | None = None,
        compression: Compressor = NO_COMPRESSION,
        op: int = ReduceOp.Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> list[T]:
        """Reduce several arrays and keep this rank's rows, as one operation: all or none."""
        packed = [compression.compress(tensor) for tensor in self._all_checked(tensors)]
        results = self._collectives.grouped_reducescatter(
            [sent for sent, _ in packed],
            name=name,
            op=resolve_op(op),
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
        )
        return [
            compression.decompress(result, context)
            for result, (_, context) in zip(results, packed, strict=True)
        ]

    def grouped_reducescatter_async(
        self,
        tensors: Sequence[T],
        name: str | None = None,
        op: int = ReduceOp.Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> Handle:
        """Start :meth:`grouped_reducescatter`."""
        return self._collectives.grouped_reducescatter_async(
            self._all_checked(tensors),
            name=name,
            op=resolve_op(op),
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
        )

    def broadcast(
        self,
        tensor: T,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> T:
        """Return the root's array as a new array; see :meth:`Collectives.broadcast`."""
        return self._collectives.broadcast(self._value(tensor), root_rank, name=name, process_set=process_set)

    def broadcast_(
        self,
        tensor: T,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> T:
        """Overwrite an array with the root's."""
        return self._collectives.broadcast(
            self._check(tensor), root_rank, name=name, process_set=process_set, in_place=True
        )

    def broadcast_async(
        self,
        tensor: T,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Handle:
        """Start :meth:`broadcast`."""
        return self._collectives.broadcast_async(
            self._value(tensor), root_rank, name=name, process_set=process_set
        )

    def broadcast_async_(
        self,
        tensor: T,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> Handle:
        """Start :meth:`broadcast_`."""
        return self._collectives.broadcast_async(
            self._check(tensor), root_rank, name=name, process_set=process_set, in_place=True
        )

    def broadcast_parameters(
        self, params: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set
    ) -> None:
        """Overwrite a dict of arrays, or a list of (name, array) pairs, with the root's."""
        named = list(self._adapter.named_parameters(params))
        broadcast_named(self._collectives, named, root_rank, process_set)
