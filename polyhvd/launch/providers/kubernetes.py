"""Indexed Jobs of Kubernetes: each pod is a rank, and rank 0 is found by its name in the headless service.

The index is in the environment, the number of pods is not: the manifest sets it as POLYHVD_SIZE.
https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from dataclasses import replace

from polyhvd.config import ConfigError, Launched, Settings
from polyhvd.launch.providers.meeting import MeetingProvider
from polyhvd.launch.providers.provider import Claim, Met, number, readable, shown
from polyhvd.rendezvous.meeting_points import MeetingPoint

__all__ = ["KubernetesProvider"]

_LOG = logging.getLogger("polyhvd")
_SHOWN = ("JOB_COMPLETION_INDEX", "POLYHVD_SIZE", "HOROVOD_SIZE", "HOSTNAME")


class KubernetesProvider(MeetingProvider):
    """Pods of an Indexed Job."""

    name = "Kubernetes"

    def detect(self, environ: Mapping[str, str]) -> Claim | None:
        """Which pod this is, and of how many if the manifest sets the number."""
        readable(environ, "JOB_COMPLETION_INDEX")
        index = number(environ, "JOB_COMPLETION_INDEX")
        if index is None:
            return None
        size = Launched.from_environment(environ).size
        job = environ.get("HOSTNAME", "").removesuffix(f"-{index}")
        known = any(name in environ for name in ("POLYHVD_SIZE", "HOROVOD_SIZE"))
        return Claim(index, size if known else None, job_id=f"kubernetes {job}", seen=shown(environ, *_SHOWN))

    def meet(self, claim: Claim | None, settings: Settings, after: int, deadline: float) -> Met:
        """Find the pod with index 0. Without a size that one may be alone."""
        if claim is not None and claim.size is None and not claim.rank:
            _LOG.warning(
                "init(): this process may be one of several that Kubernetes has started (%s); it "
                "continues as "
                "a world of one. If there are others, set POLYHVD_SIZE to the completions of the Indexed Job",
                claim.seen,
            )
            claim = replace(claim, size=1)
        return super().meet(claim, settings, after, deadline)

    def meeting_point(self, claim: Claim, settings: Settings, secret: bytes) -> MeetingPoint:
        """A port of the pod with index 0, which has this pod's name but for the index.

        Raises:
            ConfigError: the pod is not named after its index, or there is no secret.
        """
        host, dot, domain = socket.getfqdn().partition(".")
        name, dash, index = host.rpartition("-")
        if not dash or index != str(claim.rank):
            raise ConfigError(
                f"init(): this pod is called {host!r}, and not after its index {claim.rank} ({claim.seen}), "
                "so rank 0 cannot be found by its name (does the pod have hostNetwork?). Set in the "
                f"container's env RANK={claim.rank}, by a fieldRef, WORLD_SIZE={claim.size} and MASTER_ADDR, "
                "the address of rank 0, see: polyhvd docs kubernetes"
            )
        root = f"{name}-0{dot}{domain}"  # HOSTNAME may be anything
        return super().meeting_point(replace(claim, root=root, job_id=f"kubernetes {root}"), settings, secret)

    def _unfound(self, claim: Claim) -> str:
        return (
            "; the pods need a headless service, with publishNotReadyAddresses, whose name is their "
            "subdomain, and parallelism as high as completions"
        )

    def _secret_recipe(self) -> str:
        return (
            "Make a Secret with one:\n"
            '    kubectl create secret generic polyhvd --from-literal=secret="$(openssl rand -hex 32)"\n'
            "and add to the env of the container:\n"
            "    {name: POLYHVD_SECRET, valueFrom: {secretKeyRef: {name: polyhvd, key: secret}}}\n"
            "(or POLYHVD_SECRET_FILE: the name of a file with it; or POLYHVD_TRUST_NETWORK=1 to do without)"
        )
