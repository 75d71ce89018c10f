"""polyhvd's own server, beyond what every store keeps to: strangers find nothing, and nothing is left."""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from launching import wait_until

from polyhvd.rendezvous import signed_stream
from polyhvd.rendezvous.auth import new_secret, parse_secret
from polyhvd.rendezvous.client import Client
from polyhvd.rendezvous.network import parse_endpoint
from polyhvd.rendezvous.server import Server
from polyhvd.rendezvous.store import StoreError

SECRET = parse_secret(new_secret())


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(SECRET) as server:
        yield server


def client(server: Server, rank: int = 0, secret: bytes = SECRET) -> Client:
    return Client(server.endpoint, secret, rank=rank, generation=1, deadline=time.monotonic() + 60)


def test_own_values_live_as_long_as_their_connection(server: Server) -> None:
    with client(server) as staying:
        with client(server) as leaving:
            assert leaving.gather("a", 1, 10, own=(0, b"mine")) == [b"mine"]
            leaving.put("b", 0, b"mine too", own=True)
            leaving.put("c", 0, b"kept")
            assert staying.gather("c", 1, 10) == [b"kept"]
        wait_until(lambda: server._values.scopes == {"c": {0: b"kept"}}, "the end of own values")
        assert staying.gather("a", 1, 10, own=(0, b"next")) == [b"next"]


def test_gather_waits_again_for_a_rank_that_died_and_came_back(server: Server) -> None:
    with client(server) as waiting:
        with client(server, 1) as dying:
            dying.post_gather("a", 2, 10, own=(1, b"old"))
            wait_until(lambda: 1 in server._values.scopes.get("a", {}), "the old value")
            request = waiting.post_gather("a", 2, 10)
        wait_until(lambda: "a" not in server._values.scopes, "its end")
        waiting.put("a", 0, b"zero")
        with client(server, 1) as restarted:
            assert restarted.gather("a", 2, 10, own=(1, b"new")) == [b"zero", b"new"]
            wait_until(lambda: waiting.take(request) == [b"zero", b"new"], "both")


def test_answers_to_requests_that_were_abandoned_are_kept_nowhere(server: Server) -> None:
    with client(server) as waiting, client(server, 1) as other:
        late, early = (waiting.post_gather(scope, 1, 60) for scope in ("late", "early"))
        other.put("early", 0, b"")
        wait_until(lambda: (waiting._receive(), early in waiting._replies)[1], "an answer")
        waiting.abandon(early)
        waiting.abandon(late)
        other.put("late", 0, b"")
        wait_until(lambda: (waiting._receive(), not waiting._abandoned)[1], "the other answer")
        assert not waiting._replies
        assert waiting.gather("late", 1, 10) == [b""]


def test_waiters_of_a_lost_client_are_forgotten(server: Server) -> None:
    with client(server) as c:
        c.post_gather("never", 1, 1000)
        c.put("flag", 0, b"")
        c.gather("flag", 1, 10)
    wait_until(lambda: not server._values._gathers, "forgetting")


def test_large_values_pass(server: Server) -> None:
    value = os.urandom(1 << 22)
    with client(server) as c, client(server) as other:
        c.put("large", 0, value)
        assert other.gather("large", 1, 10) == [value]


def test_client_says_of_which_job_it_is_and_where(server: Server) -> None:
    digest = hashlib.sha256(f"{server.endpoint} {SECRET.hex()}".encode()).hexdigest()
    with client(server) as c:
        assert c.job == f"job-{digest[:16]}"
        assert c.secret == SECRET
        assert c.address == "127.0.0.1"


def test_answer_that_is_too_long_costs_who_asked_and_nobody_else(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client(server, 0) as asking, client(server, 1) as writing:
        request = asking.post_gather("a", 2, 20)
        writing.put("a", 0, bytes(600))
        assert writing.gather("a", 1, 10) == [bytes(600)]
        monkeypatch.setattr(signed_stream, "_BODY_BYTES_MAX", 1000)
        writing.put("a", 1, bytes(600))
        with pytest.raises(StoreError, match="launcher is gone"):
            wait_until(lambda: asking.take(request) is not None, "an end")
        writing.put("b", 0, b"fine")
        assert writing.gather("b", 1, 10) == [b"fine"]


def test_waiting_ends_when_the_launcher_is_gone() -> None:
    server = Server(SECRET)
    with client(server) as c:
        request = c.post_gather("never", 1, 1000)
        closing = threading.Thread(target=server.close)
        closing.start()
        closing.join()
        with pytest.raises(StoreError, match="launcher is gone"):
            c.take(request)


def test_wrong_secret_is_refused_at_once(server: Server) -> None:
    began = time.monotonic()
    with pytest.raises(StoreError, match="refused this rank: the peer does not have this job's secret"):
        client(server, secret=parse_secret(new_secret()))
    assert time.monotonic() - began < 30


def test_absent_server_is_an_error_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(StoreError, match=f"cannot reach the rendezvous at 127.0.0.1:{port}"):
        Client(f"127.0.0.1:{port}", SECRET, rank=0, generation=1, deadline=time.monotonic() + 0.3)


def test_only_the_given_address_is_listened_on(server: Server) -> None:
    host, port = parse_endpoint(server.endpoint)
    assert host == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("!II", 0xFFFFFFFF, 0),
        struct.pack("!II", 2, 0xFFFFFFFF) + b"{}",
        struct.pack("!II", 2, 0) + b"{}",
        struct.pack("!II", 2, 0) + b"[]",
        struct.pack("!II", 4, 0) + b"\xff\xff\xff\xff",
        struct.pack("!II", 32, 0) + b'{"count":"gathr","scope":1,"id":{}}',
        struct.pack("!II", 1 << 20, 0) + b"[" * (1 << 20),
        struct.pack("!II", 29, 0) + b'{"scope":"a","index":1e999999}',
    ],
)
def test_malformed_frames_cost_a_rank_its_connection_and_nobody_else(server: Server, frame: bytes) -> None:
    with client(server) as bad, client(server) as good:
        bad._socket.setblocking(True)
        bad._socket.sendall(bad._signed.seal(frame + bytes(8)))
        assert bad._socket.recv(100) == b""
        good.put("a", 0, b"fine")
        assert good.gather("a", 1, 10) == [b"fine"]


def test_bytes_that_are_not_signed_cost_a_rank_its_connection_and_say_why(server: Server) -> None:
    with client(server, 3) as bad, client(server) as good:
        bad._socket.setblocking(True)
        bad._socket.sendall(signed_stream.pack_frame({"scope": "a", "index": 0, "own": False}, b"evil"))
        with pytest.raises(
            StoreError, match="what rank 3 sent to the rendezvous was changed, replayed or lost"
        ):
            bad.gather("a", 1, 10)
        good.put("a", 0, b"fine")
        assert good.gather("a", 1, 10) == [b"fine"]


def test_half_open_strangers_by_the_hundred_do_not_keep_ranks_out(server: Server) -> None:
    strangers = [socket.create_connection(parse_endpoint(server.endpoint)) for _ in range(600)]
    try:
        for stranger in strangers[::2]:
            stranger.sendall(b"\x00" * 71)
        with client(server) as c:
            c.put("a", 0, b"in")
            assert c.gather("a", 1, 10) == [b"in"]
    finally:
        for stranger in strangers:
            stranger.close()


def test_servers_leave_no_descriptor_and_no_thread() -> None:
    def once() -> None:
        with Server(SECRET) as server, client(server) as c:
            c.post_gather("never", 1, 1000)

    once()
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(50):
        once()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert threading.active_count() == threads
