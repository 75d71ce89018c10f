"""Jobs of torchrun, and of what sets the same variables: `accelerate launch`, SageMaker's torch_distributed,
a Kubeflow PyTorchJob, or a script by hand.

torchrun's agent, or rank 0 itself when it calls ``init_process_group``, listens on MASTER_PORT with a store
of torch's. polyhvd meets elsewhere, so that no rank has to import torch, or to know its protocol,
which is another one from version to version: within a host at a Unix socket, between hosts on a port
that follows from the run's id and MASTER_PORT, on MASTER_ADDR, where rank 0 is in either case.
"""

from __future__ import annotations

from collections.abc import Mapping

from polyhvd.launch.providers.meeting import MeetingProvider
from polyhvd.launch.providers.provider import Claim, number, readable, shown
from polyhvd.rendezvous.network import is_loopback

__all__ = ["TorchVariablesProvider", "TorchrunProvider"]

_SHOWN = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


class TorchrunProvider(MeetingProvider):
    """Ranks that an agent of torchrun has started.

    Variables: https://docs.pytorch.org/docs/stable/elastic/run.html, "Environment Variables". Between hosts
    agents may count restarts differently, since each counts its own; they kill their ranks before they
    start others, so old ones answer nowhere.
    """

    name = "torchrun"
    within = frozenset(
        ("CLUSTER_SPEC", "Kubernetes", "MPI", "SageMaker", "TF_CONFIG", "jsrun", "srun", "torch.distributed")
    )
    secret_hint = "before torchrun, on every host"

    def detect(self, environ: Mapping[str, str]) -> Claim | None:
        """The place in the agent's variables; None if there is no agent."""
        return _claim(environ) if "TORCHELASTIC_RUN_ID" in environ else None


class TorchVariablesProvider(MeetingProvider):
    """Ranks described only by torch.distributed's variables: ``init_method="env://"``.

    https://docs.pytorch.org/docs/stable/distributed.html, "Environment variable initialization".
    """

    name = "torch.distributed"
    within = frozenset({"SageMaker"})

    def detect(self, environ: Mapping[str, str]) -> Claim | None:
        """The place in these variables; None if only one of RANK and WORLD_SIZE is set."""
        return None if "TORCHELASTIC_RUN_ID" in environ else _claim(environ)


def _claim(environ: Mapping[str, str]) -> Claim | None:
    if ("MASTER_ADDR" in environ or "TORCHELASTIC_RUN_ID" in environ) and "RANK" in environ:
        readable(environ, "RANK", "WORLD_SIZE")
    rank, size = number(environ, "RANK"), number(environ, "WORLD_SIZE")
    if rank is None or size is None:
        return None
    root = environ.get("MASTER_ADDR", "")
    on_host = number(environ, "LOCAL_WORLD_SIZE")
    return Claim(
        rank,
        size,
        number(environ, "LOCAL_RANK"),
        job_id=f"torch {environ.get('TORCHELASTIC_RUN_ID', '')} {environ.get('MASTER_PORT', '')}",
        restart=number(environ, "TORCHELASTIC_RESTART_COUNT") or 0,
        seen=shown(environ, *_SHOWN),
        one_host=size == on_host or (on_host is None and is_loopback(root)),
        root=root,
    )
