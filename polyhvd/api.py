"""Every collective, written once over an adapter.

The framework modules give these methods their own signatures; averaging, naming, scaling and
what a handle means are decided here.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from polyhvd import _core, context
from polyhvd.adapter import Capability, FrameworkAdapter, Handle, OpKind, ReduceOp
from polyhvd.errors import InvalidArgumentError
from polyhvd.process_sets import ProcessSet, global_process_set

__all__ = [
    "Call",
    "Collectives",
    "add_process_set",
    "barrier",
    "join",
    "names_of",
    "process_set_id",
    "remove_process_set",
    "resolve_op",
    "splits_of",
]

T = TypeVar("T")

_REDUCTIONS = frozenset(ReduceOp)
_SUM: int = ReduceOp.Sum  # looking a member up costs as much as the call
_AVERAGE: int = ReduceOp.Average


def resolve_op(op: int | None, average: bool | None = None) -> int:
    """The reduction that Horovod's ``op`` and older ``average`` arguments mean; Average by default."""
    if op is None:
        return _SUM if average is False else _AVERAGE
    if average is not None:
        raise InvalidArgumentError("op and average exclude each other; pass op alone")
    if op not in _REDUCTIONS:
        raise InvalidArgumentError(f"op={op!r}: expected Average, Sum, Adasum, Min, Max or Product")
    return op


def process_set_id(process_set: ProcessSet) -> int:
    """Number of a registered process set."""
    number = process_set.process_set_id
    if number is None:
        raise InvalidArgumentError(
            f"{process_set} is not registered; pass it to init(process_sets=[...]) or add_process_set()"
        )
    return number


def splits_of(splits: Any) -> list[int] | None:
    """Rows for each rank, from a list, an array or a tensor of integers; None for equal parts."""
    if splits is None:
        return None
    values = splits.tolist() if hasattr(splits, "tolist") else splits
    if not isinstance(values, Iterable):
        values = [values]
    rows = list(values)
    if not rows or not all(isinstance(row, int) and not isinstance(row, bool) for row in rows):
        raise InvalidArgumentError(
            f"splits={splits!r}: expected one whole number of rows for each rank, in one dimension"
        )
    return rows


class Call:
    """One collective, for the adapter; see :class:`polyhvd.adapter.Operation`."""

    __slots__ = (
        "blocking",
        "kind",
        "name",
        "numbers",
        "op",
        "postscale",
        "prescale",
        "priority",
        "process_set",
        "root",
    )

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
        numbers: Sequence[int] = (),
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
        self.numbers = numbers


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


def _single(outputs: Sequence[Any]) -> Any:
    return outputs[0]


def _list(outputs: Sequence[Any]) -> Sequence[Any]:
    return outputs


class _Ticket:
    """What the API remembers in a handle: the name it lent, and what the caller gets of the outputs."""

    __slots__ = ("lent", "slots", "unpack")

    def __init__(self, slots: _Slots | None, lent: str, unpack: Callable[[Any], Any]) -> None:
        self.slots = slots  # None: the caller gave the name
        self.lent = lent
        self.unpack = unpack


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
        unpack: Callable[[Any], Any],
        numbers: Sequence[int] = (),
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
            numbers,
        )
        try:
            handle = self.adapter.submit(call, tensors, out)
        except BaseException:
            if slots is not None:
                slots.give_back(name)
            raise
        handle.slot = _Ticket(slots, name, unpack)
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
            handle.result = ticket.unpack(handle.result)
        return handle.result

    @staticmethod
    def _give_back(handle: Handle) -> None:
        ticket, handle.slot = handle.slot, None
        if ticket is not None and ticket.slots is not None:
            ticket.slots.give_back(ticket.lent)

    def result(self, handle: Handle) -> Any:
        """What ``synchronize()`` returns, without waiting; for frameworks whose reads wait by themselves."""
        ticket = handle.slot
        return handle.result if ticket is None else ticket.unpack(handle.result)

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
            _single,
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
            _list,
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
            _single,
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
            _single,
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
    ) -> Handle:
        """Start gathering several tensors as one operation: all or none."""
        return self._start(
            OpKind.ALLGATHER,
            tensors,
            None,
            name,
            ReduceOp.Sum,
            -1,
            1.0,
            1.0,
            process_set,
            priority,
            blocking,
            _list,
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
        """Start exchanging rows with all ranks; see :meth:`alltoall`."""
        rows = splits_of(splits)
        return self._start(
            OpKind.ALLTOALL,
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
            _single if rows is None else tuple,
            rows or (),
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
        return self.synchronize(self.alltoall_async(tensor, splits, blocking=True, **arguments))

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
    ) -> Handle:
        """Start the reduction and scattering of several tensors as one operation: all or none."""
        return self._start(
            OpKind.REDUCESCATTER,
            tensors,
            None,
            name,
            op,
            -1,
            prescale_factor,
            postscale_factor,
            process_set,
            priority,
            blocking,
            _list,
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
    ) -> Handle:
        """Start the reduction of ``tensor``, of which each rank keeps its rows; see :meth:`reducescatter`."""
        return self._start(
            OpKind.REDUCESCATTER,
            (tensor,),
            None,
            name,
            op,
            -1,
            prescale_factor,
            postscale_factor,
            process_set,
            priority,
            blocking,
            _single,
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


def _run_alone(kind: OpKind, set_id: int = 0, root: int = -1, numbers: Sequence[int] = ()) -> int:
    """Run an operation without tensors, and return the number that it yields."""
    slots = names_of(kind, set_id)
    name = slots.take()
    try:
        handle = context.engine().submit(
            kind, name, (), None, root=root, process_set=set_id, blocking=True, numbers=list(numbers)
        )
        handle.wait()
    finally:
        slots.give_back(name)
    return handle.number


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the process set has called it."""
    _run_alone(OpKind.BARRIER, process_set_id(process_set))


def join() -> int:
    """Say that this rank has run out of data; return when all ranks have.

    Meanwhile it takes part in the operations of the others: with zeros in sums and averages (which
    still divide by the number of ranks), with neutral elements in other reductions, without rows in
    allgather and alltoall. It cannot be the root of a broadcast.

    Returns:
        The rank that joined last: it has seen the most data.
    """
    return _run_alone(OpKind.JOIN)


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set while the job runs; every rank of the world calls it with the same ranks.

    Args:
        process_set: a new :class:`ProcessSet`, or world ranks.

    Returns:
        The process set, ready for ``process_set=``.

    Raises:
        InvalidArgumentError: these ranks are a process set already, or are not in the world.
        RankMismatchError: the ranks named different sets.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if added.process_set_id is not None or added.ranks is None:
        raise InvalidArgumentError(f"{added} is registered already")
    number = _run_alone(OpKind.ADD_PROCESS_SET, numbers=added.ranks)
    context.register(added, number)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a process set; every rank of the world calls it. Its pending operations fail.

    Returns:
        Whether it was registered. The global process set cannot be removed.
    """
    number = process_set.process_set_id
    if number is None or number == 0:
        return False
    _run_alone(OpKind.REMOVE_PROCESS_SET, root=number)
    context.unregister(process_set)
    for key in [key for key in _slots if key[1] == number]:
        _slots.pop(key, None)
    return True
