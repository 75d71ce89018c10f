"""Jobs that MPI's launchers start: MPI alone knows who is which rank, and where.

A world of such a job never changes while it runs, since MPI's own cannot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polyhvd.config import MPI_LAUNCHERS, MpiLaunch, Settings, mpi_launch
from polyhvd.errors import HorovodInternalError
from polyhvd.launch.providers.provider import Claim, readable
from polyhvd.rendezvous.auth import parse_secret
from polyhvd.rendezvous.client import Client
from polyhvd.rendezvous.store import Store, StoreError
from polyhvd.runtime import mpi
from polyhvd.runtime.placement import Placement

__all__ = ["MpiProvider"]


class MpiProvider:
    """See :class:`polyhvd.launch.providers.provider.Provider`."""

    name = "MPI"
    within = frozenset({"srun", "TF_CONFIG", "CLUSTER_SPEC", "Kubernetes", "SageMaker"})

    def __init__(self) -> None:
        #: The ranks to meet: those of a communicator of mpi4py, or some of MPI's world, or all of it.
        self.world: tuple[object, Sequence[int] | None] = (None, None)
        #: How MPI knows those that were met last.
        self.job: mpi.MpiJob | None = None

    def detect(self, environ: Mapping[str, str]) -> Claim | None:
        """That a launcher which speaks MPI's protocols has started this process.

        srun speaks them, too, and its tasks need no MPI to meet.
        """
        for _, rank, size in MPI_LAUNCHERS:
            readable(environ, rank, size)
        launch = mpi_launch(environ)
        if launch is None or _is_srun(launch, environ):
            return None
        return Claim(launch.rank, launch.size or None, seen=launch.seen)

    def meet(
        self, claim: Claim | None, settings: Settings, after: int, deadline: float
    ) -> tuple[Placement, Store | None]:
        """Ask MPI for this rank's place, and meet where its rank 0 says, through MPI."""
        self.job = job = mpi.join(settings, *self.world, after=after)
        if job.endpoint == "":
            return job.placement, None
        try:
            store = Client(
                job.endpoint,
                parse_secret(job.secret),
                rank=job.placement.rank,
                generation=job.placement.generation,
                deadline=deadline,
                server="rank 0",
            )
        except StoreError as error:
            raise HorovodInternalError(f"rank {job.placement.rank}: {error}") from None
        return job.placement, store

    def forget(self) -> None:
        """Close what was met last, if its world has not."""
        if self.job is not None:
            self.job.close()
        self.job = None


def _is_srun(launch: MpiLaunch, environ: Mapping[str, str]) -> bool:
    """Whether these are the variables of srun's own PMI, and not of an mpirun within its step."""
    if launch.launcher not in ("MPICH", "PMIx") or "SLURM_STEP_ID" not in environ:
        return False
    sizes = (environ.get("SLURM_STEP_NUM_TASKS", ""), "0")
    return environ.get("SLURM_PROCID") == str(launch.rank) and str(launch.size) in sizes
