"""SageMaker's training jobs without a distribution: the program runs once in every container, and is a rank.

Programs that start ranks within the containers (polyhvdrun, MPI, torchrun) come before: they know more.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from polyhvd.config import ConfigError, Settings
from polyhvd.launch import sagemaker
from polyhvd.launch.providers.meeting import MeetingProvider
from polyhvd.launch.providers.provider import Claim, Met

__all__ = ["SageMakerProvider"]

_LOG = logging.getLogger("polyhvd")


class SageMakerProvider(MeetingProvider):
    """Programs that SageMaker, or its training toolkit, has started once in each container of a job.

    The container with the first name is rank 0, as it leads in SageMaker's toolkit.
    """

    name = "SageMaker"

    def detect(self, environ: Mapping[str, str]) -> Claim | None:
        """The number of this container and of all, from the toolkit's variables or SageMaker's file."""
        try:
            found = sagemaker.find_container(environ)
        except ValueError as error:
            raise ConfigError(f"init(): {error}") from None
        if found is None:
            return None
        here, source = found
        return Claim(
            here.number,
            len(here.hosts),
            job_id=f"sagemaker {here.job} {' '.join(here.hosts)}",
            seen=f"{source}: {here.current} of {', '.join(here.hosts)}",
            root=here.hosts[0],
        )

    def meet(self, claim: Claim | None, settings: Settings, after: int, deadline: float) -> Met:
        """See :meth:`MeetingProvider.meet`. GPUs that no rank uses are warned of."""
        gpus = sagemaker.gpu_count()
        if claim is not None and claim.rank == 0 and gpus > 1:
            _LOG.warning(
                "init(): there is one rank in each container, which has %d GPUs; `polyhvdrun --sagemaker "
                "train.py` starts a rank for each",
                gpus,
            )
        return super().meet(claim, settings, after, deadline)
