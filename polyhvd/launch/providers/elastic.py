"""Members of polyhvdrun's elastic jobs: the launcher tells each its place, for each generation anew."""

from __future__ import annotations

import time

from polyhvd.config import ConfigError, Launched, Settings
from polyhvd.elastic.places import Seat
from polyhvd.elastic.process import take_seat
from polyhvd.elastic.watch import Watch
from polyhvd.errors import HorovodInternalError
from polyhvd.launch.providers.meeting import given_secret
from polyhvd.rendezvous.client import Client
from polyhvd.rendezvous.store import Store, StoreError, job_name
from polyhvd.runtime.placement import Placement

__all__ = ["meet_as_member"]


def meet_as_member(launched: Launched, settings: Settings, deadline: float) -> tuple[Placement, Store | None]:
    """The place in the next world, for which a member waits as long as the job lives, and the store there.

    Raises:
        ConfigError: the launcher's variables are not whole.
        HorovodInternalError: the launcher cannot be reached.
        SystemExit: the job is over, or does not need this process any more; or the launcher is gone.
    """
    member, secret = launched.member, given_secret(launched)
    if member is None or not launched.rendezvous or not secret:
        raise ConfigError("POLYHVD_MEMBER needs POLYHVD_RENDEZVOUS and POLYHVD_SECRET; start with polyhvdrun")
    try:

        def seated() -> Seat:
            store = _connected(launched.rendezvous, secret, member, 0, deadline)
            store.probe(launched.launcher_timeout_s)
            return Seat(store, member)

        def watch(seat: Seat) -> Watch:
            store = _connected(launched.rendezvous, secret, member, 0, deadline)
            store.give_up_after(launched.launcher_timeout_s)
            return Watch(store, seat, launched.launcher_timeout_s)

        process = take_seat(seated, watch)
        answer = process.next_place()
        placement = answer.placement(member)
        if placement.size == 1:
            return placement, None
        until = time.monotonic() + settings.start_timeout_s
        endpoint = answer.rendezvous or launched.rendezvous
        store = _connected(endpoint, secret, placement.rank, placement.generation, until)
        store.job = job_name("elastic", secret)  # over all generations, wherever their members meet
    except StoreError as error:
        raise HorovodInternalError(f"process {member} of this elastic job: {error}") from None
    return placement, store


def _connected(endpoint: str, secret: bytes, rank: int, generation: int, deadline: float) -> Client:
    return Client(endpoint, secret, rank=rank, generation=generation, deadline=deadline)
