"""Groups of ranks that communicate among themselves."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from polyhvd.errors import InvalidArgumentError, NotInitializedError
from polyhvd.runtime import current

if TYPE_CHECKING:
    from polyhvd.runtime.world import World

__all__ = ["ProcessSet", "global_process_set"]


class ProcessSet:
    """Some ranks of the job, for collectives among them.

    Pass it to ``init(process_sets=[...])`` or to ``add_process_set()``, then to ``process_set=``.

    Args:
        ranks_or_comm: world ranks, in any order, or a communicator or group of mpi4py.

    Raises:
        InvalidArgumentError: there is no rank, or what is given is none.

    Example::

        even = hvd.ProcessSet([0, 2])
        hvd.init(process_sets=[even])
        if even.included():
            hvd.allreduce(x, process_set=even)
    """

    def __init__(self, ranks_or_comm: Any) -> None:
        is_mpi = hasattr(ranks_or_comm, "Get_group") or hasattr(ranks_or_comm, "Translate_ranks")
        ranks = None if is_mpi else _ranks(ranks_or_comm)
        #: A communicator or group of mpi4py. Its ranks are known once the world is.
        self.members: Any = ranks_or_comm if is_mpi else None
        #: World ranks of the members, in ascending order; None while they are not known.
        self.ranks: list[int] | None = ranks
        #: None while the set is not registered.
        self.process_set_id: int | None = None
        #: The world in which it is registered; None for the set of all ranks, which is in each.
        self.world: World | None = None
        if not is_mpi and not ranks:
            raise InvalidArgumentError("a process set needs at least one rank")

    @property
    def mpi_comm(self) -> Any:
        """The communicator of mpi4py that the set was made of, or None."""
        return self.members

    def _registered(self) -> tuple[World, list[int]]:
        if self.process_set_id is None:
            raise NotInitializedError(
                f"{self} is not registered; pass it to init(process_sets=[...]) on every rank"
            )
        world = self.world or current.world()
        return world, list(range(world.placement.size)) if self.process_set_id == 0 else self.ranks or []

    def included(self) -> bool:
        """Return whether this process is a member."""
        world, ranks = self._registered()
        return world.placement.rank in ranks

    def rank(self) -> int:
        """Position of this process in the set, or -1 when it is not a member."""
        world, ranks = self._registered()
        return ranks.index(world.placement.rank) if world.placement.rank in ranks else -1

    def size(self) -> int:
        """Number of members."""
        return len(self._registered()[1])

    def __deepcopy__(self, memo: object) -> ProcessSet:
        """The set itself: a copy of a layer or an optimizer communicates in the same one."""
        return self

    def __reduce__(self) -> str | tuple[type[ProcessSet], tuple[list[int]]]:
        """A set comes back unregistered; that of all ranks as itself."""
        return (ProcessSet, (self.ranks or [],))

    def __repr__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"
        )


def _ranks(given: Any) -> list[int]:
    """In ascending order, each once, whatever kinds of integers they are."""
    try:
        return sorted({operator.index(rank) for rank in given})
    except TypeError:
        raise InvalidArgumentError(
            f"ProcessSet({given!r}): expected a list of ranks, or a communicator of mpi4py"
        ) from None


class _World(ProcessSet):
    """The set of all ranks: those of the running job, whichever that is."""

    def __init__(self) -> None:
        self.members = None
        self.process_set_id = 0
        self.world = None

    @property
    def ranks(self) -> list[int] | None:  # type: ignore[override]
        """All ranks; None before ``init()``."""
        world = current.find()
        return None if world is None else list(range(world.placement.size))

    @property
    def mpi_comm(self) -> Any:
        """The communicator of mpi4py that ``init(comm=...)`` was called with, or None."""
        world = current.find()
        return None if world is None or world.met_by_mpi is None else world.met_by_mpi.world[0]

    def __reduce__(self) -> str:
        return "global_process_set"


global_process_set: ProcessSet = _World()
"""The process set of all ranks."""
