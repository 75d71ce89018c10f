"""Operations without tensors: barriers, joining, and process sets that come and go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from polyhvd.collectives.adapter import OpKind
from polyhvd.collectives.operation import process_set_id
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.errors import HorovodInternalError, InvalidArgumentError
from polyhvd.runtime import current
from polyhvd.runtime.world import World

__all__ = ["add_process_set", "barrier", "join", "passing_set", "process_set_of", "remove_process_set"]


def _run_without_tensors(
    world: World, kind: OpKind, set_id: int = 0, root: int = -1, numbers: Sequence[int] = ()
) -> int:
    """Run an operation without tensors, and return the number that it yields."""
    handle = world.engine.submit(
        kind, None, (), None, root=root, process_set=set_id, blocking=True, numbers=list(numbers)
    )
    handle.wait()
    return handle.number


def _world_of(process_set: ProcessSet) -> World:
    return process_set.world or current.world()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank of the process set has called it.

    Args:
        process_set: the ranks that take part, all of which make the call; by default all ranks of the job.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: the process set is unknown, or this rank is not in it.
        HorovodInternalError: a rank was lost or has shut down.

    Example::

        if hvd.rank() == 0:
            download()
        hvd.barrier()  # now it is there for all
    """
    _run_without_tensors(_world_of(process_set), OpKind.BARRIER, process_set_id(process_set))


def join() -> int:
    """Declare that this rank has run out of data; return when all ranks have.

    Meanwhile it takes part in the operations of the others: with zeros in sums and averages (which
    still divide by the number of ranks), with neutral elements in other reductions, without rows in
    allgather and alltoall. It cannot be the root of a broadcast. For process sets that others have added
    meanwhile, it asks :func:`process_set_of` afterwards.

    Returns:
        The rank that joined last: it has seen the most data.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        HorovodInternalError: a rank was lost or has shut down.

    Example::

        for batch in batches:  # as many as this rank has
            train(batch)
        last = hvd.join()
    """
    world = current.world()
    world.has_joined = True
    return _run_without_tensors(world, OpKind.JOIN)


def add_process_set(process_set: ProcessSet | Iterable[int] | Any) -> ProcessSet:
    """Register a process set while the job runs; every rank of the world calls it with the same ranks.

    Args:
        process_set: a new :class:`ProcessSet`, world ranks, or a communicator or group of mpi4py.

    Returns:
        The process set, ready for ``process_set=``.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: these ranks are a process set already, or are not in the world.
        RankMismatchError: the ranks named different sets.

    Example::

        even = hvd.add_process_set(range(0, hvd.size(), 2))
        if even.included():
            hvd.barrier(process_set=even)
    """
    world = current.world()
    added = _with_ranks(process_set, world)
    if added.process_set_id is not None or added.ranks is None:
        raise InvalidArgumentError(f"{added} is registered already, or has no members")
    number = _run_without_tensors(world, OpKind.ADD_PROCESS_SET, numbers=added.ranks)
    world.register(added, number)
    return added


def process_set_of(ranks: Iterable[int] | Any) -> ProcessSet:
    """The registered process set of exactly these ranks; sends nothing.

    So a rank gets one that the others have added while it had joined, to use it, and to remove it with them.
    It knows of what was added before its last operation ended.

    Args:
        ranks: world ranks, in any order, or a communicator or group of mpi4py.

    Raises:
        InvalidArgumentError: there is no such process set.

    Example::

        hvd.join()
        pair = hvd.process_set_of([0, 1])
    """
    world = current.world()
    wanted = _with_ranks(ranks, world)
    sets = world.engine.process_sets()
    numbers = [number for number, known in sets.items() if known == wanted.ranks]
    if not numbers:
        raise InvalidArgumentError(
            f"process_set_of({wanted.ranks}): there is no such process set; pass it to "
            "init(process_sets=[...]) or add_process_set()"
        )
    return (
        global_process_set if numbers[0] == 0 else world.registered_as(numbers[0], ProcessSet(wanted.ranks))
    )


def _with_ranks(process_set: ProcessSet | Iterable[int] | Any, world: World) -> ProcessSet:
    """A process set that knows its ranks, unless this rank is not in its communicator."""
    known = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if known.members is not None:
        known.ranks = world.ranks_of(known.members) or None
    return known


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a process set; every rank of the world calls it. Its pending operations fail.

    A rank that had joined while the others removed the set may call it without them, or not at all.

    Args:
        process_set: one of ``init(process_sets=[...])`` or ``add_process_set()``.

    Returns:
        Whether it was registered. The global process set cannot be removed.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        RankMismatchError: the ranks named different sets.
        HorovodInternalError: a rank was lost or has shut down.

    Example::

        even = hvd.add_process_set(range(0, hvd.size(), 2))
        hvd.remove_process_set(even)
    """
    number = process_set.process_set_id
    if number is None or number == 0:
        return False
    world = _world_of(process_set)
    is_there = number in world.engine.process_sets()
    if is_there:
        _run_without_tensors(world, OpKind.REMOVE_PROCESS_SET, root=number)
    world.unregister(process_set)
    return is_there


@contextmanager
def passing_set(ranks: Sequence[int]) -> Iterator[ProcessSet]:
    """A process set for a block; every rank of the world enters and leaves it, members or not.

    A rank that leaves waits until all have done so: if it shut down, the others' operations would fail. The
    next world of an elastic job does not have the set.

    Args:
        ranks: world ranks in ascending order, the same on every rank.

    Raises:
        HorovodInternalError: a rank was lost or has shut down.

    Example::

        with passing_set([0, 3]) as pair:
            if pair.included():
                hvd.broadcast(x, root_rank=0, process_set=pair)
    """
    world = current.world()
    members = list(ranks)
    there = [number for number, known in world.engine.process_sets().items() if known == members]
    if there:
        yield world.registered_as(there[0], ProcessSet(members))
        return
    number = _run_without_tensors(world, OpKind.ADD_PROCESS_SET, numbers=members)
    world.passing_sets.add(number)
    found = world.registered_as(number, ProcessSet(members))
    try:
        yield found
    except BaseException:
        with suppress(HorovodInternalError):  # the world has failed, and the set with it
            world.engine.submit(OpKind.REMOVE_PROCESS_SET, None, (), None, root=number)
        raise
    else:
        with suppress(HorovodInternalError):  # the block is done, even if a rank is lost meanwhile
            _run_without_tensors(world, OpKind.REMOVE_PROCESS_SET, root=number)
    finally:
        world.unregister(found)
