"""Members of polyhvdrun's elastic jobs: the launcher sends each its place, for every generation.

``init()`` gets the first one here; the next ones are up to :meth:`polyhvd.elastic.process.Process.rejoin`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from polyhvd.config import ConfigError, Launched, Settings
from polyhvd.elastic.process import become_member, find
from polyhvd.launch.providers.meeting import given_secret
from polyhvd.launch.providers.provider import Claim, Met, Provider

__all__ = ["MemberProvider", "visible_gpus"]


def visible_gpus(own: Sequence[str], gpus: Sequence[str], local_rank: int) -> list[str]:
    """The GPUs of a host in an order in which that at the place ``local_rank`` is the rank's own.

    Args:
        own: ids of the rank's GPUs.
        gpus: ids of those of the host, as far as they are known.
        local_rank: of the rank when it first gets a place.
    """
    others = [gpu for gpu in gpus if gpu not in own]
    return [*others[:local_rank], *own, *others[local_rank:]]


def _listed(devices: str) -> list[str]:
    return list(filter(None, devices.split(",")))


class MemberProvider(Provider):
    """See :class:`polyhvd.launch.providers.provider.Provider`.

    Programs choose a GPU by their local rank, which the first place says. So the first place also determines
    the order of the GPUs that the process sees.

    Args:
        launched: the launcher's variables of this process, which is a member.
        gpus: ids of those that are reserved for this process, and of those that it may see; None: those of
            ``launched``.

    Raises:
        ConfigError: it is not whole.
    """

    name = "polyhvdrun"

    def __init__(self, launched: Launched, gpus: tuple[Sequence[str], Sequence[str]] | None = None) -> None:
        self._launched, self._secret = launched, given_secret(launched)
        own, seen = gpus or (_listed(launched.devices), _listed(launched.host_devices))
        self._own_gpus, self._gpus = list(own), list(seen)
        if not launched.rendezvous or not self._secret:
            raise ConfigError(
                "POLYHVD_MEMBER needs POLYHVD_RENDEZVOUS and POLYHVD_SECRET; start with polyhvdrun"
            )

    def detect(self, environ: Mapping[str, str]) -> Claim | None:
        """That this process is a rank, the provider of polyhvdrun's other jobs finds out."""
        return None

    def meet(self, claim: Claim | None, settings: Settings, after: int, deadline: float) -> Met:
        """The place in the next world and its store; a member waits for them as long as the job lives.

        Raises:
            HorovodInternalError: the launcher cannot be reached.
            SystemExit: the job is over, or does not need this process any more; or the launcher is gone.
        """
        process = become_member(self._launched, self._secret, deadline)
        placement, store = process.join(settings)
        if self._own_gpus and self._gpus:
            visible = visible_gpus(self._own_gpus, self._gpus, placement.local_rank)
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
            self._gpus = []  # CUDA reads the variable once
        return Met(placement, store, member=process)

    def may_try_again(self, reason: str) -> bool:
        """Return whether the launcher has given this process a place: others may die while they meet."""
        member = find()
        if member is None or member.launcher.reply.generation == 0:
            return False
        member.fail(reason)
        return True
