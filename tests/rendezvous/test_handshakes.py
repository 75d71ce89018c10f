"""The handshake and what drives many at once: who knows the secret passes, nobody else harms."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhvd.rendezvous.auth import Answerer, AuthError, Caller, Greeting, new_secret, parse_secret, prove
from polyhvd.rendezvous.handshakes import Authenticated, Handshakes

SECRET = parse_secret(new_secret())
GREETING = Greeting("data", 7, 2, 1)
HELLO_BYTES = 72


def handshake(
    caller: Caller, answerer: Answerer, tamper: Callable[[int, bytes], bytes] = lambda _, m: m
) -> None:
    """Carry the three messages across; `tamper` may change them on the way."""
    answer = answerer.receive(tamper(0, caller.hello))
    answerer.receive(tamper(2, caller.receive(tamper(1, answer))))


def test_both_sides_pass_with_one_secret() -> None:
    caller, answerer = Caller(SECRET, GREETING), Answerer(SECRET)
    handshake(caller, answerer)
    assert caller.wanted == answerer.wanted == 0
    assert answerer.greeting == GREETING


def test_caller_refuses_an_answerer_with_another_secret() -> None:
    with pytest.raises(AuthError, match="does not have this job's secret"):
        handshake(Caller(SECRET, GREETING), Answerer(parse_secret(new_secret())))


def test_answerer_refuses_a_caller_with_another_secret() -> None:
    caller, answerer = Caller(parse_secret(new_secret()), GREETING), Answerer(SECRET)
    answerer.receive(caller.hello)
    with pytest.raises(AuthError, match="does not have this job's secret"):
        answerer.receive(bytes(32))
    assert answerer.wanted > 0


@settings(deadline=None)
@given(st.integers(0, 2), st.integers(0, HELLO_BYTES - 1), st.integers(1, 255))
def test_a_change_of_any_byte_ends_the_handshake(message: int, position: int, change: int) -> None:
    def tamper(number: int, data: bytes) -> bytes:
        if number != message:
            return data
        changed = bytearray(data)
        changed[position % len(data)] ^= change
        return bytes(changed)

    with pytest.raises(AuthError):
        handshake(Caller(SECRET, GREETING), Answerer(SECRET), tamper)


def test_an_answer_cannot_be_reflected_as_the_caller_s_proof() -> None:
    answerer = Answerer(SECRET)
    answer = answerer.receive(Caller(SECRET, GREETING).hello)
    with pytest.raises(AuthError):
        answerer.receive(answer[-32:])


def test_both_sides_have_the_keys_of_a_session_that_no_other_has() -> None:
    keys = set()
    for _ in range(2):
        caller, answerer = Caller(SECRET, GREETING), Answerer(SECRET)
        with pytest.raises(RuntimeError):
            answerer.keys()
        handshake(caller, answerer)
        assert caller.keys().send == answerer.keys().receive
        assert caller.keys().receive == answerer.keys().send
        keys |= {caller.keys().send, caller.keys().receive}
    assert len(keys) == 4
    assert all(len(key) == 32 and key.hex() not in repr(caller.keys()) for key in keys)


def test_a_peer_of_another_version_is_told_from_a_stranger() -> None:
    older = b"polyhvd\x01" + Caller(SECRET, GREETING).hello[8:]
    with pytest.raises(AuthError, match="speaks another version of polyhvd's protocol"):
        Answerer(SECRET).receive(older)
    with pytest.raises(AuthError, match="speaks another version of polyhvd's protocol"):
        Caller(SECRET, GREETING).receive(older)
    with pytest.raises(AuthError, match="speaks another protocol"):
        Answerer(SECRET).receive(b"HTTP/1.1" + older[8:])


def test_a_recorded_handshake_cannot_be_replayed() -> None:
    caller, first, second = Caller(SECRET, GREETING), Answerer(SECRET), Answerer(SECRET)
    proof = caller.receive(first.receive(caller.hello))
    second.receive(caller.hello)
    with pytest.raises(AuthError):
        second.receive(proof)


@pytest.mark.parametrize("text", ["", "00", "ab" * 15, "no hexadecimal number"])
def test_short_or_malformed_secrets_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="secret must"):
        parse_secret(text)


# Many at once


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        yield listener


@pytest.fixture
def handshakes(listener: socket.socket) -> Iterator[Handshakes]:
    handshakes = Handshakes(
        SECRET, lambda greeting: greeting.generation == GREETING.generation, patience_s=2.0, pending_max=32
    )
    handshakes.listen(listener.dup())
    yield handshakes
    handshakes.close()


def drive(handshakes: Handshakes, until: Callable[[], bool], deadline_s: float = 20.0) -> list[Authenticated]:
    passed: list[Authenticated] = []
    deadline = time.monotonic() + deadline_s
    while not until():
        assert time.monotonic() < deadline, "the handshakes take too long"
        passed += handshakes.poll(0.05)
    return passed


def call(listener: socket.socket, greeting: Greeting = GREETING, secret: bytes = SECRET) -> socket.socket:
    connection = socket.create_connection(listener.getsockname())
    try:
        prove(connection, secret, greeting, time.monotonic() + 15)
    except BaseException:
        connection.close()
        raise
    return connection


class Call(threading.Thread):
    """A caller on a thread, since the test drives the other side."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(daemon=True)
        self.arguments = arguments
        self.connection: socket.socket | None = None
        self.error: OSError | None = None
        self.start()

    def run(self) -> None:
        try:
            self.connection = call(*self.arguments)  # type: ignore[arg-type]
        except OSError as error:
            self.error = error

    def ended(self) -> bool:
        return not self.is_alive()


def drop(passed: list[Authenticated], *calls: Call) -> None:
    for item in passed:
        item.connection.close()
    for caller in calls:
        if caller.connection:
            caller.connection.close()


def test_no_byte_beyond_the_handshake_is_read(handshakes: Handshakes, listener: socket.socket) -> None:
    caller = Call(listener)
    passed = drive(handshakes, caller.ended)
    assert caller.connection is not None
    caller.connection.sendall(b"belongs to the engine")
    passed = passed or handshakes.poll(10.0)
    passed[0].connection.settimeout(10)
    assert passed[0].connection.recv(100) == b"belongs to the engine"
    assert passed[0].greeting == GREETING
    drop(passed, caller)


def test_stale_generation_is_refused(handshakes: Handshakes, listener: socket.socket) -> None:
    caller = Call(listener, Greeting("data", 6, 2, 1))
    assert drive(handshakes, caller.ended) == []
    assert "another job, generation or protocol" in str(caller.error)


def test_another_secret_is_refused(handshakes: Handshakes, listener: socket.socket) -> None:
    caller = Call(listener, GREETING, parse_secret(new_secret()))
    assert drive(handshakes, caller.ended) == []
    assert "does not have this job's secret" in str(caller.error)


def test_silent_stranger_is_dropped_after_a_while(handshakes: Handshakes, listener: socket.socket) -> None:
    with socket.create_connection(listener.getsockname()) as stranger:
        stranger.settimeout(0)

        def dropped() -> bool:
            try:
                return stranger.recv(1) == b""
            except BlockingIOError:
                return False

        drive(handshakes, dropped)


def test_garbage_is_dropped_at_once(handshakes: Handshakes, listener: socket.socket) -> None:
    handshakes._patience_s = 600.0  # with silence
    with socket.create_connection(listener.getsockname()) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10)
        stranger.settimeout(0.0)

        def dropped() -> bool:
            try:
                return stranger.recv(1) == b""
            except BlockingIOError:
                return False
            except ConnectionResetError:
                return True

        drive(handshakes, dropped)


@pytest.mark.parametrize("word", [b"", b"polyhvd\x02", b"x"])
def test_hundreds_of_half_open_strangers_do_not_keep_a_rank_out(
    handshakes: Handshakes, listener: socket.socket, word: bytes
) -> None:
    strangers = [socket.create_connection(listener.getsockname()) for _ in range(150)]
    try:
        for stranger in strangers:
            stranger.sendall(word)
        before = len(os.listdir("/proc/self/fd"))
        caller = Call(listener)
        passed: list[Authenticated] = []
        deadline = time.monotonic() + 15
        while not passed:
            assert time.monotonic() < deadline
            passed += handshakes.poll(0.05)
            assert len(os.listdir("/proc/self/fd")) <= before + 32 + 4, "strangers are not bounded"
        drive(handshakes, caller.ended)
        assert caller.error is None
        drop(passed, caller)
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_burst_of_ranks_beyond_the_bound_comes_through_at_the_first_try(
    handshakes: Handshakes, listener: socket.socket
) -> None:
    callers = Handshakes(SECRET, lambda _: False)
    greetings = [Greeting("data", GREETING.generation, rank, 0) for rank in range(1, 200)]
    outgoing = [
        callers.connect(socket.AF_INET, listener.getsockname(), greeting, persistent=False)
        for greeting in greetings
    ]
    passed: list[Authenticated] = []

    def settled() -> bool:
        passed.extend(handshakes.poll(0))
        return all(item.done or item.failed for item in outgoing)

    passed += drive(callers, settled)
    while sum(item.incoming for item in passed) < len(greetings):
        passed += handshakes.poll(1.0)
    assert [item.error for item in outgoing if item.failed] == []
    assert {item.greeting for item in passed if item.incoming} == set(greetings)
    drop(passed)
    callers.close()


def test_connecting_is_tried_again_until_somebody_listens(listener: socket.socket) -> None:
    address = listener.getsockname()
    listener.close()
    caller = Handshakes(SECRET, lambda _: False)
    answerer = Handshakes(SECRET, lambda _: True)
    outgoing = caller.connect(socket.AF_INET, address, GREETING)
    assert caller.poll(0.1) == []
    answerer.listen(socket.create_server(address))
    passed: list[Authenticated] = []
    drive(caller, lambda: bool(passed.extend(answerer.poll(0.01))) or outgoing.done)
    assert outgoing.done
    drop(passed)
    caller.close()
    answerer.close()


def test_connecting_to_an_impostor_fails_for_good(listener: socket.socket) -> None:
    impostor = Handshakes(parse_secret(new_secret()), lambda _: True)
    impostor.listen(listener.dup())
    caller = Handshakes(SECRET, lambda _: False)
    outgoing = caller.connect(socket.AF_INET, listener.getsockname(), GREETING)
    drive(caller, lambda: bool(impostor.poll(0.01)) or outgoing.failed)
    assert outgoing.error == "the peer does not have this job's secret"
    caller.close()
    impostor.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_another_user_is_refused_on_a_unix_socket() -> None:
    name = f"\0polyhvd-test-{os.getpid()}"
    unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    unix.bind(name)
    unix.listen()
    handshakes = Handshakes(SECRET, lambda _: True)
    handshakes.listen(unix)
    child = os.fork()
    if child == 0:
        try:
            os.seteuid(65534)
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.connect(name)
            prove(connection, SECRET, GREETING, time.monotonic() + 10)
        except ConnectionError:
            os._exit(0)
        finally:
            os._exit(1)
    status: list[int] = []

    def ended() -> bool:
        pid, code = os.waitpid(child, os.WNOHANG)
        status.extend([code] if pid else [])
        return bool(pid)

    assert drive(handshakes, ended) == []
    assert status == [0]
    handshakes.close()
