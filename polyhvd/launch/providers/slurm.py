"""Jobs that srun starts: each task of a step is a rank.

A batch script has SLURM_PROCID and SLURM_NTASKS, too, and is not a rank: only tasks of a step have
SLURM_STEP_NUM_TASKS. Ranks of several hosts meet by a file of mode 0600 in a folder that all hosts see,
by default below the home folder: it has the address of rank 0, whatever names the hosts are known by, and the
job's secret, so the user has to create none. With a secret of the user's no shared folder is needed.
"""

from __future__ import annotations

from collections.abc import Mapping

from polyhvd.config import ConfigError, Settings
from polyhvd.launch.providers.meeting import MeetingProvider
from polyhvd.launch.providers.nodelist import expand
from polyhvd.launch.providers.provider import Claim, number, readable, shown
from polyhvd.rendezvous.meeting_points import MeetingPoint

__all__ = ["SlurmProvider"]

_SHOWN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID")


class SlurmProvider(MeetingProvider):
    """Tasks of a job step, plain or with PMI. Variables: srun(1), "OUTPUT ENVIRONMENT VARIABLES"."""

    name = "srun"

    def detect(self, environ: Mapping[str, str]) -> Claim | None:
        """The place in srun's variables; None for a batch script, and the shell of salloc."""
        if "SLURM_STEP_NUM_TASKS" in environ:
            readable(environ, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
        rank, size = number(environ, "SLURM_PROCID"), number(environ, "SLURM_STEP_NUM_TASKS")
        if rank is None or size is None or "SLURM_STEP_ID" not in environ:
            return None
        names = (environ.get(name, "") for name in ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID"))
        nodes = environ.get("SLURM_STEP_NODELIST", "")
        try:
            root = next(iter(expand(nodes)), "")
        except ValueError as error:
            raise ConfigError(f"SLURM_STEP_NODELIST: {error}") from None
        return Claim(
            rank,
            size,
            number(environ, "SLURM_LOCALID"),
            job_id="slurm " + "-".join(filter(None, names)),
            restart=number(environ, "SLURM_RESTART_COUNT") or 0,
            seen=shown(environ, *_SHOWN),
            one_host=number(environ, "SLURM_STEP_NUM_NODES") == 1,
            root=root,
        )

    def meeting_point(self, claim: Claim, settings: Settings, secret: bytes) -> MeetingPoint:
        """On one host a Unix socket; else the user's secret and a port, or a file that all hosts see."""
        if claim.one_host or secret or settings.trust_network:
            return super().meeting_point(claim, settings, secret)
        return self.shared_file(claim, settings)
