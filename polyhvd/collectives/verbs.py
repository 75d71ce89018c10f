"""Every collective, written once over an adapter.

The framework modules give these methods their own signatures; averaging, naming, scaling and
what a handle means are decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from polyhvd import _core
from polyhvd.collectives.adapter import Capability, FrameworkAdapter, Handle, OpKind, ReduceOp
from polyhvd.collectives.membership import barrier
from polyhvd.collectives.operation import Call, process_set_id, resolve_op, splits_of
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.runtime import current
from polyhvd.runtime.world import World

__all__ = ["Collectives", "barrier", "process_set_id", "resolve_op", "splits_of"]

T = TypeVar("T")


def _single(outputs: Sequence[Any]) -> Any:
    return outputs[0]


def _list(outputs: Sequence[Any]) -> Sequence[Any]:
    return outputs


_ALLREDUCE = OpKind.ALLREDUCE  # read once: an enum's member takes a look-up


class Collectives(Generic[T]):
    """The collectives of one framework. Stateless; thread-safe.

    Args:
        adapter: of the framework.
        world: in which they are; None: in the current one of the process.
    """

    def __init__(self, adapter: FrameworkAdapter[T], world: World | None = None) -> None:
        self.adapter = adapter
        self._world = world
        self._direct = Capability.DIRECT in adapter.capabilities

    @property
    def world(self) -> World:
        """In which they are; raises NotInitializedError where there is none."""
        return self._world or current.world()

    def in_place(
        self,
        call: Callable[..., Any],
        kind: OpKind,
        tensor: T,
        name: str | None,
        op: int,
        root: int,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        priority: int,
    ) -> Any:
        """What ``call``, the core's ``run`` or ``start``, returns; None when it must be done by parts.

        Adapters call it first, and by position: for a small tensor, arguments cost what the collective does.
        """
        if not self._direct:
            return None
        world = self._world or current.world()
        set_id = 0 if process_set is global_process_set else process_set_id(process_set, world)
        try:
            return call(world.engine, kind, name, tensor, op, root, prescale, postscale, set_id, priority)
        except BufferError:  # not dense
            return None

    def _start(
        self,
        kind: OpKind,
        tensors: Sequence[T],
        name: str | None,
        process_set: ProcessSet,
        priority: int,
        blocking: bool,
        unpack: Callable[[Any], Any],
        *,
        out: Sequence[T] | None = None,
        op: int = ReduceOp.Sum,  # read once, when this is defined
        root: int = -1,
        prescale: float = 1.0,
        postscale: float = 1.0,
        numbers: Sequence[int] = (),
        exact_gradient: bool | None = None,
    ) -> Handle:
        world = self._world or current.world()
        set_id = 0 if process_set is global_process_set else process_set_id(process_set, world)
        call = Call(
            world,
            kind,
            name,
            op,
            root,
            prescale,
            postscale,
            set_id,
            priority,
            blocking,
            numbers,
            exact_gradient,
        )
        handle = self.adapter.submit(call, tensors, out)
        handle.slot = unpack
        return handle

    def synchronize(self, handle: Handle) -> Any:
        """Wait for an operation; return its output, or list of outputs for a grouped one.

        Raises what it failed with. May be called again: the result stays.
        """
        handle.wait()
        unpack, handle.slot = handle.slot, None
        if unpack is None:  # or done before
            return handle.result
        finish = handle.finish
        if finish is not None:
            handle.result = finish(handle)
            handle.finish = None
        handle.result = unpack(handle.result)
        return handle.result

    def result(self, handle: Handle) -> Any:
        """What ``synchronize()`` returns, without waiting; for frameworks whose reads wait by themselves."""
        unpack = handle.slot
        return handle.result if unpack is None else unpack(handle.result)

    def poll(self, handle: Handle) -> bool:
        """Whether ``synchronize()`` would return without waiting."""
        return handle.done()

    def allreduce_async(
        self,
        tensor: T,
        *,
        name: str | None = None,
        op: int = ReduceOp.Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        priority: int = 0,
        in_place: bool = False,
        blocking: bool = False,
    ) -> Handle:
        """Start the elementwise reduction of ``tensor`` over the ranks; see :meth:`allreduce`."""
        if in_place and self._direct and not blocking and self.adapter.is_plain(tensor):
            handle: Handle | None = self.in_place(
                _core.start,
                _ALLREDUCE,
                tensor,
                name,
                op,
                -1,
                prescale_factor,
                postscale_factor,
                process_set,
                priority,
            )
            if handle is not None:
                return handle
        tensors = (tensor,)
        out = tensors if in_place else None
        return self._start(
            OpKind.ALLREDUCE,
            tensors,
            name,
            process_set,
            priority,
            blocking,
            _single,
            out=out,
            op=op,
            prescale=prescale_factor,
            postscale=postscale_factor,
        )

    def allreduce(
        self,
        tensor: T,
        *,
        name: str | None = None,
        op: int = ReduceOp.Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        priority: int = 0,
        in_place: bool = False,
    ) -> T:
        """Reduce ``tensor`` elementwise over the ranks, and return the result on every rank.

        Args:
            tensor: any shape; the same shape and dtype on every rank.
            name: matches the calls of the ranks. Without one the n-th call that a rank submits, of those
                of its kind on the process set, matches the n-th call of the others: whatever the order
                in which they are synchronized, and from however many threads they are submitted.
            op: Average (default), Sum, Adasum, Min, Max or Product.
            prescale_factor: multiplies each rank's tensor; in float64 for integers.
            postscale_factor: multiplies the result, likewise.
            process_set: the ranks that take part.
            priority: higher ones go first among those that are ready.
            in_place: overwrite and return ``tensor``.

        Raises:
            InvalidArgumentError: a bad call; nothing was sent.
            RankMismatchError: the ranks' tensors or arguments differ.
            HorovodInternalError: a rank was lost, or the engine was shut down.
        """
        handle = self.allreduce_async(
            tensor,
            name=name,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
            priority=priority,
            in_place=in_place,
            blocking=True,
        )
        result: T = self.synchronize(handle)
        return result

    def grouped_allreduce_async(
        self,
        tensors: Sequence[T],
        *,
        name: str | None = None,
        op: int = ReduceOp.Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        priority: int = 0,
        in_place: bool = False,
        blocking: bool = False,
    ) -> Handle:
        """Start the reduction of several tensors of one dtype as one operation: all or none."""
        return self._start(
            OpKind.ALLREDUCE,
            tensors,
            name,
            process_set,
            priority,
            blocking,
            _list,
            out=tensors if in_place else None,
            op=op,
            prescale=prescale_factor,
            postscale=postscale_factor,
        )

    def allgather_async(
        self,
        tensor: T,
        *,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        priority: int = 0,
        blocking: bool = False,
        exact_gradient: bool | None = None,
    ) -> Handle:
        """Start the concatenation of the ranks' tensors; see :meth:`allgather`."""
        return self._start(
            OpKind.ALLGATHER,
            (tensor,),
            name,
            process_set,
            priority,
            blocking,
            _single,
            exact_gradient=exact_gradient,
        )

    def allgather(
        self,
        tensor: T,
        *,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        priority: int = 0,
    ) -> T:
        """Concatenate the ranks' tensors along the first dimension, in order of rank, on every rank.

        Args:
            tensor: at least one dimension; all but the first are the same on every rank.
            name: matches the calls of the ranks.
            process_set: the ranks that take part.
            priority: higher ones go first among those that are ready.

        Raises:
            InvalidArgumentError, RankMismatchError, HorovodInternalError: as :meth:`allreduce`.
        """
        handle = self.allgather_async(
            tensor, name=name, process_set=process_set, priority=priority, blocking=True
        )
        result: T = self.synchronize(handle)
        return result

    def broadcast_async(
        self,
        tensor: T,
        root_rank: int,
        *,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        priority: int = 0,
        in_place: bool = False,
        blocking: bool = False,
        exact_gradient: bool | None = None,
    ) -> Handle:
        """Start copying the root's tensor to all ranks; see :meth:`broadcast`."""
        tensors = (tensor,)
        return self._start(
            OpKind.BROADCAST,
            tensors,
            name,
            process_set,
            priority,
            blocking,
            _single,
            out=tensors if in_place else None,
            root=root_rank,
            exact_gradient=exact_gradient,
        )

    def broadcast(
        self,
        tensor: T,
        root_rank: int,
        *,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        priority: int = 0,
        in_place: bool = False,
    ) -> T:
        """Return the root's tensor on every rank.

        Args:
            tensor: the same shape and dtype on every rank; its values matter on the root.
            root_rank: world rank of the sender, a member of the process set.
            name: matches the calls of the ranks.
            process_set: the ranks that take part.
            priority: higher ones go first among those that are ready.
            in_place: overwrite and return ``tensor``.

        Raises:
            InvalidArgumentError, RankMismatchError, HorovodInternalError: as :meth:`allreduce`.
        """
        if in_place and self.in_place(
            _core.run,
            OpKind.BROADCAST,
            tensor,
            name,
            ReduceOp.Sum,
            root_rank,
            1.0,
            1.0,
            process_set,
            priority,
        ):
            return tensor
        handle = self.broadcast_async(
            tensor,
            root_rank,
            name=name,
            process_set=process_set,
            priority=priority,
            in_place=in_place,
            blocking=True,
        )
        result: T = self.synchronize(handle)
        return result

    def grouped_allreduce(self, tensors: Sequence[T], **arguments: Any) -> list[T]:
        """Reduce several tensors as one operation; arguments as :meth:`allreduce`."""
        result = self.synchronize(self.grouped_allreduce_async(tensors, blocking=True, **arguments))
        return list(result)

    def grouped_allgather_async(
        self,
        tensors: Sequence[T],
        *,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        priority: int = 0,
        blocking: bool = False,
        exact_gradient: bool | None = None,
    ) -> Handle:
        """Start gathering several tensors as one operation: all or none."""
        return self._start(
            OpKind.ALLGATHER,
            tensors,
            name,
            process_set,
            priority,
            blocking,
            _list,
            exact_gradient=exact_gradient,
        )

    def grouped_allgather(self, tensors: Sequence[T], **arguments: Any) -> list[T]:
        """Gather several tensors as one operation; arguments as :meth:`allgather`."""
        result = self.synchronize(self.grouped_allgather_async(tensors, blocking=True, **arguments))
        return list(result)

    def alltoall_async(
        self,
        tensor: T,
        splits: Any = None,
        *,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        priority: int = 0,
        blocking: bool = False,
    ) -> Handle:
        """Start exchanging rows with all ranks; see :meth:`alltoall`.

        ``synchronize(handle)`` returns the tuple of rows and counts, with ``splits`` and without, as
        Horovod's does.
        """
        return self._start(
            OpKind.ALLTOALL,
            (tensor,),
            name,
            process_set,
            priority,
            blocking,
            tuple,
            numbers=splits_of(splits) or (),
        )

    def alltoall(self, tensor: T, splits: Any = None, **arguments: Any) -> Any:
        """Send consecutive rows of ``tensor`` to the ranks in turn; return what they sent, in order of rank.

        Args:
            tensor: at least one dimension; all but the first are the same on every rank.
            splits: rows for each rank of the process set, whole numbers in one dimension, at most as
                many in all as the tensor has; None: equal parts.
            arguments: name, process_set and priority as for :meth:`allreduce`.

        Returns:
            The received rows; with ``splits`` a tuple of them and the number of rows received from
            each rank, as int32.

        Raises:
            InvalidArgumentError, RankMismatchError, HorovodInternalError: as :meth:`allreduce`.
        """
        received = self.synchronize(self.alltoall_async(tensor, splits, blocking=True, **arguments))
        return received[0] if splits is None else received

    def grouped_reducescatter_async(
        self,
        tensors: Sequence[T],
        *,
        name: str | None = None,
        op: int = ReduceOp.Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        priority: int = 0,
        blocking: bool = False,
        exact_gradient: bool | None = None,
    ) -> Handle:
        """Start the reduction and scattering of several tensors as one operation: all or none."""
        return self._start(
            OpKind.REDUCESCATTER,
            tensors,
            name,
            process_set,
            priority,
            blocking,
            _list,
            op=op,
            prescale=prescale_factor,
            postscale=postscale_factor,
            exact_gradient=exact_gradient,
        )

    def grouped_reducescatter(self, tensors: Sequence[T], **arguments: Any) -> list[T]:
        """Reduce and scatter several tensors as one operation; arguments as :meth:`reducescatter`."""
        result = self.synchronize(self.grouped_reducescatter_async(tensors, blocking=True, **arguments))
        return list(result)

    def reducescatter_async(
        self,
        tensor: T,
        *,
        name: str | None = None,
        op: int = ReduceOp.Average,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        priority: int = 0,
        blocking: bool = False,
        exact_gradient: bool | None = None,
    ) -> Handle:
        """Start the reduction of ``tensor``, of which each rank keeps its rows; see :meth:`reducescatter`."""
        return self._start(
            OpKind.REDUCESCATTER,
            (tensor,),
            name,
            process_set,
            priority,
            blocking,
            _single,
            op=op,
            prescale=prescale_factor,
            postscale=postscale_factor,
            exact_gradient=exact_gradient,
        )

    def reducescatter(self, tensor: T, **arguments: Any) -> T:
        """Reduce ``tensor`` elementwise over the ranks, and return this rank's part of the rows.

        Rows are dealt out in order; when they do not divide, the first ranks get one more.

        Args:
            tensor: at least one dimension; the same shape and dtype on every rank.
            arguments: as for :meth:`allreduce`; Adasum is not possible.

        Raises:
            InvalidArgumentError, RankMismatchError, HorovodInternalError: as :meth:`allreduce`.
        """
        result: T = self.synchronize(self.reducescatter_async(tensor, blocking=True, **arguments))
        return result
