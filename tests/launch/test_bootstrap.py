"""init(): every pair of ranks gets the right connection, and every failure names who and why."""

from __future__ import annotations

import array
import fcntl
import json
import logging
import mmap
import os
import socket
import threading
import time

import pytest
from launching import World, descriptors, wait_until

from polyhvd.config import ConfigError, Launched, Settings
from polyhvd.errors import HorovodInternalError, PeerLostError, RankMismatchError
from polyhvd.launch.providers.local import meet_as
from polyhvd.rendezvous.auth import Greeting, new_secret, parse_secret, prove
from polyhvd.rendezvous.client import Client
from polyhvd.runtime import bootstrap
from polyhvd.runtime.connections import Connections, tree_parent
from polyhvd.runtime.placement import ONE_RANK

#: To wait for ranks that never come: long enough for a busy machine to reach the rendezvous.
SHORT_S = 2.0


def assert_joined(connected: list[Connections], table: str, a: int, b: int) -> None:
    """Whatever a writes for b arrives at b, at the connection it has to a, and back."""
    ends = [getattr(connected[a], table)[b], getattr(connected[b], table)[a]]
    for end in ends:
        os.set_blocking(end, True)
    for source, target in (ends, ends[::-1]):
        message = os.urandom(16)
        os.write(source, message)
        assert os.read(target, 64) == message


def assert_complete(connected: list[Connections], domains: list[list[int]]) -> None:
    """Exactly the connections that the connections's contract asks for."""
    home = {rank: i for i, ranks in enumerate(domains) for rank in ranks}
    leaders = {ranks[0]: i for i, ranks in enumerate(domains)}
    for rank, connections in enumerate(connected):
        assert (connections.rank, connections.size, connections.domains) == (rank, len(connected), domains)
        assert set(connections.local_fds) == set(domains[home[rank]]) - {rank}
        assert set(connections.data_fds) == set(range(len(connected))) - set(domains[home[rank]])
        tree = {
            other
            for other, i in leaders.items()
            if rank in leaders and (tree_parent(i) == home[rank] or tree_parent(home[rank]) == i)
        }
        assert set(connections.control_fds) == tree
        for table in ("local_fds", "control_fds", "data_fds"):
            for other in getattr(connections, table):
                assert_joined(connected, table, rank, other)


def test_world_of_one_needs_nothing() -> None:
    assert bootstrap.connect(Settings(), ONE_RANK, None, [[0]]) == Connections(process_sets=[[0]])


@pytest.mark.parametrize(
    ("hosts", "domains"),
    [
        ("aa", [[0, 1]]),
        ("ab", [[0], [1]]),
        ("aaaa", [[0, 1, 2, 3]]),
        ("aabb", [[0, 1], [2, 3]]),
        ("abab", [[0, 2], [1, 3]]),
        ("abcabd", [[0, 3], [1, 4], [2], [5]]),
        ("abcdefg", [[0], [1], [2], [3], [4], [5], [6]]),
    ],
)
def test_every_pair_is_connected(world: World, hosts: str, domains: list[list[int]]) -> None:
    assert_complete(world.connect(len(hosts), hosts=hosts), domains)


def test_process_ids_are_known_within_a_host(world: World) -> None:
    own = os.getpid()  # ranks are threads here
    pids = [connections.pids for connections in world.connect(3, hosts="aba")]
    assert pids == [[own, 0, own], [0, own, 0], [own, 0, own]]


def test_memory_is_shared_sealed_and_zeroed(world: World) -> None:
    connected = world.connect(3)
    maps = [mmap.mmap(connections.segment_fd, 0) for connections in connected]
    assert [len(m) for m in maps] == [4096 * 3] * 3
    assert bytes(maps[0]) == bytes(len(maps[0]))
    for rank, m in enumerate(maps):
        m[rank] = rank + 1
    assert all(bytes(m[:3]) == b"\1\2\3" for m in maps)
    for connections in connected:
        seals = fcntl.fcntl(connections.segment_fd, fcntl.F_GET_SEALS)
        assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    for m in maps:
        m.close()


def test_descriptors_are_closed_on_exec(world: World) -> None:
    for connections in world.connect(4, hosts="aabb"):
        assert not any(os.get_inheritable(descriptor) for descriptor in descriptors(connections))


def test_tcp_connections_do_not_delay_and_notice_silence(world: World) -> None:
    for connections in world.connect(2, hosts="ab"):
        for descriptor in (*connections.data_fds.values(), *connections.control_fds.values()):
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                tcp = socket.IPPROTO_TCP
                assert connection.getsockopt(tcp, socket.TCP_NODELAY)
                assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert connection.getsockopt(tcp, socket.TCP_KEEPIDLE) == 5
                assert connection.getsockopt(tcp, socket.TCP_USER_TIMEOUT) == 20000
                assert connection.getpeername()[0] == "127.0.0.1"


def test_process_sets_and_labels_are_handed_on(world: World) -> None:
    configs = [world.config(r, 2) for r in range(2)]
    for result in world.start(configs, process_sets=[[[0, 1], [1]]] * 2)():
        assert isinstance(result, Connections)
        assert result.process_sets == [[0, 1], [1]]
        assert result.labels == [f"pid {os.getpid()} on {socket.gethostname()}"] * 2


def test_one_rank_without_shared_memory_takes_its_host_to_tcp(world: World) -> None:
    configs = [world.config(r, 4, host_id="aabb"[r], shared_memory=r != 1) for r in range(4)]
    connected = [result for result in world.start(configs)() if isinstance(result, Connections)]
    assert_complete(connected, [[0], [1], [2, 3]])


@pytest.mark.parametrize("broken", ["make_segment", "send_segment", "receive_segment"])
def test_host_goes_over_to_tcp_when_memory_cannot_be_passed(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    def fail(*_: object) -> int:
        raise OSError(1, "not here")

    send = bootstrap.send_segment
    if broken == "send_segment":
        # As when a security module strips descriptors from messages.
        monkeypatch.setattr(bootstrap, broken, lambda connection, _: send(connection, -1))
    else:
        monkeypatch.setattr(bootstrap, broken, fail)
    with caplog.at_level(logging.WARNING, "polyhvd"):
        assert_complete(world.connect(3), [[0], [1], [2]])
    assert len(caplog.records) == 1, "logged once"
    assert "ranks [0, 1, 2] of one host use TCP, not shared memory: " in caplog.text


def test_memory_of_the_wrong_size_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    make = bootstrap.make_segment
    monkeypatch.setattr(bootstrap, "make_segment", lambda size: make(size + 1))
    assert_complete(world.connect(2), [[0], [1]])


def test_unsealed_memory_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsealed(size: int) -> int:
        descriptor = os.memfd_create("test")
        os.ftruncate(descriptor, size)
        return descriptor

    monkeypatch.setattr(bootstrap, "make_segment", unsealed)
    assert_complete(world.connect(2), [[0], [1]])


def test_checksums_on_some_ranks_only_are_a_mismatch_on_all(world: World) -> None:
    for result in world.start([world.config(r, 2, data_checksums=r == 0) for r in range(2)])():
        assert isinstance(result, RankMismatchError)
        assert (
            "data_checksums must be the same on all ranks: ranks [0] have True; ranks [1] have False"
            in str(result)
        )


def test_levels_of_an_allreduce_on_some_ranks_only_are_a_mismatch_on_all(world: World) -> None:
    for result in world.start([world.config(r, 2, hierarchical_allreduce=r == 0) for r in range(2)])():
        assert isinstance(result, RankMismatchError)
        assert "hierarchical_allreduce must be the same on all ranks: ranks [0] have True" in str(result)


def test_missing_ranks_are_named(world: World) -> None:
    configs = [world.config(r, 4, start_timeout_s=SHORT_S) for r in (0, 3)]
    for result in world.start(configs)():
        assert isinstance(result, PeerLostError)
        assert f"waited {SHORT_S:g} s for ranks [1, 2] (of 4): they have not called init()" in str(result)


def test_ranks_that_cannot_be_reached_are_named_with_their_address(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap._Meeting, "_listen", lambda self, address: 9)  # where nothing listens
    configs = [world.config(r, 3, host_id="aab"[r], start_timeout_s=SHORT_S) for r in range(3)]
    results = world.start(configs)()
    for result in results:
        assert isinstance(result, PeerLostError)
        assert f"waited {SHORT_S:g} s for connections with ranks [" in str(result)
        assert "a firewall, or the wrong interface (POLYHVD_GLOO_IFACE)?" in str(result)
    assert any("127.0.0.1 port 9): Connection refused" in str(result) for result in results), results


def test_ranks_of_different_generations_do_not_meet(world: World) -> None:
    old = world.start([world.config(0, 2, start_timeout_s=SHORT_S)], generation=1)
    new = world.start([world.config(1, 2, start_timeout_s=SHORT_S)], generation=2)
    for result in old() + new():
        assert isinstance(result, PeerLostError)


def test_wrong_secret_fails_that_rank_at_once_and_is_not_let_in(world: World) -> None:
    stranger = world.config(1, 2, secret=new_secret())
    waiting = world.start([world.config(0, 2, start_timeout_s=SHORT_S)])
    (result,) = world.start([stranger])()
    assert isinstance(result, HorovodInternalError)
    assert "refused this rank: the peer does not have this job's secret" in str(result)
    assert isinstance(waiting()[0], PeerLostError)


def test_secret_may_lie_in_a_file(world: World, tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "secret")
    with open(path, "w") as file:
        file.write(world.secret + "\n")
    assert len(world.connect(2, secret="", secret_file=path)) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rendezvous": ""}, "needs POLYHVD_RENDEZVOUS"),
        ({"secret": ""}, "POLYHVD_SECRET: the job's secret must have at least 16 bytes"),
        ({"secret": "zz"}, "POLYHVD_SECRET: the job's secret must be hexadecimal"),
        ({"secret": "", "secret_file": "/no/such"}, "POLYHVD_SECRET_FILE=/no/such: No such file"),
    ],
)
def test_unusable_settings_are_named(settings: dict[str, str], message: str) -> None:
    launched = Launched(**{"size": 2, "rendezvous": "127.0.0.1:1", "secret": new_secret(), **settings})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        meet_as(launched, 0, time.monotonic() + 1)


def test_disagreement_on_process_sets_is_raised_on_every_rank(world: World) -> None:
    sets = [[[0, 1]], [[0, 1]], [[0, 2]]]
    for result in world.start([world.config(r, 3) for r in range(3)], process_sets=sets)():
        assert isinstance(result, RankMismatchError)
        assert (
            "process_sets must be the same on all ranks: ranks [0, 1] have [[0, 1]]; ranks [2] have"
            in str(result)
        )


def test_failure_of_one_rank_is_told_to_the_others_at_once(world: World) -> None:
    configs = [  # more time than the harness leaves them
        world.config(r, 3, start_timeout_s=600.0, interface="nope0" if r == 1 else "") for r in range(3)
    ]
    results = world.start(configs)()
    assert isinstance(results[1], ConfigError)
    assert "there is no network interface 'nope0'" in str(results[1])
    for result in (results[0], results[2]):
        assert isinstance(result, HorovodInternalError)
        assert "rank 1 failed in init(): POLYHVD_GLOO_IFACE: there is no network interface" in str(result)


def test_failure_is_told_to_ranks_that_come_later_and_ends_with_a_new_try(world: World) -> None:
    (error,) = world.start([world.config(1, 2, interface="nope0")])()
    assert isinstance(error, ConfigError)
    (late,) = world.start([world.config(0, 2, start_timeout_s=20.0)])()
    assert isinstance(late, HorovodInternalError)
    assert "rank 1 failed in init(): POLYHVD_GLOO_IFACE" in str(late)
    second = world.start([world.config(1, 2, start_timeout_s=20.0)])
    wait_until(lambda: 1 in world.server._values.scopes.get("init/1/hello", {}), "the new try")
    assert all(isinstance(r, Connections) for r in world.start([world.config(0, 2)])() + second())


@pytest.mark.parametrize("interface", ["lo", "127.0.0.1", "nope0,lo", "127.0.0.0/8"])
def test_interface_may_be_a_name_an_address_or_a_network(world: World, interface: str) -> None:
    assert_complete(world.connect(2, hosts="ab", interface=interface), [[0], [1]])


def test_lost_rendezvous_ends_the_waiting(world: World) -> None:
    result = world.start([world.config(0, 2, start_timeout_s=20.0)])
    wait_until(lambda: "init/1/hello" in world.server._values.scopes, "hello")
    world.server.close()
    (error,) = result()
    assert isinstance(error, HorovodInternalError)
    assert "the launcher is gone" in str(error)


def test_strangers_at_the_data_listeners_do_not_disturb(world: World) -> None:
    first = world.start([world.config(0, 2, start_timeout_s=20.0)])
    wait_until(lambda: 0 in world.server._values.scopes.get("init/1/hello", {}), "hello")
    card = json.loads(world.server._values.scopes["init/1/hello"][0])
    strangers = []
    try:
        for i in range(400):
            tcp = socket.create_connection((card["address"], card["port"]))
            unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            unix.connect(f"\0{card['unix_name']}")
            strangers += [tcp, unix]
            if i % 2:
                tcp.sendall(bytes(200))
                unix.sendall(b"polyhvd")
        second = world.start([world.config(1, 2, start_timeout_s=20.0)])
        connected = [result for result in first() + second() if isinstance(result, Connections)]
        assert_complete(connected, [[0, 1]])
    finally:
        for stranger in strangers:
            stranger.close()


@pytest.mark.parametrize(
    "greeting",
    [
        Greeting("data", 1, 1, 0),  # an earlier generation
        Greeting("data", 2, 1, 1),  # for somebody else
        Greeting("data", 2, 0, 0),  # from a rank that does not dial
        Greeting("data", 2, 2, 0),  # from a rank that does not exist
        Greeting("store", 2, 1, 0),
    ],
)
def test_connections_that_nobody_expects_are_refused(world: World, greeting: Greeting) -> None:
    first = world.start([world.config(0, 2, start_timeout_s=20.0)], generation=2)
    wait_until(lambda: 0 in world.server._values.scopes.get("init/2/hello", {}), "hello")
    card = json.loads(world.server._values.scopes["init/2/hello"][0])
    connection = socket.create_connection((card["address"], card["port"]))
    with connection, pytest.raises(ConnectionError):
        prove(connection, parse_secret(world.secret), greeting, time.monotonic() + 10)
    second = world.start([world.config(1, 2)], generation=2)
    assert all(isinstance(result, Connections) for result in first() + second())


def test_descriptors_smuggled_by_strangers_are_not_kept(world: World) -> None:
    first = world.start([world.config(0, 2, start_timeout_s=20.0)])
    wait_until(lambda: 0 in world.server._values.scopes.get("init/1/hello", {}), "hello")
    card = json.loads(world.server._values.scopes["init/1/hello"][0])
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(f"\0{card['unix_name']}")
        rights = array.array("i", [0])
        stranger.sendmsg([bytes(72)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        stranger.settimeout(10)
        assert stranger.recv(1) == b""
    assert len(os.listdir("/proc/self/fd")) <= before
    second = world.start([world.config(1, 2)])
    assert all(isinstance(result, Connections) for result in first() + second())


def settled_descriptors(world: World) -> int:
    """Open descriptors of this process, after the server has seen all clients go."""
    wait_until(lambda: not world.server._peers, "the clients' end")
    with Client(
        world.server.endpoint,
        parse_secret(world.secret),
        rank=9,
        generation=0,
        deadline=time.monotonic() + 10,
    ) as client:
        client.gather("settled", 1, 10, own=(0, b""))  # so it has closed their sockets, too
        return len(os.listdir("/proc/self/fd"))


def test_many_generations_leak_no_descriptor_thread_or_key(world: World) -> None:
    def once(generation: int) -> None:
        world.connect(3, hosts="aab", generation=generation)
        world.disconnect()

    once(1)
    before, threads = settled_descriptors(world), threading.active_count()
    for generation in range(2, 152):
        once(generation)
    assert settled_descriptors(world) == before
    assert threading.active_count() == threads
    store = world.server._values
    wait_until(lambda: not (store.scopes or store._writers or store._gathers), "an empty store")


def test_failed_generations_leak_no_descriptor(world: World) -> None:
    def once(generation: int) -> None:
        results = world.start([world.config(0, 2, start_timeout_s=0.1)], generation=generation)()
        # A busy machine may need longer than this for the rendezvous, which is another error.
        assert isinstance(results[0], HorovodInternalError)

    once(1)
    before = settled_descriptors(world)
    for generation in range(2, 12):
        once(generation)
    assert settled_descriptors(world) == before
