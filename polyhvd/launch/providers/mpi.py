"""Jobs that MPI's launchers start: only MPI knows the ranks and their hosts.

A world of such a job never changes while it runs, since MPI's own cannot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polyhvd.config import MPI_LAUNCHERS, MpiLaunch, Settings, mpi_launch
from polyhvd.errors import HorovodInternalError
from polyhvd.launch.providers.local import PolyhvdrunProvider
from polyhvd.launch.providers.provider import Claim, Met, Provider, readable
from polyhvd.rendezvous.auth import parse_secret
from polyhvd.rendezvous.client import Client
from polyhvd.rendezvous.store import StoreError
from polyhvd.runtime import mpi

__all__ = ["MpiProvider"]


class MpiProvider(Provider):
    """See :class:`polyhvd.launch.providers.provider.Provider`.

    Args:
        comm: a communicator of mpi4py, whose ranks are to meet; None: those of MPI's world.
        ranks: of MPI's world, which are to meet; None: all.
    """

    name = "MPI"
    within = frozenset({"srun", "TF_CONFIG", "CLUSTER_SPEC", "Kubernetes", "SageMaker"})

    def __init__(self, comm: object = None, ranks: Sequence[int] | None = None) -> None:
        self._comm, self._ranks = comm, ranks

    def is_requested(self, settings: Settings, comm: object) -> bool | None:
        """Return whether settings or a communicator request it; POLYHVD_CONTROLLER=gloo excludes it."""
        if mpi.is_communicator(comm) or settings.controller == "mpi" or settings.moves_by_mpi:
            return True
        return False if settings.controller == "gloo" else None

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

    def for_job(self, claim: Claim | None, settings: Settings, comm: object) -> Provider:
        """MPI with these ranks; a world of one rank if a single process was started, and there is no MPI."""
        if (
            claim is not None
            and claim.size == 1  # cluster schedulers set it also for programs that do not use MPI
            and not isinstance(mpi.probe(settings), mpi.Found)
        ):
            return PolyhvdrunProvider().for_job(None, settings, comm)
        if comm is None or mpi.is_communicator(comm):
            return MpiProvider(comm)
        return MpiProvider(ranks=mpi.checked_ranks(comm))

    def meet(self, claim: Claim | None, settings: Settings, after: int, deadline: float) -> Met:
        """Get this rank's place from MPI, and the rendezvous from MPI's rank 0."""
        job = mpi.join(settings, self._comm, self._ranks, after=after)
        if job.endpoint == "":
            is_whole = self._comm is None and self._ranks is None
            return Met(job.placement, None, job, may_be_mistaken=is_whole)
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
        return Met(job.placement, store, job)


def _is_srun(launch: MpiLaunch, environ: Mapping[str, str]) -> bool:
    """Return whether these are the variables of srun's own PMI, and not of an mpirun within its step."""
    if launch.launcher not in ("MPICH", "PMIx") or "SLURM_STEP_ID" not in environ:
        return False
    sizes = (environ.get("SLURM_STEP_NUM_TASKS", ""), "0")
    return environ.get("SLURM_PROCID") == str(launch.rank) and str(launch.size) in sizes
