"""Actors of Ray as ranks: the driver gives each its place by a call, so that no environment has the secret.

Nothing here imports Ray where it is not in use: :mod:`polyhvd.ray` makes the calls.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from polyhvd.config import ConfigError, Launched, Settings
from polyhvd.errors import HorovodInternalError
from polyhvd.launch.providers.provider import Claim, Met, Provider
from polyhvd.rendezvous import network
from polyhvd.rendezvous.auth import parse_secret
from polyhvd.rendezvous.client import Client
from polyhvd.rendezvous.server import Server
from polyhvd.rendezvous.store import StoreError
from polyhvd.runtime.placement import Placement

__all__ = ["RANKED", "Assignment", "RayProvider"]

#: Namespace of Ray's internal key-value store that has the ids of actors that were made ranks.
RANKED = b"polyhvd ranks"


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
        """The place that the driver has given or will give.

        Raises:
            ConfigError: Ray has restarted this actor since it was given a place, which is lost.
        """
        if self.elastic is not None:
            return Claim(seen="the driver of an elastic job has started it")
        if self._given is None:
            if "RAY_RAYLET_PID" in environ and "ray" in sys.modules:
                _refuse_restarted_actor()
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


def _refuse_restarted_actor() -> None:
    """Raise ConfigError if this is a new process of an actor that was made a rank."""
    ray: Any = importlib.import_module("ray")
    actor = ray.get_runtime_context().get_actor_id() if ray.is_initialized() else None
    if actor is None:
        return
    store: Any = importlib.import_module("ray.experimental.internal_kv")
    if store._internal_kv_exists(actor, namespace=RANKED):
        raise ConfigError(
            f"init(): Ray has restarted this actor ({actor}) since polyhvd.ray.rendezvous() made it a rank, "
            "and the new process has no rank. Call rendezvous() with all actors again before init(), or set "
            "POLYHVD_ALONE=1 for a world of one rank"
        )
