"""Machines that lack something: IPv4, the loopback interface, or memory files."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Iterator

import netns
import pytest
from launching import ROOT, Launcher

from polyhvd.rendezvous import network

PROGRAM = """
import os, sys
import numpy
import polyhvd.numpy as hvd
hvd.init()
x = hvd.allreduce(numpy.arange(70000.0) + hvd.rank(), op=hvd.Sum)
assert (x == hvd.size() * numpy.arange(70000.0) + sum(range(hvd.size()))).all()
print("size", hvd.size())
"""

#: Has memfd_create fail with ENOSYS from here on, as a container's seccomp profile may.
WITHOUT_MEMFD = """
import ctypes, os, platform, struct
number = {"x86_64": 319, "aarch64": 279}[platform.machine()]
def words(code, jump, other, k): return struct.pack("HBBI", code, jump, other, k)
program = b"".join([
    words(0x20, 0, 0, 0),  # load the system call's number
    words(0x15, 0, 1, number),
    words(0x06, 0, 0, 0x00050000 | 38),  # fail with ENOSYS
    words(0x06, 0, 0, 0x7FFF0000),  # allow
])
filter = ctypes.create_string_buffer(program, len(program))
head = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4, ctypes.addressof(filter)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
assert libc.prctl(22, 2, head, 0, 0) == 0, os.strerror(ctypes.get_errno())
try:
    os.memfd_create("x")
    raise SystemExit("the filter does nothing")
except OSError as error:
    assert error.errno == 38
"""


@pytest.fixture
def host() -> Iterator[netns.Namespace]:
    if not netns.available():
        pytest.skip("needs root and iproute2")
    with netns.host_without_ipv4() as host:
        yield host


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--network-interface", "eth0"],
        ["--network-interface", "fd00:213::/64"],
        ["--network-interface", "fd00:213::1"],
        ["-H", "[fd00:213::1]:3"],
    ],
    ids=" ".join,
)
def test_jobs_run_without_ipv4(host: netns.Namespace, options: list[str]) -> None:
    shared_memory = "0" if options else "1"
    command = [sys.executable, "-m", "polyhvd.launch", "-v", "-np", "3", *options]
    result = host.run(
        *("env", f"POLYHVD_SHARED_MEMORY={shared_memory}"),
        *(*command, sys.executable, "-c", PROGRAM),
        cwd=ROOT,
        capture_output=True,
        timeout=90,
    )
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"[{rank}] size 3" for rank in range(3)]
    assert f"rendezvous at [{'fd00:213::1' if '--network-interface' in options else '::1'}]:" in result.stderr


def test_a_loopback_interface_that_is_down_is_a_line(host: netns.Namespace) -> None:
    subprocess.run(["ip", "-n", host.name, "link", "set", "lo", "down"], check=True)
    command = [sys.executable, "-m", "polyhvd.launch", "-np", "2", sys.executable, "-c", PROGRAM]
    result = host.run(*command, cwd=ROOT, capture_output=True, timeout=60)
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert "the loopback interface is down; bring it up with 'ip link set lo up'" in line


def test_unknown_interface_lists_addresses_of_both_kinds(host: netns.Namespace) -> None:
    program = "from polyhvd.rendezvous import network; network.address_of('wlan0')"
    result = host.run(sys.executable, "-c", program, cwd=ROOT, capture_output=True, timeout=60)
    assert "lo ::1" in result.stderr
    assert "eth0 fd00:213::1" in result.stderr


def test_ipv4_is_first_where_there_is_any() -> None:
    assert network.address_of("lo") == "127.0.0.1"
    assert network.loopback() == "127.0.0.1"


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="numbers of system calls")
@pytest.mark.parametrize("poor", ["True", "rank == 0"], ids=["all-ranks", "first-rank"])
def test_ranks_use_tcp_where_memory_files_cannot_be_made_and_say_so(launcher: Launcher, poor: str) -> None:
    source = f"import os\nrank = int(os.environ['POLYHVD_RANK'])\nif {poor}: exec({WITHOUT_MEMFD!r})\n"
    status, out, err = launcher.run("-np", "3", source=source + PROGRAM)
    assert status == 0, err
    assert out.count("size 3") == 3
    assert "ranks [0, 1, 2] of one host use TCP, not shared memory: rank 0: cannot make shared memory" in err
    assert "Function not implemented" in err


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="numbers of system calls")
def test_rank_alone_needs_no_memory_files() -> None:
    source = WITHOUT_MEMFD + PROGRAM
    result = subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.stdout == "size 1\n", result.stderr
