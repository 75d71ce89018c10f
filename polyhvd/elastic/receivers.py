"""Which ranks receive tensors in a sync: only those that do not have the newest commit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

from polyhvd.collectives.membership import passing_set
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.errors import InvalidArgumentError
from polyhvd.runtime import current, gpu

__all__ = ["UNCOMMITTED", "Version", "exchange", "has_gpus", "lacking", "newest", "require_alike"]

#: The number of the last commit of a rank that has not committed.
UNCOMMITTED = -1


class Version(NamedTuple):
    """Which values a rank has: those of two ranks are the same if they have the same known version."""

    commits: int  #: number of its last commit
    is_commit: bool  #: whether its values are those of that commit
    #: The world that all its ranks have left between two steps, and after which of them since the commit.
    boundary: tuple[int, int] | None
    is_adapted: bool = False  #: whether functions of the user may have changed the values since

    @property
    def is_known(self) -> bool:
        """Whether it is known after which step the values were taken."""
        return self.commits != UNCOMMITTED and (self.is_commit or self.boundary is not None)

    @property
    def after_sync(self) -> int:
        """The number of the commit that these values become when they are synced.

        Values that are not those of the last commit get a new number, since a rank may fail before it has
        received them.
        """
        is_same = self.is_commit and not self.is_adapted and self.commits != UNCOMMITTED
        return self.commits if is_same else self.commits + 1


def newest(versions: Sequence[Version]) -> int:
    """The rank that sends its values: the lowest one of those with the newest commit."""
    commits = [version.commits for version in versions]
    return commits.index(max(commits))


def lacking(versions: Sequence[Version], root: int) -> list[int]:
    """The ranks that may not have the values of this one.

    Functions of the user may have changed values differently on each rank: then all others receive them.
    """
    known = versions[root].is_known and not versions[root].is_adapted
    return [
        rank
        for rank, version in enumerate(versions)
        if rank != root and not (known and version == versions[root])
    ]


def require_alike(names: dict[int, list[str]], root: int) -> None:
    """Raise InvalidArgumentError on all ranks if their states have different attributes."""
    for rank, mine in names.items():
        if mine != names[root]:
            raise InvalidArgumentError(
                f"rank {rank}'s state has the attributes {mine}, and rank {root}'s {names[root]}: run the "
                "same program on every rank, and make variables before the state"
            )


@contextmanager
def exchange(root: int, receivers: Sequence[int], *, gpus: bool) -> Iterator[ProcessSet | None]:
    """The process set of a rank and of those that receive from it; None where this rank is in neither role.

    Every rank calls it, with the same arguments.

    Args:
        root: the rank that sends.
        receivers: the ranks that receive.
        gpus: whether tensors may be on GPUs. Then all ranks take part: NCCL would create a communicator for
            a smaller process set, which takes longer than it saves.

    Raises:
        HorovodInternalError: a rank was lost or has shut down.
    """
    place = current.world().placement
    if not receivers:
        yield None
    elif gpus or len(receivers) == place.size - 1:
        yield global_process_set
    else:
        with passing_set(sorted([root, *receivers])) as among:
            yield among if among.included() else None


@cache
def has_gpus() -> bool:
    """Return whether this process could have tensors on GPUs. Touches none."""
    return isinstance(gpu.probe_cuda(), gpu.Found)
