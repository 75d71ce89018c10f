"""Jobs that MPI's launchers start: MPI alone knows who is which rank, and where.

A world of such a job never changes while it runs, since MPI's own cannot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polyhvd.config import Settings, mpi_launch
from polyhvd.errors import HorovodInternalError
from polyhvd.launch.providers.provider import Claim
from polyhvd.rendezvous.auth import parse_secret
from polyhvd.rendezvous.client import Client
from polyhvd.rendezvous.store import Store, StoreError
from polyhvd.runtime import mpi
from polyhvd.runtime.placement import Placement

__all__ = ["MpiProvider"]


class MpiProvider:
    """See :class:`polyhvd.launch.providers.provider.Provider`."""

    name = "MPI"

    def __init__(self) -> None:
        #: The ranks to meet: those of a communicator of mpi4py, or some of MPI's world, or all of it.
        self.world: tuple[object, Sequence[int] | None] = (None, None)
        #: How MPI knows those that were met last.
        self.job: mpi.MpiJob | None = None

    def detect(self, environ: Mapping[str, str]) -> Claim | None:
        """That a launcher which speaks MPI's protocols has started this process."""
        launch = mpi_launch(environ)
        return None if launch is None else Claim(size=launch.size or None)

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
            )
        except StoreError as error:
            raise HorovodInternalError(f"rank {job.placement.rank}: {error}") from None
        return job.placement, store

    def forget(self) -> None:
        """Close what was met last, if its world has not."""
        if self.job is not None:
            self.job.close()
        self.job = None
