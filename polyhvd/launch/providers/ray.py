"""Actors of Ray as ranks: the driver gives each its place by a call, so that no environment has the secret.

Nothing here needs Ray: :mod:`polyhvd.ray` makes the calls.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from polyhvd.config import Launched, Settings
from polyhvd.errors import HorovodInternalError
from polyhvd.launch.providers.provider import Claim, Met, Provider
from polyhvd.rendezvous import network
from polyhvd.rendezvous.auth import parse_secret
from polyhvd.rendezvous.client import Client
from polyhvd.rendezvous.server import Server
from polyhvd.rendezvous.store import StoreError
from polyhvd.runtime.placement import Placement

__all__ = ["Assignment", "RayProvider"]


@dataclass(frozen=True)
class Assignment:
    """A rank's place in its job, as the driver gives it.

    Args:
        placement: with the latest generation of a process of the job; the first world has the next one.
        endpoint: of the store that rank 0 serves.
        secret: the job's, in hexadecimal.
    """

    placement: Placement
    endpoint: str
    secret: str = field(repr=False)


class RayProvider(Provider):
    """See :class:`polyhvd.launch.providers.provider.Provider`.

    Args:
        within: as of providers: whatever has started the nodes of the cluster.
    """

    name = "Ray"

    def __init__(self, within: frozenset[str]) -> None:
        self.within = within
        self._given: Assignment | None = None
        self._server: Server | None = None
        #: Of a process of an elastic job: what gives it its places, and what it was started with.
        self.elastic: Provider | None = None
        self.elastic_launched: Launched | None = None

    def serve(self, secret: str, address: str) -> str:
        """Serve the store of a job in rank 0's process, until the next one; returns its endpoint.

        Args:
            secret: the job's.
            address: of this host, which POLYHVD_GLOO_IFACE overrides.
        """
        interface = Settings.from_environment().interface
        if self._server is not None:
            self._server.close()
        self._server = Server(parse_secret(secret), network.address_of(interface) if interface else address)
        return self._server.endpoint

    def give(self, assignment: Assignment) -> None:
        """Make this process a rank, for each ``init()`` to come."""
        self._given = assignment

    def join_elastic(self, provider: Provider, launched: Launched) -> None:
        """Make this process one of an elastic job.

        Args:
            provider: gives it its places.
            launched: the driver's address, the job's secret, and the number of the process.
        """
        self.elastic, self.elastic_launched = provider, launched

    @staticmethod
    def set_variables(variables: Mapping[str, str]) -> None:
        """Set environment variables of this process, before it uses a framework."""
        os.environ.update(variables)

    @staticmethod
    def variables() -> dict[str, str]:
        """The environment variables of this process."""
        return dict(os.environ)

    def detect(self, environ: Mapping[str, str]) -> Claim | None:
        """The place that the driver has given or will give, regardless of the environment."""
        if self.elastic is not None:
            return Claim(seen="the driver of an elastic job has started it")
        if self._given is None:
            return None
        place = self._given.placement
        return Claim(place.rank, place.size, place.local_rank, seen="the driver has assigned it")

    def for_job(self, claim: Claim | None, settings: Settings, comm: object) -> Provider:
        """The provider of the places of a process of an elastic job, else this one."""
        if self.elastic is not None:
            return self.elastic.for_job(claim, settings, comm)
        return super().for_job(claim, settings, comm)

    def meet(self, claim: Claim | None, settings: Settings, after: int, deadline: float) -> Met:
        """The place, and the store that rank 0 serves."""
        assert self._given is not None
        given = self._given
        placement = replace(given.placement, generation=max(after, given.placement.generation) + 1)
        if placement.size == 1:
            return Met(placement, None)
        try:
            store = Client(
                given.endpoint,
                parse_secret(given.secret),
                rank=placement.rank,
                generation=placement.generation,
                deadline=deadline,
                server="rank 0",
            )
        except StoreError as error:
            raise HorovodInternalError(f"rank {placement.rank}: {error}") from None
        return Met(placement, store)
