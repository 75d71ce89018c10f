"""Detects launchers whose jobs polyhvd cannot join, and that have started this process as one of several.

Pure: a mapping of environment variables in, a description out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from polyhvd.launch.providers.provider import number, readable

__all__ = ["Foreign", "foreign_launch"]

_BY_POLYHVDRUN = "start the ranks with `polyhvdrun -np {n} python ...`"
_BY_MPI = "start the ranks with MPI's `mpirun -np {n} python ...`, whose library has to be found"


@dataclass(frozen=True)
class Foreign:
    """A sign that this process is one of several, and how they would become the ranks of a job."""

    launcher: str
    seen: str  # the variables with their values
    size: int  # 0: unknown
    cure: str
    rank: int = 0

    @property
    def certain(self) -> bool:
        """Whether there are others; if not, there may be."""
        return self.size > 1 or self.rank > 0

    def __str__(self) -> str:
        number = f"one of {self.size}" if self.size else "one of several"
        known = "is" if self.certain else "may be"
        return f"this process {known} {number} that {self.launcher} has started ({self.seen})"


_Look = Callable[[Mapping[str, str]], "Foreign | None"]


def foreign_launch(environ: Mapping[str, str], *, met_by_mpi: bool = False) -> Foreign | None:
    """The nearest other launcher's job that this process is one of several of; None: there is none.

    The first one with a size counts: a process of one is a single rank. ``met_by_mpi``: MPI has reported a
    world of one rank, so this is one if MPI's launcher sets no size. Without that, MPI's launchers are among
    them: their jobs are joined only through MPI.
    """
    for look in _LAUNCHERS:
        found = look(environ)
        if found is not None and (found.size > 0 or found.certain or not met_by_mpi):
            return None if found.size == 1 else found
    return None


def _by_rank_and_size(launcher: str, rank_name: str, size_name: str, cure: str) -> _Look:
    """A launcher that sets the rank and, unless ``size_name`` is empty, the number of processes."""

    def look(environ: Mapping[str, str]) -> Foreign | None:
        rank, size = number(environ, rank_name), number(environ, size_name)
        if rank is None:
            return None
        seen = ", ".join(f"{name}={environ[name]}" for name in (rank_name, size_name) if name in environ)
        return Foreign(launcher, seen, size or 0, cure.format(n=size or "N"), rank)

    return look


def _mxnet(environ: Mapping[str, str]) -> Foreign | None:
    if environ.get("DMLC_ROLE", "worker") != "worker" or "DMLC_NUM_WORKER" not in environ:
        return None
    readable(environ, "DMLC_WORKER_ID", "DMLC_NUM_WORKER")
    given = {"DMLC_WORKER_ID": "0", **environ}  # workers without one ask the scheduler
    return _by_rank_and_size("MXNet's launcher", "DMLC_WORKER_ID", "DMLC_NUM_WORKER", _BY_POLYHVDRUN)(given)


#: The nearest first. Variables: Open MPI's and Hydra's manuals, PMIx's standard; ps-lite.
_LAUNCHERS: tuple[_Look, ...] = (
    _by_rank_and_size("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", _BY_MPI),
    _by_rank_and_size("MPI's launcher", "PMI_RANK", "PMI_SIZE", _BY_MPI),
    _by_rank_and_size("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", _BY_MPI),
    _by_rank_and_size("a launcher that speaks PMIx", "PMIX_RANK", "", _BY_MPI),
    _mxnet,
)
