"""``polyhvd leave`` and the launcher: each trusts processes of its own user only, for a limited time."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest

from polyhvd.launch.elastic import leave
from polyhvd.launch.job import control
from polyhvd.launch.job.control import Control, Request
from polyhvd.rendezvous import network

NOBODY = 65534
#: Another user's process that listens under a name of ours, and says that all is done.
IMPOSTOR = """
import os, socket, sys
name, user = sys.argv[1:]
os.setuid(int(user))
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0" + name)
listener.listen(8)
print("listens", flush=True)
while True:
    connection, _ = listener.accept()
    connection.sendall(b'{"leaving": ["rank 0"], "left": true}\\n')
    connection.close()
"""


def obey(request: Request) -> None:
    request.answer(leaving=["process 1"])
    request.answer(left=True)
    request.close()


@pytest.fixture
def launcher() -> Iterator[int]:
    """A launcher in this process; its process id."""
    listening = Control(obey)
    yield os.getpid()
    listening.close()


@contextlib.contextmanager
def answering(*parts: bytes, hold: bool = False) -> Iterator[int]:
    """A launcher of this user that answers with these bytes; with ``hold`` it stays silent then."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0polyhvd/job/{os.getpid()}-of-a-test")
    listener.listen(8)
    kept: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            kept.append(connection)
            with contextlib.suppress(OSError):  # one that only looks who is here
                for part in parts:
                    connection.sendall(part)
                if not hold:
                    connection.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield os.getpid()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for connection in kept:
        connection.close()
    thread.join(10)


def test_a_request_is_answered(launcher: int) -> None:
    heard: list[dict[str, Any]] = []
    control.request(launcher, {"ranks": [1]}, heard.append)
    assert heard == [{"leaving": ["process 1"]}, {"left": True}]


def test_requests_are_answered_again_after_there_were_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Request] = []
    paused = threading.Event()

    def keep(request: Request) -> None:
        kept.append(request)
        request.answer(left=True)

    def pause(_: float) -> None:
        paused.set()
        time.sleep(0.01)

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.closing(Control(keep)), contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2)]
        places = network.abstract_listeners(f"polyhvd/job/{os.getpid()}-")
        monkeypatch.setattr(control, "time", types.SimpleNamespace(sleep=pause))
        # No new descriptor: the thread has at most the one that accept() reserved before it began to wait.
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            for client in clients:
                client.settimeout(10)
                client.connect(places[0][0])
                client.sendall(b"{}\n")
            assert paused.wait(10), "the launcher's thread did not run out of descriptors, or has ended"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for client in clients:
            assert client.recv(100) == b'{"left": true}\n'
        for request in kept:
            request.close()


def test_a_silent_client_does_not_delay_others(launcher: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_CLIENT_TIMEOUT_S", 60.0)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(control._places()[launcher])
        heard: list[dict[str, Any]] = []
        control.request(launcher, {"ranks": [1]}, heard.append, 20.0)
    assert heard == [{"leaving": ["process 1"]}, {"left": True}]


@pytest.mark.parametrize("words", [b"[" * 50_000 + b"\n", b"\xff\n", b"[]\n", b"\n", b""])
def test_invalid_requests_do_not_end_the_launcher_s_thread(launcher: int, words: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20)
        connection.connect(control._places()[launcher])
        with contextlib.suppress(ConnectionError):
            connection.sendall(words)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
    test_a_request_is_answered(launcher)


@pytest.mark.parametrize("answer", [b"[" * 50_000 + b"\n", b"\xff\n", b"[]\n", b"x" * 100_000])
def test_an_invalid_answer_is_an_error_of_one_line(capsys: pytest.CaptureFixture[str], answer: bytes) -> None:
    with answering(answer) as job:
        assert leave.main(["--job", str(job), "--rank", "1"]) == 1
    assert capsys.readouterr().err == f"polyhvd leave: job {job} has sent an invalid answer\n"


def test_escape_sequences_are_not_passed_on_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(b'{"leaving": ["\\u001b[2Jrank"]}\n', b'{"error": "\\u001b]0;x\\u0007"}\n') as job:
        assert leave.main(["--job", str(job), "--rank", "1"]) == 1
    out, err = capsys.readouterr()
    assert out == "\\x1b[2Jrank leaves\n"
    assert err == "polyhvd leave: \\x1b]0;x\\x07\n"


@pytest.mark.parametrize("parts", [(), (b'{"leaving": ["rank 0"]}\n',)])
def test_waiting_for_a_silent_launcher_ends(
    capsys: pytest.CaptureFixture[str], parts: tuple[bytes, ...]
) -> None:
    with answering(*parts, hold=True) as job:
        assert leave.main(["--job", str(job), "--rank", "1", "--timeout-s", "0.5"]) == 1
    assert "no answer in time" in capsys.readouterr().err


def test_a_launcher_that_takes_no_more_connections_is_reported_as_stopped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0polyhvd/job/{os.getpid()}-full")
        listener.listen(1)  # full after the two connections that check which process listens
        assert leave.main(["--job", str(os.getpid()), "--rank", "1"]) == 1
    assert f"no answer in time from job {os.getpid()}; is its polyhvdrun stopped?" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="setuid() to another user needs root")
@pytest.mark.parametrize("prefix", ["polyhvd/job/", "polyhvd/fixed/"])
@pytest.mark.parametrize("suffix", ["", "-1234"])
def test_a_listener_of_another_user_is_not_trusted(launcher: int, prefix: str, suffix: str) -> None:
    command = [sys.executable, "-c", IMPOSTOR, f"{prefix}{launcher}{suffix}", str(NOBODY)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as impostor:
        assert impostor.stdout is not None
        assert impostor.stdout.readline() == "listens\n"
        try:
            test_a_request_is_answered(launcher)
            assert control.jobs(fixed=True).count(launcher) == 1  # other jobs may run on this machine
        finally:
            impostor.kill()
