"""Every collective, written once over an adapter.

The framework modules give these methods their own signatures; averaging, naming, scaling and
what a handle means are decided here.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from polyhvd import _core, context
from polyhvd.adapter import Capability, FrameworkAdapter, Handle, OpKind, ReduceOp
from polyhvd.errors import InvalidArgumentError
from polyhvd.process_sets import ProcessSet, global_process_set

__all__ = ["Call", "Collectives", "barrier", "names_of", "process_set_id", "resolve_op"]

T = TypeVar("T")

_REDUCTIONS = frozenset(ReduceOp) - {ReduceOp.Adasum}
_SUM: int = ReduceOp.Sum  # looking a member up costs as much as the call
_AVERAGE: int = ReduceOp.Average


def resolve_op(op: int | None, average: bool | None = None) -> int:
    """The reduction that Horovod's ``op`` and older ``average`` arguments mean; Average by default."""
    if op is None:
        return _SUM if average is False else _AVERAGE
    if average is not None:
        raise InvalidArgumentError("op and average exclude each other; pass op alone")
    if op not in _REDUCTIONS:
        raise InvalidArgumentError(f"op={op!r}: expected Average, Sum, Min, Max or Product")
    return op


def process_set_id(process_set: ProcessSet) -> int:
    """Number of a registered process set."""
    number = process_set.process_set_id
    if number is None:
        raise InvalidArgumentError(f"{process_set} is not registered; pass it to init(process_sets=[...])")
    return number


class Call:
    """One collective, for the adapter; see :class:`polyhvd.adapter.Operation`."""

    __slots__ = ("blocking", "kind", "name", "op", "postscale", "prescale", "priority", "process_set", "root")

    def __init__(
        self,
        kind: int,
        name: str,
        op: int = ReduceOp.Sum,
        root: int = -1,
        prescale: float = 1.0,
        postscale: float = 1.0,
        process_set: int = 0,
        priority: int = 0,
        blocking: bool = False,
    ) -> None:
        self.kind = kind
        self.name = name
        self.op = op
        self.root = root
        self.prescale = prescale
        self.postscale = postscale
        self.process_set = process_set
        self.priority = priority
        self.blocking = blocking


class _Slots:
    """Names for calls without one, such as ``allreduce.noname.0``.

    A name is free again once its handle was synchronized. Programs that make the same calls in the
    same order get the same names on every rank, and the same ones in every step, so that the
    response cache knows them. A handle that is dropped keeps its name for good.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._lock = threading.Lock()
        self._free: list[tuple[int, str]] = []  # a heap: the lowest, in whatever order they came back
        self._used = 0

    def take(self) -> str:
        with self._lock:
            if self._free:
                return heapq.heappop(self._free)[1]
            self._used += 1
            return f"{self._kind}.noname.{self._used - 1}"

    def give_back(self, name: str) -> None:
        with self._lock:
            heapq.heappush(self._free, (int(name.rpartition(".")[2]), name))


# By kind and process set: members of a set agree on its names whatever they do in others.
_slots: dict[tuple[OpKind, int], _Slots] = {}


def names_of(kind: OpKind, process_set: int) -> _Slots:
    """Names for calls without one, of a kind and on a process set."""
    slots = _slots.get((kind, process_set))
    if slots is None:
        slots = _slots.setdefault((kind, process_set), _Slots(kind.name.lower()))
    return slots


# Handles that were never synchronized may have kept other names on each rank.
context.on_engine_change(lambda _: _slots.clear())


class _Ticket:
    """What the API remembers in a handle: the name it lent, and whether the caller passed a list."""

    __slots__ = ("lent", "single", "slots")

    def __init__(self, slots: _Slots | None, lent: str, single: bool) -> None:
        self.slots = slots  # None: the caller gave the name
        self.lent = lent
        self.single = single


class Collectives(Generic[T]):
    """The collectives of one framework. Stateless but for the adapter; thread-safe."""

    def __init__(self, adapter: FrameworkAdapter[T]) -> None:
        self.adapter = adapter
        self._direct = Capability.DIRECT in adapter.capabilities

    def _run_direct(
        self,
        kind: OpKind,
        tensor: T,
        name: str | None,
        op: int,
        root: int,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        priority: int,
    ) -> bool:
        """Run a blocking in-place call in one step of the core; False when it must be done by parts."""
        set_id = 0 if process_set is global_process_set else process_set_id(process_set)
        slots = None
        if name is None:
            slots = names_of(kind, set_id)
            name = slots.take()
        try:
            engine = context.engine()
            _core.run(engine, kind, name, tensor, op, root, prescale, postscale, set_id, priority)
        except BufferError:  # not dense
            return False
        finally:
            if slots is not None:
                slots.give_back(name)
        return True

    def _start(
        self,
        kind: OpKind,
        tensors: Sequence[T],
        out: Sequence[T] | None,
        name: str | None,
        op: int,
        root: int,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        priority: int,
        blocking: bool,
        single: bool,
    ) -> Handle:
        context.engine()
        set_id = 0 if process_set is global_process_set else process_set_id(process_set)
        slots = None
        if name is None:
            slots = names_of(kind, set_id)
            name = slots.take()
        call = Call(
            kind,
            name,
            op,
            root,
            prescale,
            postscale,
            set_id,
            priority,
            blocking,
        )
        try:
            handle = self.adapter.submit(call, tensors, out)
        except BaseException:
            if slots is not None:
                slots.give_back(name)
            raise
        handle.slot = _Ticket(slots, name, single)
        return handle

    def synchronize(self, handle: Handle) -> Any:
        """Wait for an operation; return its output, or list of outputs for a grouped one.

        Raises what it failed with. May be called again: the result stays.
        """
        ticket = handle.slot
        try:
            handle.wait()
        except BaseException:
            if handle.done():  # not when the wait was interrupted
                self._give_back(handle)
            raise
        self._give_back(handle)
        if ticket is not None:
            finish = handle.finish
            if finish is not None:
                handle.result = finish(handle)
                handle.finish = None
            if ticket.single:
                handle.result = handle.result[0]
        return handle.result

    @staticmethod
    def _give_back(handle: Handle) -> None:
        ticket, handle.slot = handle.slot, None
        if ticket is not None and ticket.slots is not None:
            ticket.slots.give_back(ticket.lent)

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
        tensors = (tensor,)
        out = tensors if in_place else None
        return self._start(
            OpKind.ALLREDUCE,
            tensors,
            out,
            name,
            op,
            -1,
            prescale_factor,
            postscale_factor,
            process_set,
            priority,
            blocking,
            True,
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
            name: matches the calls of the ranks; without one the order of calls does.
            op: Average (default), Sum, Min, Max or Product.
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
        if (
            in_place
            and self._direct
            and self._run_direct(
                OpKind.ALLREDUCE,
                tensor,
                name,
                op,
                -1,
                prescale_factor,
                postscale_factor,
                process_set,
                priority,
            )
        ):
            return tensor
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
            tensors if in_place else None,
            name,
            op,
            -1,
            prescale_factor,
            postscale_factor,
            process_set,
            priority,
            blocking,
            False,
        )

    def allgather_async(
        self,
        tensor: T,
        *,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        priority: int = 0,
        blocking: bool = False,
    ) -> Handle:
        """Start the concatenation of the ranks' tensors; see :meth:`allgather`."""
        return self._start(
            OpKind.ALLGATHER,
            (tensor,),
            None,
            name,
            ReduceOp.Sum,
            -1,
            1.0,
            1.0,
            process_set,
            priority,
            blocking,
            True,
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
    ) -> Handle:
        """Start copying the root's tensor to all ranks; see :meth:`broadcast`."""
        tensors = (tensor,)
        return self._start(
            OpKind.BROADCAST,
            tensors,
            tensors if in_place else None,
            name,
            ReduceOp.Sum,
            root_rank,
            1.0,
            1.0,
            process_set,
            priority,
            blocking,
            True,
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
        if (
            in_place
            and self._direct
            and self._run_direct(
                OpKind.BROADCAST, tensor, name, ReduceOp.Sum, root_rank, 1.0, 1.0, process_set, priority
            )
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


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the process set has called it."""
    set_id = process_set_id(process_set)
    slots = names_of(OpKind.BARRIER, set_id)
    name = slots.take()
    try:
        context.engine().submit(OpKind.BARRIER, name, (), None, process_set=set_id, blocking=True).wait()
    finally:
        slots.give_back(name)
