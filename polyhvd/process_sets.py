"""Groups of ranks that communicate among themselves."""

from __future__ import annotations

from typing import Any

from polyhvd.errors import InvalidArgumentError, NotInitializedError

__all__ = ["ProcessSet", "global_process_set"]


class ProcessSet:
    """The given ranks, or the members of a communicator or group of mpi4py. Pass it to
    ``init(process_sets=[...])`` or to ``add_process_set()``, then to ``process_set=`` of operations.

    Example::

        even = hvd.ProcessSet([0, 2])
        hvd.init(process_sets=[even])
        if even.included():
            hvd.allreduce(x, process_set=even)
    """

    def __init__(self, ranks_or_comm: Any) -> None:
        is_mpi = hasattr(ranks_or_comm, "Get_group") or hasattr(ranks_or_comm, "Translate_ranks")
        #: A communicator or group of mpi4py. Its ranks are known once the world is.
        self.members: Any = ranks_or_comm if is_mpi else None
        self.ranks: list[int] | None = None if is_mpi else sorted(set(ranks_or_comm))
        #: None while the set is not registered.
        self.process_set_id: int | None = None
        if not is_mpi and not self.ranks:
            raise InvalidArgumentError("a process set needs at least one rank")

    def _registered(self) -> list[int]:
        from polyhvd import context

        if self.process_set_id is None:
            raise NotInitializedError(
                f"{self} is not registered; pass it to init(process_sets=[...]) on every rank"
            )
        context.engine()
        return list(range(context.config().size)) if self.ranks is None else self.ranks

    def included(self) -> bool:
        """Whether this process is a member."""
        from polyhvd import context

        return context.config().rank in self._registered()

    def rank(self) -> int:
        """Position of this process in the set, or -1 when it is not a member."""
        from polyhvd import context

        ranks = self._registered()
        world_rank = context.config().rank
        return ranks.index(world_rank) if world_rank in ranks else -1

    def size(self) -> int:
        """Number of members."""
        return len(self._registered())

    def __deepcopy__(self, memo: object) -> ProcessSet:
        """The set itself: a copy of a layer or an optimizer communicates in the same one."""
        return self

    def __reduce__(self) -> str | tuple[type[ProcessSet], tuple[list[int]]]:
        """The set of all ranks comes back as itself; others come back unregistered."""
        return "global_process_set" if self.ranks is None else (ProcessSet, (self.ranks,))

    def __repr__(self) -> str:
        ranks = self.ranks or ("all" if self.members is None else "those of MPI")
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={ranks})"


def _make_global() -> ProcessSet:
    world = ProcessSet([0])
    world.ranks = None
    world.process_set_id = 0
    return world


#: All ranks.
global_process_set = _make_global()
