"""What a process of an elastic job does when its launcher is gone."""

from __future__ import annotations

import socket
import threading
import time
from types import SimpleNamespace

import pytest

from polyhvd.elastic import process
from polyhvd.elastic.limits import RESUME_STATUS
from polyhvd.elastic.places import Seat
from polyhvd.elastic.watch import Watch
from polyhvd.rendezvous.auth import new_secret, parse_secret
from polyhvd.rendezvous.client import Client
from polyhvd.rendezvous.server import Server
from polyhvd.runtime import current

SECRET = parse_secret(new_secret())


class FollowedWorld:
    def __init__(self) -> None:
        self.placement = SimpleNamespace(generation=1)
        self.engine = SimpleNamespace(abort=self._abort)
        self.ended = threading.Event()
        self.reason = ""

    def _abort(self, reason: str) -> None:
        self.reason = reason
        self.ended.set()


def connected(server: Server) -> Client:
    return Client(server.endpoint, SECRET, rank=0, generation=0, deadline=time.monotonic() + 10)


def member_of(server: Server, silence_s: float = 4.0) -> process.Process:
    store, watching = connected(server), connected(server)
    store.probe(silence_s)
    watching.give_up_after(silence_s)
    seat = Seat(store, 0)
    return process.Process(seat, Watch(watching, seat, silence_s))


@pytest.mark.parametrize("followed", ["follow", "nothing"])
def test_world_fails_and_nobody_waits_for_another(followed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current, "on_leave", lambda function: None)
    server = Server(SECRET)
    member = member_of(server)
    world = FollowedWorld()
    if followed == "follow":
        member.watch.follow(world)  # type: ignore[arg-type]
    assert not world.ended.wait(0.2)
    server.close()
    member.watch._thread.join(10)
    assert (world.ended.is_set(), "the launcher is gone" in world.reason) == 2 * (followed == "follow",)
    with pytest.raises(SystemExit) as end:
        member.next_place()
    assert end.value.code == RESUME_STATUS


def test_process_that_waits_for_a_place_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current, "on_leave", lambda function: None)
    server = Server(SECRET)
    member = member_of(server)
    threading.Timer(0.3, server.close).start()
    with pytest.raises(SystemExit) as end:
        member.next_place()
    assert end.value.code == RESUME_STATUS


def test_launcher_that_one_connection_has_lost_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current, "on_leave", lambda function: None)
    server = Server(SECRET)
    try:
        member = member_of(server)
        world = FollowedWorld()
        member.watch.follow(world)  # type: ignore[arg-type]
        time.sleep(4.0)  # so long is not heard what nobody says, but for probes
        member.watch._store._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]
        member.watch._thread.join(10)
        assert not world.ended.is_set()
        assert member.watch.fault == ""
    finally:
        server.close()
    with pytest.raises(SystemExit) as end:
        member.next_place()
    assert end.value.code == RESUME_STATUS
