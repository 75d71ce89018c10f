"""Two network namespaces joined by a veth pair: two hosts on one machine.

Needs root and iproute2; `available()` says whether they are there. Nothing in it reaches outside.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Namespace", "available", "host_without_ipv4", "hosts", "pairwise_hosts", "two_hosts"]


@dataclass(frozen=True)
class Namespace:
    """A host of its own, as far as the network goes."""

    name: str
    address: str

    def command(self, *argv: str) -> list[str]:
        """The command line that runs `argv` in here."""
        return ["ip", "netns", "exec", self.name, *argv]

    def popen(self, *argv: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start a process in here."""
        return subprocess.Popen(self.command(*argv), **options)

    def run(self, *argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a process in here to its end."""
        return subprocess.run(self.command(*argv), text=True, **options)

    def link(self, state: str) -> None:
        """Set this host's cable "up" or "down"."""
        _ip("-n", self.name, "link", "set", "eth0", state)


def available() -> bool:
    """Whether namespaces can be made here, and entered: in a plain chroot they can only be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    probe = f"hvd{os.getpid()}p"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode != 0:
        return False
    entered = subprocess.run(["ip", "netns", "exec", probe, "true"], capture_output=True)
    _ip("netns", "del", probe)
    return entered.returncode == 0


@contextlib.contextmanager
def two_hosts(pair: str = "") -> Iterator[tuple[Namespace, Namespace]]:
    """Make two namespaces with addresses 10.213.0.1 and .2, and remove them with all their processes.

    Several pairs at once need a name each; they do not reach each other.
    """
    one, other = (
        Namespace(f"hvd{os.getpid()}{pair}{side}", f"10.213.0.{i}") for i, side in ((1, "a"), (2, "b"))
    )
    with _made(one, other):
        _join(one, "eth0", other, "eth0")
        for host in (one, other):
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
        yield one, other


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Namespace]]:
    """Make hosts on one switch, with addresses from 10.213.0.1 on; removed with all their processes."""
    found = [Namespace(f"hvd{os.getpid()}h{i}", f"10.213.0.{i + 1}") for i in range(count)]
    switch = Namespace(f"hvd{os.getpid()}sw", "")
    with _made(*found, switch):
        _ip("-n", switch.name, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch.name, "link", "set", "br0", "up")
        for number, host in enumerate(found):
            _join(host, "eth0", switch, f"port{number}")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", switch.name, "link", "set", f"port{number}", "master", "br0")
        yield found


@contextlib.contextmanager
def pairwise_hosts(count: int) -> Iterator[list[Namespace]]:
    """Make hosts of which every two have a network of their own, and no way into the others'.

    Hosts i and j, from 0 on, have 10.213.ij.0/24, with i + 1 and j + 1 as the last bytes. The address of each
    is that in its network with host 0; that of host 0 the one in its network with host 1.
    """
    found = [Namespace(f"hvd{os.getpid()}p{i}", f"10.213.{max(i, 1)}.{i + 1}") for i in range(count)]
    with _made(*found):
        for i, j in itertools.combinations(range(count), 2):
            _join(found[i], f"to{j}", found[j], f"to{i}")
            for here, there in ((i, j), (j, i)):
                address = f"10.213.{10 * i + j}.{here + 1}/24"
                _ip("-n", found[here].name, "addr", "add", address, "dev", f"to{there}")
        yield found


@contextlib.contextmanager
def host_without_ipv4() -> Iterator[Namespace]:
    """Make a namespace that has IPv6 alone: ::1, and an address on eth0; removed as in two_hosts()."""
    host = Namespace(f"hvd{os.getpid()}v6", "fd00:213::1")
    with _made(host):
        _ip("-n", host.name, "-4", "addr", "flush", "dev", "lo")
        _ip("-n", host.name, "link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
        for interface in ("eth0", "eth1"):
            _ip("-n", host.name, "link", "set", interface, "up")
        _ip("-n", host.name, "-6", "addr", "add", f"{host.address}/64", "dev", "eth0", "nodad")
        yield host


@contextlib.contextmanager
def _made(*hosts: Namespace) -> Iterator[None]:
    """Make namespaces with a loopback interface; remove them with all their processes."""
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
            _ip("-n", host.name, "link", "set", "lo", "up")
        yield
    finally:
        for host in hosts:
            _remove(host)


def _join(one: Namespace, interface: str, other: Namespace, port: str) -> None:
    """Lay a cable between two hosts."""
    _ip("link", "add", interface, "netns", one.name, "type", "veth", "peer", port, "netns", other.name)
    for host, end in ((one, interface), (other, port)):
        _ip("-n", host.name, "link", "set", end, "up")


def _remove(host: Namespace) -> None:
    pids = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True).stdout
    for pid in pids.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), 9)
    subprocess.run(["ip", "netns", "del", host.name], capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
