"""What a process of an elastic job does when its launcher is gone."""

from __future__ import annotations

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
    client = Client(server.endpoint, SECRET, rank=0, generation=0, deadline=time.monotonic() + 10)
    client.give_up_after(4.0)
    return client


@pytest.mark.parametrize("followed", ["follow", "nothing"])
def test_world_fails_and_nobody_waits_for_another(followed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current, "on_leave", lambda function: None)
    server = Server(SECRET)
    member = process.Process(Seat(connected(server), 0), Watch(connected(server), 0))
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
    member = process.Process(Seat(connected(server), 0), Watch(connected(server), 0))
    threading.Timer(0.3, server.close).start()
    with pytest.raises(SystemExit) as end:
        member.next_place()
    assert end.value.code == RESUME_STATUS
