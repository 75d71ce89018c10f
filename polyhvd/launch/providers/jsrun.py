"""Jobs that LSF's jsrun starts: each task is a rank, with or without MPI.

Variables: https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=jsm-jsrun, "Environment variables". As under
srun, ranks of several hosts meet by a file of mode 0600 in a folder that all hosts see.
"""

from __future__ import annotations

from collections.abc import Mapping

from polyhvd.config import Settings
from polyhvd.launch.providers.meeting import MeetingProvider
from polyhvd.launch.providers.provider import Claim, number, readable, shown
from polyhvd.rendezvous.meeting_points import MeetingPoint

__all__ = ["JsrunProvider"]

_SHOWN = ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "LSB_JOBID")


class JsrunProvider(MeetingProvider):
    """Tasks of a job step of JSM, the job step manager of LSF."""

    name = "jsrun"

    def detect(self, environ: Mapping[str, str]) -> Claim | None:
        """The place in jsrun's variables; None if an mpirun within the task has started this process."""
        readable(environ, "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE")
        rank, size = number(environ, "JSM_NAMESPACE_RANK"), number(environ, "JSM_NAMESPACE_SIZE")
        if rank is None or size is None:
            return None
        mpi = number(environ, "OMPI_COMM_WORLD_RANK"), number(environ, "OMPI_COMM_WORLD_SIZE")
        if None not in mpi and mpi != (rank, size):
            return None
        names = (environ.get(name, "") for name in ("LSB_JOBID", "PMIX_NAMESPACE"))
        return Claim(
            rank,
            size,
            number(environ, "JSM_NAMESPACE_LOCAL_RANK"),
            job_id="lsf " + "-".join(filter(None, names)),
            seen=shown(environ, *_SHOWN),
            one_host=size == number(environ, "JSM_NAMESPACE_LOCAL_SIZE"),
        )

    def meeting_point(self, claim: Claim, settings: Settings, secret: bytes) -> MeetingPoint:
        """On one host a Unix socket, else a file that all hosts see, with a secret that rank 0 makes."""
        return (
            super().meeting_point(claim, settings, secret)
            if claim.one_host
            else self.shared_file(claim, settings)
        )
