"""Members of polyhvdrun's elastic jobs: the launcher sends each its place, for every generation."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from polyhvd.config import ConfigError, Launched, Settings
from polyhvd.elastic.places import LauncherConnection
from polyhvd.elastic.process import become_member
from polyhvd.elastic.watch import LauncherWatch
from polyhvd.errors import HorovodInternalError
from polyhvd.launch.providers.meeting import given_secret
from polyhvd.launch.providers.provider import Claim, Met
from polyhvd.rendezvous.client import Client
from polyhvd.rendezvous.store import StoreError, job_name

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


class MemberProvider:
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
    within: frozenset[str] = frozenset()

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
        launched, member = self._launched, self._launched.member or 0
        try:

            def connect() -> LauncherConnection:
                store = self._connected(launched.rendezvous, member, 0, deadline)
                store.probe(launched.launcher_timeout_s)
                return LauncherConnection(store, member)

            def watch(launcher: LauncherConnection) -> LauncherWatch:
                store = self._connected(launched.rendezvous, member, 0, deadline)
                store.give_up_after(launched.launcher_timeout_s)
                return LauncherWatch(store, launcher, launched.launcher_timeout_s)

            process = become_member(connect, watch)
            answer = process.next_place()
            placement = answer.placement(member)
            if self._own_gpus and self._gpus:
                visible = visible_gpus(self._own_gpus, self._gpus, placement.local_rank)
                os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
                self._gpus = []  # CUDA reads the variable once
            if placement.size == 1:
                return Met(placement, None)
            until = time.monotonic() + settings.start_timeout_s
            endpoint = answer.rendezvous or launched.rendezvous
            store = self._connected(endpoint, placement.rank, placement.generation, until)
            store.job = job_name("elastic", self._secret)  # over all generations, wherever their members meet
        except StoreError as error:
            raise HorovodInternalError(f"process {member} of this elastic job: {error}") from None
        return Met(placement, store)

    def _connected(self, endpoint: str, rank: int, generation: int, deadline: float) -> Client:
        return Client(endpoint, self._secret, rank=rank, generation=generation, deadline=deadline)
