"""Every collective, written once over an adapter.

The framework modules give these methods their own signatures; averaging, naming, scaling and
what a handle means are decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar

from polyhvd import _core
from polyhvd.collectives.adapter import Capability, FrameworkAdapter, Handle, OpKind, ReduceOp
from polyhvd.collectives.membership import barrier
from polyhvd.collectives.operation import Call, process_set_id, resolve_op, splits_of
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.runtime import current
from polyhvd.runtime.world import World

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "Arguments",
    "Collectives",
    "CopyArguments",
    "ReductionArguments",
    "ScatterArguments",
    "barrier",
    "process_set_id",
    "resolve_op",
    "splits_of",
]

T = TypeVar("T")
R = TypeVar("R")


class Arguments(TypedDict, total=False):
    """Keyword arguments of every collective; :mod:`.table` has the texts and defaults of all these."""

    name: str | None
    process_set: ProcessSet
    priority: int


class CopyArguments(Arguments, total=False):
    """Keyword arguments of allgather and broadcast, whose gradients are sums over the ranks."""

    exact_gradient: bool | None


class ReductionArguments(Arguments, total=False):
    """Keyword arguments of every reduction besides its operation."""

    prescale_factor: float
    postscale_factor: float


class ScatterArguments(ReductionArguments, total=False):
    """Keyword arguments of reducescatter besides its operation."""

    exact_gradient: bool | None


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
        #: As given; None: whichever is current.
        self.in_world = world
        #: Whether the core reads and writes dense tensors itself.
        self.is_direct = Capability.DIRECT in adapter.capabilities

    @property
    def world(self) -> World:
        """In which they are; raises NotInitializedError where there is none."""
        return self.in_world or current.world()

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
        """The result of ``call``, the core's ``run`` or ``start``; None when it must be done by parts.

        Adapters call it first, and by position: for a small tensor, arguments cost what the collective does.
        """
        if not self.is_direct:
            return None
        world = self.in_world or current.world()
        set_id = 0 if process_set is global_process_set else process_set_id(process_set, world)
        try:
            return call(world.engine, kind, name, tensor, op, root, prescale, postscale, set_id, priority)
        except BufferError:  # not dense
            return None

    def _start(
        self,
        kind: OpKind,
        tensors: Sequence[T],
        unpack: Callable[[Any], Any],
        out: Sequence[T] | None = None,
        blocking: bool = False,
        name: str | None = None,
        op: int = ReduceOp.Sum,  # read once, when this is defined
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        priority: int = 0,
        *,
        root: int = -1,
        numbers: Sequence[int] = (),
        exact_gradient: bool | None = None,
    ) -> Handle:
        world = self.in_world or current.world()
        set_id = 0 if process_set is global_process_set else process_set_id(process_set, world)
        call = Call(
            world,
            kind,
            name,
            op,
            root,
            prescale_factor,
            postscale_factor,
            set_id,
            priority,
            blocking,
            numbers,
            exact_gradient,
        )
        handle = self.adapter.submit(call, tensors, out)
        handle.slot = unpack
        return handle

    def synchronize(self, handle: Handle[R]) -> R:
        """Wait for an operation; return its output, or list of outputs for a grouped one.

        Raises what it failed with. May be called again: the result stays.
        """
        handle.wait()
        unpack, handle.slot = handle.slot, None
        if unpack is None:  # or done before
            done: R = handle.result
            return done
        finish = handle.finish
        if finish is not None:
            handle.result = finish(handle)
            handle.finish = None
        result: R = unpack(handle.result)
        handle.result = result
        return result

    def result(self, handle: Handle) -> Any:
        """The result of ``synchronize()``, without waiting; for frameworks whose reads wait by themselves."""
        unpack = handle.slot
        return handle.result if unpack is None else unpack(handle.result)

    def poll(self, handle: Handle) -> bool:
        """Return whether ``synchronize()`` would return without waiting."""
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
    ) -> Handle[T]:
        """Start the elementwise reduction of ``tensor`` over the ranks; ``in_place``: into itself.

        Raises:
            InvalidArgumentError: a bad call; nothing was sent.
            RankMismatchError: the ranks' tensors or arguments differ; from ``synchronize()``.
            HorovodInternalError: a rank was lost, or the engine was shut down; from ``synchronize()``.
        """
        if in_place and self.is_direct and not blocking and self.adapter.is_plain(tensor):
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
        return self._start(
            _ALLREDUCE,
            tensors,
            _single,
            tensors if in_place else None,
            blocking,
            name,
            op,
            prescale_factor,
            postscale_factor,
            process_set,
            priority,
        )

    def grouped_allreduce_async(
        self,
        tensors: Sequence[T],
        *,
        in_place: bool = False,
        blocking: bool = False,
        op: int = ReduceOp.Average,
        **arguments: Unpack[ReductionArguments],
    ) -> Handle[list[T]]:
        """Start the reduction of several tensors as one operation: all or none."""
        out = tensors if in_place else None
        return self._start(OpKind.ALLREDUCE, tensors, _list, out=out, blocking=blocking, op=op, **arguments)

    def allgather_async(
        self, tensor: T, *, blocking: bool = False, **arguments: Unpack[CopyArguments]
    ) -> Handle[T]:
        """Start the concatenation of the ranks' tensors along the first dimension, in order of rank."""
        return self._start(OpKind.ALLGATHER, (tensor,), _single, blocking=blocking, **arguments)

    def grouped_allgather_async(
        self, tensors: Sequence[T], *, blocking: bool = False, **arguments: Unpack[CopyArguments]
    ) -> Handle[list[T]]:
        """Start gathering several tensors as one operation: all or none."""
        return self._start(OpKind.ALLGATHER, tensors, _list, blocking=blocking, **arguments)

    def broadcast_async(
        self,
        tensor: T,
        root_rank: int,
        *,
        in_place: bool = False,
        blocking: bool = False,
        **arguments: Unpack[CopyArguments],
    ) -> Handle[T]:
        """Start copying the root's tensor to all ranks; ``in_place``: into the tensor itself."""
        tensors = (tensor,)
        out = tensors if in_place else None
        return self._start(
            OpKind.BROADCAST, tensors, _single, out=out, blocking=blocking, root=root_rank, **arguments
        )

    def alltoall_async(
        self,
        tensor: T,
        splits: Any = None,
        *,
        blocking: bool = False,
        **arguments: Unpack[Arguments],
    ) -> Handle[tuple[T, T]]:
        """Start sending consecutive rows of ``tensor`` to the ranks in turn; ``splits``: how many to each.

        ``synchronize(handle)`` returns the tuple of rows and counts, with ``splits`` and without, as
        Horovod's does.
        """
        numbers = splits_of(splits) or ()
        return self._start(OpKind.ALLTOALL, (tensor,), tuple, blocking=blocking, numbers=numbers, **arguments)

    def reducescatter_async(
        self,
        tensor: T,
        *,
        blocking: bool = False,
        op: int = ReduceOp.Average,
        **arguments: Unpack[ScatterArguments],
    ) -> Handle[T]:
        """Start the reduction of ``tensor``, of which each rank keeps its part of the rows, in order.

        If they do not divide evenly, the first ranks get one more.
        """
        return self._start(OpKind.REDUCESCATTER, (tensor,), _single, blocking=blocking, op=op, **arguments)

    def grouped_reducescatter_async(
        self,
        tensors: Sequence[T],
        *,
        blocking: bool = False,
        op: int = ReduceOp.Average,
        **arguments: Unpack[ScatterArguments],
    ) -> Handle[list[T]]:
        """Start the reduction and scattering of several tensors as one operation: all or none."""
        return self._start(OpKind.REDUCESCATTER, tensors, _list, blocking=blocking, op=op, **arguments)
