"""Two hosts with separate networks: real addresses, no shared abstract sockets, cables to cut."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import netns
import pytest
import sshd
from launching import DEADLINE_S, ROOT, Launcher

pytestmark = pytest.mark.skipif(not netns.available(), reason="needs root and iproute2")

#: Serves a rendezvous on argv[1] until standard input ends.
SERVER = """
import sys
from polyhvd.rendezvous.server import Server
from polyhvd.rendezvous.auth import parse_secret
with Server(parse_secret("ab" * 32), sys.argv[1]) as server:
    print(server.endpoint, flush=True)
    sys.stdin.read()
"""

RANK = """
import os, socket, sys, time
from polyhvd.runtime import bootstrap
from polyhvd.config import Launched, Settings
from polyhvd.launch.providers.local import meet_as
bootstrap._segment_bytes = lambda ranks: 4096
rank, size, host, endpoint, interface = sys.argv[1:]
launched = Launched(rank=int(rank), size=int(size), host_id=host, rendezvous=endpoint, secret="ab" * 32)
settings = Settings(interface=interface, start_timeout_s=20.0)
placement, store = meet_as(launched, 0, time.monotonic() + 20)
wiring = bootstrap.connect(settings, placement, store, [])
print(wiring.domains, wiring.segment_fd >= 0)
for peer, descriptor in sorted(wiring.data_fds.items()):
    connection = socket.socket(fileno=descriptor)
    connection.setblocking(True)
    connection.sendall(bytes([launched.rank]))
    assert connection.recv(1) == bytes([peer])
    print(peer, connection.getsockname()[0], connection.getpeername()[0])
"""


@pytest.fixture
def hosts() -> Iterator[tuple[netns.Namespace, netns.Namespace]]:
    with netns.two_hosts() as hosts:
        yield hosts


def meet(
    hosts: tuple[netns.Namespace, netns.Namespace], layout: str, ids: str, interface: str = ""
) -> list[str]:
    """Ranks at the namespaces `layout` ("ab"), with host ids `ids`; returns what each printed."""
    python = [sys.executable, "-c"]
    pipes = {"cwd": ROOT, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    server = hosts[0].popen(*python, SERVER, hosts[0].address, **pipes)
    assert server.stdout is not None
    endpoint = server.stdout.readline().decode().strip()
    ranks = [
        hosts["ab".index(place)].popen(
            *python, RANK, str(r), str(len(layout)), ids[r], endpoint, interface, **pipes
        )
        for r, place in enumerate(layout)
    ]
    outputs = [rank.communicate(timeout=DEADLINE_S)[0].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), "\n".join(outputs)
    server.communicate()
    return outputs


@pytest.mark.parametrize("interface", ["", "eth0", "10.213.0.0/24"])
def test_ranks_of_two_hosts_meet(hosts: tuple[netns.Namespace, netns.Namespace], interface: str) -> None:
    outputs = meet(hosts, "aabb", "0011", interface)
    assert outputs[0] == "[[0, 1], [2, 3]] True\n2 10.213.0.1 10.213.0.2\n3 10.213.0.1 10.213.0.2\n"
    assert outputs[3] == "[[0, 1], [2, 3]] True\n0 10.213.0.2 10.213.0.1\n1 10.213.0.2 10.213.0.1\n"


def test_one_host_in_two_containers_falls_back_to_tcp(hosts: tuple[netns.Namespace, netns.Namespace]) -> None:
    outputs = meet(hosts, "aab", "000")
    assert "ranks [0, 1, 2] of one host use TCP, not shared memory: rank 2: cannot reach rank 0" in outputs[0]
    assert outputs[2].splitlines()[0] == "[[0], [1], [2]] False"


def test_listeners_are_bound_to_the_chosen_interface_alone(
    hosts: tuple[netns.Namespace, netns.Namespace], tmp_path: Path
) -> None:
    server = hosts[0].popen(
        sys.executable,
        "-c",
        SERVER,
        hosts[0].address,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    endpoint = server.stdout.readline().decode().strip()
    rank = hosts[1].popen(
        *(sys.executable, "-c", RANK, "0", "2", "0", endpoint, ""),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    found = ""
    while "10.213.0.2:" not in found:
        assert rank.poll() is None
        found = hosts[1].run("ss", "-Hltn", capture_output=True).stdout
    for host in hosts:
        listening = host.run("ss", "-Hltn", capture_output=True).stdout.splitlines()
        assert [line.split()[3].rpartition(":")[0] for line in listening] == [host.address]
    server.communicate()
    _, err = rank.communicate(timeout=DEADLINE_S)
    assert b"the launcher is gone" in err


#: What ranks of a job print of their connections.
CONNECTED = """
import socket, time
from polyhvd.config import Launched, Settings
from polyhvd.launch.providers.local import meet_as
from polyhvd.runtime import bootstrap
bootstrap._segment_bytes = lambda ranks: 4096
placement, store = meet_as(Launched.from_environment(), 0, time.monotonic() + 30)
wiring = bootstrap.connect(Settings(), placement, store, [])
for peer, descriptor in sorted(wiring.data_fds.items()):
    print(peer, socket.socket(fileno=descriptor).getpeername()[0])
"""


@pytest.mark.skipif(not sshd.available(), reason="needs openssh-server")
def test_hosts_without_a_common_network_meet_over_those_that_each_two_have(
    launcher: Launcher, tmp_path: Path
) -> None:
    with netns.pairwise_hosts(3) as hosts, sshd.sshd_on(tmp_path, hosts[1:]) as options:
        listed = f"localhost:1,{hosts[1].address}:1,{hosts[2].address}:1"
        launcher.start(*options, "-H", listed, source=CONNECTED, before=hosts[0].command())
        status, out, err = launcher.finish()
    assert status == 0, err
    assert sorted(out.splitlines()) == [
        "[0] 1 10.213.1.2",
        "[0] 2 10.213.2.3",
        "[1] 0 10.213.1.1",
        "[1] 2 10.213.12.3",
        "[2] 0 10.213.2.1",
        "[2] 1 10.213.12.2",
    ]


@pytest.mark.skipif(not sshd.available(), reason="needs openssh-server")
def test_a_host_that_cannot_connect_back_is_told_with_the_addresses_that_it_has_tried(
    launcher: Launcher, tmp_path: Path
) -> None:
    with netns.pairwise_hosts(3) as hosts, sshd.sshd_on(tmp_path, hosts[1:]) as options:
        listed = f"{hosts[1].address}:1,{hosts[2].address}:1"
        chosen = ["--network-interface", "10.213.1.0/24"]  # in which the second one is not
        launcher.start(*options, *chosen, "-H", listed, source="pass", before=hosts[0].command())
        status, _, err = launcher.finish()
    assert status == 1
    assert "1 of 2 hosts" in err
    assert re.search(r"10.213.2.3  no way back  it cannot connect .*\(10.213.1.1: .*unreachable\)", err), err


@pytest.mark.skipif(not sshd.available(), reason="needs openssh-server")
def test_a_host_that_only_ssh_can_name_tries_all_addresses_of_the_launcher(
    launcher: Launcher, tmp_path: Path
) -> None:
    """The name resolves to a host in another network, so that the first address does not lead back."""
    with netns.pairwise_hosts(3) as hosts, sshd.sshd_on(tmp_path, hosts[1:]) as options:
        alias = ["--ssh-option", f"HostName={hosts[1].address}", "--ssh-option", "StrictHostKeyChecking=no"]
        listed = f"localhost:1,{hosts[2].address}:1"
        launcher.start(*options, *alias, "-H", listed, source=CONNECTED, before=hosts[0].command())
        status, out, err = launcher.finish()
    assert status == 0, err
    assert sorted(out.splitlines()) == ["[0] 1 10.213.1.2", "[1] 0 10.213.1.1"]


# Many hosts


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[netns.Namespace], list[str]]]:
    """Eight hosts on one switch, and options of polyhvdrun that reach them by ssh."""
    if not sshd.available():
        pytest.skip("needs openssh-server")
    with netns.hosts(8) as made, sshd.sshd_on(tmp_path_factory.mktemp("ssh"), made) as options:
        yield made, options


def test_hosts_are_looked_at_side_by_side(
    launcher: Launcher, tmp_path: Path, eight: tuple[list[netns.Namespace], list[str]]
) -> None:
    hosts, options = eight
    begun = tmp_path / "begun"
    begun.mkdir()
    python = tmp_path / "python"  # of the seven other hosts: each waits for all
    python.write_text(
        f"#!/bin/sh\ntouch {begun}/$$\nwhile [ $(ls {begun} | wc -l) -lt 7 ]; do sleep 0.2; done\n"
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    listed = ",".join(f"{host.address}:1" for host in hosts)
    launcher.start(
        *options, "--remote-python", str(python), "-H", listed, argv=["/no/such"], before=hosts[0].command()
    )
    status, _, err = launcher.finish()
    assert status == 1
    assert "8 of 8 hosts" in err
    assert err.count("no program") == 8


#: Prints when it had imported everything, and when it was in.
TIMED = """
import time
import polyhvd.numpy as hvd
import numpy as np
imported = time.time()
hvd.init()
print("times", imported, time.time(), flush=True)
assert hvd.allreduce(np.ones(2), op=hvd.Sum)[0] == 64
"""


@pytest.mark.slow
def test_64_ranks_on_8_hosts_are_in_soon_after_the_last_has_come(
    launcher: Launcher, eight: tuple[list[netns.Namespace], list[str]]
) -> None:
    """1.3 s on two cores that others use as well; the bound is for machines that are worse off."""
    hosts, options = eight
    listed = ",".join(f"{host.address}:8" for host in hosts)
    patient = ["--start-timeout", "100", "--no-tag"]
    launcher.start(*options, *patient, "-H", listed, source=TIMED, before=hosts[0].command())
    assert launcher.process is not None
    out, err = launcher.process.communicate(timeout=120)
    assert launcher.process.returncode == 0, err
    times = [[float(word) for word in line.split()[1:]] for line in out.splitlines()]
    assert len(times) == 64
    took_s = max(into for _, into in times) - max(imported for imported, _ in times)
    assert took_s < 10


@pytest.mark.skipif(not sshd.available(), reason="needs openssh-server")
def test_hosts_are_named_by_addresses_of_ipv6(launcher: Launcher, tmp_path: Path) -> None:
    with netns.two_hosts() as (one, other):
        for host, address in ((one, "fd00:213::1"), (other, "fd00:213::2")):
            host.run("ip", "addr", "add", f"{address}/64", "dev", "eth0", "nodad", check=True)
        there = netns.Namespace(other.name, "fd00:213::2")
        with sshd.sshd_on(tmp_path, [there]) as options:
            listed = ["-H", "localhost:1,[fd00:213::2]:1"]
            launcher.start(*options, *listed, source=CONNECTED, before=one.command())
            status, out, err = launcher.finish()
    assert status == 0, err
    assert sorted(out.splitlines()) == ["[0] 1 fd00:213::2", "[1] 0 fd00:213::1"]


@pytest.mark.skipif(not sshd.available(), reason="needs openssh-server")
def test_a_folder_that_is_no_utf_8_is_looked_for_and_entered(launcher: Launcher, tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(folder)
    with netns.two_hosts() as (one, other), sshd.sshd_on(tmp_path, [other]) as options:
        source = "import os; print(ascii(os.getcwdb()[-4:]))"
        here = [*one.command(), "env", "-C", os.fsdecode(folder), f"PYTHONPATH={ROOT}"]
        launcher.start(*options, "-H", f"{other.address}:1", source=source, before=here)
        assert launcher.finish()[:2] == (0, "[0] b'caf\\xe9'\n")
