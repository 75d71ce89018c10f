"""Ways to a store that rank 0 serves: other listeners do not matter, and a wrong secret is reported."""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from polyhvd.rendezvous.auth import NO_RANK, Caller, Greeting, new_secret, parse_secret
from polyhvd.rendezvous.client import Client
from polyhvd.rendezvous.meeting_points import (
    FileMeetingPoint,
    MeetingPoint,
    PortMeetingPoint,
    RootNotFoundError,
    UnixMeetingPoint,
)
from polyhvd.rendezvous.server import Server
from polyhvd.rendezvous.store import StoreError

SECRET = parse_secret(new_secret())
OTHER = parse_secret(new_secret())
WAIT_S = 20.0

Make = Callable[[], MeetingPoint]


@pytest.fixture(params=["nearby", "ports", "file"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Makes the point of a new rank of one job, which no other test has."""
    key = f"test {os.getpid()} {time.monotonic_ns()}"
    points: dict[str, Make] = {
        "nearby": lambda: UnixMeetingPoint(key),
        "ports": lambda: PortMeetingPoint(key, SECRET, "127.0.0.1"),
        "file": lambda: FileMeetingPoint(key, tmp_path / "shared" / "job"),
    }
    return points[request.param]


def meet(
    points: list[MeetingPoint],
    *,
    generation: int = 1,
    delays_s: tuple[float, ...] = (),
    wait_s: float = WAIT_S,
) -> list[Any]:
    """Each rank's point on a thread; the values that the ranks have gathered, or their errors."""
    results: list[Any] = [None] * len(points)
    everybody = threading.Barrier(len(points))

    def join(rank: int) -> None:
        time.sleep(delays_s[rank] if delays_s else 0.0)
        try:
            with points[rank].open(rank, generation, time.monotonic() + wait_s) as store:
                values = store.gather("here", len(points), WAIT_S, own=(rank, b"%d" % rank))
                results[rank] = (values, store.secret, store.job)
                everybody.wait(WAIT_S)
        except Exception as error:
            results[rank] = error
            everybody.abort()

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(len(points))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * WAIT_S)
    return results


def test_ranks_meet_with_one_secret_and_one_name(make: Make) -> None:
    results = meet([make() for _ in range(3)])
    assert [result[0] for result in results] == [[b"0", b"1", b"2"]] * 3
    assert len({result[1:] for result in results}) == 1
    assert len(results[0][1]) >= 16


def test_a_late_rank_0_is_waited_for(make: Make) -> None:
    results = meet([make() for _ in range(2)], delays_s=(1.5, 0.0))
    assert [result[0] for result in results] == [[b"0", b"1"]] * 2


def test_one_generation_follows_another(make: Make) -> None:
    for generation in (1, 2):
        results = meet([make() for _ in range(2)], generation=generation)
        assert [result[0] for result in results] == [[b"0", b"1"]] * 2


def test_a_rank_of_another_generation_is_not_let_in(make: Make) -> None:
    with make().open(0, 1, time.monotonic() + WAIT_S), pytest.raises(RootNotFoundError):
        make().open(1, 2, time.monotonic() + 1.0)


def test_rank_0_that_does_not_come_is_told_with_its_place(make: Make) -> None:
    point = make()
    with pytest.raises(RootNotFoundError) as caught:
        point.open(1, 1, time.monotonic() + 0.5)
    assert str(caught.value) == point.description


def test_what_rank_0_has_put_before_it_leaves_reaches_those_who_wait(make: Make) -> None:
    heard: list[bytes] = []

    def wait() -> None:
        with make().open(1, 1, time.monotonic() + WAIT_S) as store:
            request = store.post_gather("failed", 1, WAIT_S)
            store.put("ready", 0, b"")
            while (values := store.take(request)) is None:
                store.pause()
            heard.extend(values)

    thread = threading.Thread(target=wait)
    thread.start()
    with make().open(0, 1, time.monotonic() + WAIT_S) as store:
        store.gather("ready", 1, WAIT_S)
        store.put("failed", 0, b"the reason")
    thread.join(WAIT_S)
    assert heard == [b"the reason"]


def test_nothing_is_left(make: Make, tmp_path: Path) -> None:
    def once() -> None:
        meet([make() for _ in range(2)])

    once()
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(5):
        once()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert threading.active_count() == threads
    assert not list(tmp_path.rglob("job*"))


def test_silent_listeners_on_the_first_ports_are_passed_over() -> None:
    points = [PortMeetingPoint(f"hostile {os.getpid()}", SECRET, "127.0.0.1") for _ in range(2)]
    with ExitStack() as stack:
        for port in points[0]._ports()[:2]:
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        results = meet(list(points))
    assert [result[0] for result in results] == [[b"0", b"1"]] * 2


def test_ports_that_others_cannot_know_are_left_where_the_known_ones_are_taken() -> None:
    key = f"all taken {os.getpid()}"
    points = [PortMeetingPoint(key, SECRET, "127.0.0.1") for _ in range(2)]
    known = set(points[0]._ports()) & set(PortMeetingPoint(key, OTHER, "127.0.0.1")._ports())
    assert len(known) == 2
    with ExitStack() as stack:
        for port in known:
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        results = meet(list(points))
    assert [result[0] for result in results] == [[b"0", b"1"]] * 2


def test_an_impostor_on_the_first_port_is_passed_over() -> None:
    points = [PortMeetingPoint(f"impostor {os.getpid()}", SECRET, "127.0.0.1") for _ in range(2)]
    listener = socket.create_server(("127.0.0.1", points[0]._ports()[0]))
    with Server(OTHER, listener=listener):
        results = meet(list(points), delays_s=(0.5, 0.0))
    assert [result[0] for result in results] == [[b"0", b"1"]] * 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_s_socket_is_passed_over() -> None:
    key = f"squatted {os.getpid()}"
    names = [UnixMeetingPoint(key)._name(1) + suffix for suffix in ("", "0", "f" * 16)]
    program = (
        "import os, socket, sys\nos.setuid(65534)\nheld = []\n"
        "for name in sys.argv[1:]:\n"
        "    held.append(socket.socket(socket.AF_UNIX))\n"
        "    held[-1].bind('\\0' + name)\n"
        "    held[-1].listen(100)\n"
        "print('up', flush=True)\nsys.stdin.read()\n"
    )
    arguments = [sys.executable, "-c", program, *names]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as squatter:
        assert squatter.stdout is not None
        assert squatter.stdout.readline() == "up\n"
        results = meet([UnixMeetingPoint(key) for _ in range(2)])
        squatter.communicate()
    assert [result[0] for result in results] == [[b"0", b"1"]] * 2


def another_secret(kind: str) -> tuple[MeetingPoint, MeetingPoint]:
    """The points of rank 0, and of a rank with another secret."""
    key = f"secret {kind} {os.getpid()} {time.monotonic_ns()}"
    if kind == "nearby":
        return UnixMeetingPoint(key, SECRET), UnixMeetingPoint(key, OTHER)
    return PortMeetingPoint(key, SECRET, "127.0.0.1"), PortMeetingPoint(key, OTHER, "127.0.0.1")


OTHER_SECRET = "does not have this job's secret; POLYHVD_SECRET .* has to be the same on all ranks"


def test_another_secret_on_this_user_s_socket_is_an_error_soon() -> None:
    root, stranger = another_secret("nearby")
    began = time.monotonic()
    with root.open(0, 1, began + WAIT_S), pytest.raises(StoreError, match=OTHER_SECRET):
        stranger.open(1, 1, began + WAIT_S)
    assert time.monotonic() - began < WAIT_S / 2


@pytest.mark.parametrize("kind", ["nearby", "ports"])
def test_rank_0_warns_soon_of_a_rank_with_another_secret(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    root, stranger = another_secret(kind)
    with (
        root.open(0, 1, time.monotonic() + WAIT_S) as store,
        pytest.raises(StoreError, match=OTHER_SECRET),
    ):
        stranger.open(1, 1, time.monotonic() + 3.0)
    (warning,) = [text for text in caplog.messages if text.startswith("rank 0: a process on ")]
    assert re.search("calls as rank 1, and " + OTHER_SECRET, warning)
    assert store.strangers == {1}


def test_another_secret_on_a_port_is_warned_of_soon_and_an_error_when_the_time_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    root, stranger = another_secret("ports")
    began = time.monotonic()
    with root.open(0, 1, began + WAIT_S), pytest.raises(StoreError, match=OTHER_SECRET):
        stranger.open(1, 1, began + 4.0)
    assert time.monotonic() - began >= 4.0
    (record,) = [record for record in caplog.records if record.getMessage().startswith("rank 1: ")]
    assert re.search(OTHER_SECRET, record.getMessage())


def test_an_impostor_does_not_end_ranks_that_come_before_rank_0() -> None:
    points = [PortMeetingPoint(f"early {os.getpid()}", SECRET, "127.0.0.1") for _ in range(2)]
    with ExitStack() as stack:
        for port in points[0]._ports()[:2]:
            stack.enter_context(Server(OTHER, listener=socket.create_server(("127.0.0.1", port))))
        results = meet(list(points), delays_s=(4.0, 0.0))
    assert [result[0] for result in results] == [[b"0", b"1"]] * 2


def test_a_rank_that_connects_to_several_addresses_is_no_stranger() -> None:
    """The tries that it gives up close after the greeting, and prove nothing."""
    strangers: list[int] = []
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with Server(SECRET, listener=listener, on_other_secret=lambda said, _: strangers.append(said.source)):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(Caller(SECRET, Greeting("store", 1, 1, NO_RANK)).hello)
            assert connection.recv(8)
        Client(f"127.0.0.1:{port}", SECRET, rank=2, generation=1, deadline=time.monotonic() + WAIT_S).close()
    assert strangers == []


def test_jobs_with_one_secret_keep_apart_on_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = PortMeetingPoint(f"shared {os.getpid()}", SECRET, "127.0.0.1")._ports()
    monkeypatch.setattr(PortMeetingPoint, "_ports", lambda _: ports)
    with ExitStack() as stack:
        for job in ("a", "b"):
            stack.enter_context(
                PortMeetingPoint(job, SECRET, "127.0.0.1").open(0, 1, time.monotonic() + WAIT_S)
            ).put("name", 0, job.encode())
        for job in ("b", "a"):
            with PortMeetingPoint(job, SECRET, "127.0.0.1").open(1, 1, time.monotonic() + WAIT_S) as store:
                assert store.gather("name", 1, WAIT_S) == [job.encode()]


def test_a_host_without_a_known_address_is_named() -> None:
    with pytest.raises(RootNotFoundError, match=r"on nowhere.invalid .*whose address is not known here"):
        PortMeetingPoint("unknown", SECRET, "nowhere.invalid").open(1, 1, time.monotonic() + 1.0)


def file_point(folder: Path) -> FileMeetingPoint:
    return FileMeetingPoint("job", folder / "job")


def test_the_file_is_this_user_s_alone_and_goes_at_the_end(tmp_path: Path) -> None:
    with file_point(tmp_path / "new").open(0, 1, time.monotonic() + WAIT_S):
        (file,) = (tmp_path / "new").iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert not list((tmp_path / "new").iterdir())


def test_a_stale_file_of_a_killed_rank_0_is_passed_over(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with file_point(tmp_path).open(0, 1, time.monotonic() + WAIT_S):
        (file,) = tmp_path.iterdir()
        stale = file.read_bytes()
    file.write_bytes(stale)
    file.chmod(0o600)
    results = meet([file_point(tmp_path) for _ in range(2)], delays_s=(1.0, 0.0))
    assert [result[0] for result in results] == [[b"0", b"1"]] * 2


@pytest.mark.parametrize("mode", [0o644, 0o660])
def test_a_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "job.1").write_text("{}")
    (tmp_path / "job.1").chmod(mode)
    with pytest.raises(StoreError, match="expected a file of this user's"):
        file_point(tmp_path).open(1, 1, time.monotonic() + WAIT_S)


def test_a_folder_where_others_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(StoreError, match="others may write there"):
        file_point(tmp_path).open(0, 1, time.monotonic() + WAIT_S)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"addresses": ["a"]}', '{"addresses": 1, "port": 1, "secret": "00"}']
)
def test_a_file_with_something_else_is_refused(tmp_path: Path, text: str) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "job.1").write_text(text)
    (tmp_path / "job.1").chmod(0o600)
    with pytest.raises(StoreError, match="is not a file of polyhvd's"):
        file_point(tmp_path).open(1, 1, time.monotonic() + WAIT_S)
