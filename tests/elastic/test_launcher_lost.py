"""What a process of an elastic job does when its launcher is gone."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from polyhvd.config import Launched
from polyhvd.elastic import process
from polyhvd.elastic.limits import RESUME_STATUS
from polyhvd.elastic.places import LauncherConnection, PlaceReply, lost_scope, notice_scope, place_scope
from polyhvd.elastic.watch import LauncherWatch
from polyhvd.rendezvous.auth import new_secret, parse_secret
from polyhvd.rendezvous.client import Client
from polyhvd.rendezvous.server import Server
from polyhvd.runtime import current

SECRET = parse_secret(new_secret())
SILENCE_S = 4.0  # after which a launcher is given up


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


def end(watch: LauncherWatch) -> None:
    """End its thread, which is always busy if the launcher is gone while it follows no world."""
    watch._store.close()
    watch._ring()
    watch._thread.join(10)
    assert not watch._thread.is_alive()


@pytest.fixture
def member_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Server], process.Process]]:
    """``member_of(server)`` is a member of a job with this rendezvous."""
    monkeypatch.setattr(current, "on_leave", lambda function: None)
    watches: list[LauncherWatch] = []

    def member_of(server: Server) -> process.Process:
        store, watching = connected(server), connected(server)
        store.probe(SILENCE_S)
        watching.give_up_after(SILENCE_S)
        launcher = LauncherConnection(store, 0)
        watches.append(LauncherWatch(watching, launcher, SILENCE_S))
        return process.Process(Launched(), SECRET, launcher, watches[-1])

    yield member_of
    for watch in watches:
        end(watch)


MemberOf = Callable[[Server], process.Process]


@pytest.mark.parametrize("followed", ["follow", "nothing"])
def test_world_fails_and_nobody_waits_for_another(followed: str, member_of: MemberOf) -> None:
    server = Server(SECRET)
    member = member_of(server)
    world = FollowedWorld()
    if followed == "follow":
        member.watch.follow(world)  # type: ignore[arg-type]
    assert not world.ended.wait(0.2)
    server.close()
    member.watch._thread.join(10)
    assert not member.watch._thread.is_alive(), "without a world it would read nothing, and wake up for ever"
    assert (world.ended.is_set(), "the launcher is gone" in world.reason) == 2 * (followed == "follow",)
    with pytest.raises(SystemExit) as ended:
        member.next_place()
    assert ended.value.code == RESUME_STATUS


def test_requests_of_a_process_do_not_expire_in_a_job_of_weeks(
    member_of: MemberOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher's messages, and rank 0's notice of a change, would not arrive any more."""
    server = Server(SECRET)
    expired = server._values.expired
    monkeypatch.setattr(server._values, "expired", lambda now: expired(now + 1e7))
    try:
        member, world = member_of(server), FollowedWorld()
        member.watch.follow(world)  # type: ignore[arg-type]
        server.post(place_scope(0, 0), 0, PlaceReply(1, [0]).encoded())
        member.next_place()
        assert not world.ended.wait(0.3)
        assert not member.launcher.has_notice()
        server.post(lost_scope(1), 0, b"rank 1 has died")
        assert world.ended.wait(10)
        assert world.reason == "rank 1 has died"
        server.post(notice_scope(1), 0, b"")
        until = time.monotonic() + 10
        while not member.launcher.has_notice():
            assert time.monotonic() < until
            time.sleep(0.01)
    finally:
        server.close()


def test_process_that_waits_for_a_place_ends(member_of: MemberOf) -> None:
    asked = threading.Event()
    server = Server(SECRET, observe=lambda *_: asked.set())
    member = member_of(server)

    def close() -> None:
        asked.wait(10)
        server.close()

    closing = threading.Thread(target=close)
    closing.start()
    with pytest.raises(SystemExit) as ended:
        member.next_place()
    closing.join()
    assert asked.is_set()
    assert ended.value.code == RESUME_STATUS


def test_launcher_that_one_connection_has_lost_is_not_gone(member_of: MemberOf) -> None:
    server = Server(SECRET)
    try:
        member = member_of(server)
        world = FollowedWorld()
        member.watch.follow(world)  # type: ignore[arg-type]
        time.sleep(SILENCE_S)  # only probes keep the connections from being given up
        member.watch._store._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]
        member.watch._thread.join(10)
        assert not world.ended.is_set()
        assert member.watch.fault == ""
    finally:
        server.close()
    with pytest.raises(SystemExit) as ended:
        member.next_place()
    assert ended.value.code == RESUME_STATUS
