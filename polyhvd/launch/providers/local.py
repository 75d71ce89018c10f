"""Jobs of polyhvdrun, on this host and on others: each rank has its place in environment variables.

Those of elastic jobs: :mod:`polyhvd.launch.providers.elastic`.
A process without any of them is a job with one rank.
"""

from __future__ import annotations

from collections.abc import Mapping

from polyhvd.config import ConfigError, Launched, Settings
from polyhvd.errors import HorovodInternalError
from polyhvd.launch.providers.meeting import given_secret
from polyhvd.launch.providers.provider import Claim, Met, Provider, shown
from polyhvd.launch.providers.torchrun import TorchrunProvider
from polyhvd.rendezvous.client import Client
from polyhvd.rendezvous.store import Store, StoreError
from polyhvd.runtime.placement import Placement

__all__ = ["AloneProvider", "PolyhvdrunProvider", "meet_as"]

_SHOWN = ("POLYHVD_RANK", "POLYHVD_SIZE", "HOROVOD_RANK", "HOROVOD_SIZE", "POLYHVD_RENDEZVOUS")


class PolyhvdrunProvider(Provider):
    """See :class:`polyhvd.launch.providers.provider.Provider`."""

    name = "polyhvdrun"
    within = frozenset((TorchrunProvider.name, *TorchrunProvider.within))

    def detect(self, environ: Mapping[str, str]) -> Claim | None:
        """The place in polyhvdrun's variables; None if polyhvdrun has not started this process."""
        launched = Launched.from_environment(environ)
        is_from_manifest = not launched.rendezvous and "JOB_COMPLETION_INDEX" in environ
        if not launched.by_polyhvdrun or is_from_manifest:
            return None
        return Claim(launched.rank, launched.size, launched.local_rank, seen=shown(environ, *_SHOWN))

    def for_job(self, claim: Claim | None, settings: Settings, comm: object) -> Provider:
        """The provider of an elastic job's members in such a job, else this one."""
        launched = Launched.from_environment()
        if launched.member is None:
            return super().for_job(claim, settings, comm)
        from polyhvd.launch.providers.elastic import MemberProvider  # no other job needs it

        return MemberProvider(launched).for_job(claim, settings, comm)

    def meet(self, claim: Claim | None, settings: Settings, after: int, deadline: float) -> Met:
        """The place in the launcher's variables, and the store that the launcher serves."""
        placement, store = meet_as(Launched.from_environment(), after, deadline)
        return Met(placement, store, may_be_mistaken=claim is None)


class AloneProvider(Provider):
    """A world of one rank on purpose, whatever the environment says: ``POLYHVD_ALONE=1``."""

    name = "POLYHVD_ALONE"

    def is_requested(self, settings: Settings, comm: object) -> bool | None:
        """Return whether the settings request it."""
        return settings.alone and comm is None

    def detect(self, environ: Mapping[str, str]) -> Claim | None:
        """None: the settings request it."""
        return None

    def meet(self, claim: Claim | None, settings: Settings, after: int, deadline: float) -> Met:
        """A world of one rank."""
        return Met(Placement(generation=after + 1), None)


def meet_as(launched: Launched, after: int, deadline: float) -> tuple[Placement, Store | None]:
    """See :meth:`PolyhvdrunProvider.meet`, with a rank's variables as an argument."""
    placement = _placement(launched, after + 1)
    if placement.size == 1:
        return placement, None
    if not launched.rendezvous:
        raise ConfigError(f"POLYHVD_SIZE={launched.size} needs POLYHVD_RENDEZVOUS; start with polyhvdrun")
    secret, rank = given_secret(launched), placement.rank
    if not secret:
        raise ConfigError("POLYHVD_SECRET: the job's secret must have at least 16 bytes; there is none")
    try:
        store = Client(
            launched.rendezvous, secret, rank=rank, generation=placement.generation, deadline=deadline
        )
    except StoreError as error:
        raise HorovodInternalError(f"rank {rank}: {error}") from None
    return placement, store


def _placement(launched: Launched, generation: int) -> Placement:
    try:
        return Placement(
            generation=generation,
            rank=launched.rank,
            size=launched.size,
            local_rank=launched.local_rank,
            local_size=max(launched.local_size, launched.local_rank + 1),
            cross_rank=launched.cross_rank,
            cross_size=max(launched.cross_size, launched.cross_rank + 1),
            host=launched.host_id,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
