"""Addresses and socket options: which interface to listen on, which host is this one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import ipaddress
import os
import select
import socket
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = [
    "abstract_listeners",
    "address_for",
    "address_of",
    "address_towards",
    "await_ready",
    "endpoint_text",
    "give_up_after",
    "has_route",
    "host_identity",
    "interfaces",
    "is_local",
    "is_loopback",
    "is_silent",
    "listener",
    "listener_everywhere",
    "look_up",
    "loopback",
    "nearest_first",
    "own_addresses",
    "parse_endpoint",
    "parse_endpoints",
    "peer",
    "peer_address",
    "probe",
    "resolve",
    "tune",
]

_BACKLOG = 1024
_CREDENTIALS = struct.Struct("iII")
_PROBE_TIMEOUT_S = 1.0
_SIOCGIFADDR = 0x8915
_IFA_F_UNUSABLE = 0x40 | 0x08  # tentative, or another host has it; see linux/if_addr.h
_TCP_ESTABLISHED = 1
_TCP_INFO_LAST_ACK = 56  # offset of tcpi_last_ack_recv, in ms; see linux/tcp.h
_KEEPALIVE_IDLE_S = 5
_KEEPALIVE_INTERVAL_S = 5
_KEEPALIVE_COUNT = 3
#: As long as keepalive takes to give a silent peer up; covers data that is never acknowledged.
_USER_TIMEOUT_MS = 1000 * (_KEEPALIVE_IDLE_S + _KEEPALIVE_INTERVAL_S * _KEEPALIVE_COUNT)


def peer(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id of the peer of a Unix socket; for a listener, those at its listen()."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(data)
    return int(process), int(user)


def peer_address(connection: socket.socket) -> str:
    """The peer's address, as this host sees it; empty: a Unix socket. Raises OSError if the peer is gone."""
    return "" if connection.family == socket.AF_UNIX else str(connection.getpeername()[0])


def abstract_listeners(prefix: str) -> list[tuple[str, int, int]]:
    """Name, process id and user id of each listening abstract socket with this prefix.

    The ids are known only after connecting, so this function connects to each one and closes the connection.

    Args:
        prefix: of the names, without the leading NUL.
    """
    try:
        lines = Path("/proc/net/unix").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    found = []
    for name in sorted({line.split(" @", 1)[1] for line in lines if f" @{prefix}" in line}):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_PROBE_TIMEOUT_S)
            with contextlib.suppress(OSError, UnicodeError):
                connection.connect(f"\0{name}")
                found.append((f"\0{name}", *peer(connection)))
    return found


def await_ready(descriptors: Iterable[int], timeout_s: float | None, events: int = select.POLLIN) -> bool:
    """Wait until one of several descriptors is ready, or has failed; return whether one is.

    select.select() would refuse a descriptor above 1023, such as a process with many open files has.

    Args:
        descriptors: to wait for.
        timeout_s: for which to wait; None: without a limit.
        events: as of :mod:`select`.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, events)
    return bool(poll.poll(None if timeout_s is None else max(0.0, 1000 * timeout_s)))


def tune(connection: socket.socket) -> None:
    """Set on a TCP socket: no delay, and give up a silent peer after about 20 seconds."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    tcp = socket.IPPROTO_TCP
    connection.setsockopt(tcp, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(tcp, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    connection.setsockopt(tcp, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    connection.setsockopt(tcp, socket.TCP_KEEPCNT, _KEEPALIVE_COUNT)
    connection.setsockopt(tcp, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)


def probe(connection: socket.socket, silence_s: float) -> None:
    """Have a silent peer probed four times in so long, for :func:`is_silent`."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or silence_s <= 0:
        return
    tcp, interval_s = socket.IPPROTO_TCP, _probe_interval_s(silence_s)
    connection.setsockopt(tcp, socket.TCP_KEEPIDLE, interval_s)
    connection.setsockopt(tcp, socket.TCP_KEEPINTVL, interval_s)


def give_up_after(connection: socket.socket, silence_s: float) -> None:
    """Have a silent peer given up after so long instead, to the second; 0: as :func:`tune` sets it."""
    probe(connection, silence_s)
    if connection.family in (socket.AF_INET, socket.AF_INET6) and silence_s > 0:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(1000 * silence_s)))


def is_silent(connection: socket.socket, silence_s: float) -> bool:
    """Return whether a peer that :func:`probe` has probed has not answered recently.

    Probes get lost: one of two connections to a live host may be given up, but hardly both.
    """
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or silence_s <= 0:
        return True
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
    except OSError:
        return True
    (last_ms,) = struct.unpack_from("I", info, _TCP_INFO_LAST_ACK)
    least_s = silence_s - 1.5 * _probe_interval_s(silence_s)
    return info[0] != _TCP_ESTABLISHED or bool(last_ms >= 1000 * least_s)


def _probe_interval_s(silence_s: float) -> int:
    return max(1, int(silence_s / 4))


def parse_endpoint(text: str) -> tuple[str, int]:
    """``host:port`` or ``[v6]:port`` as a pair; raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise ValueError(f"{text!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def parse_endpoints(text: str) -> list[tuple[str, int]]:
    """The same of several with commas; raises ValueError."""
    return [parse_endpoint(item) for item in text.split(",")]


def nearest_first(addresses: Iterable[str], own: Iterable[str]) -> list[str]:
    """Addresses of another host in the order in which to try them: those in networks of this one's first.

    By how many leading bits they have in common with an own address. An own one itself comes last: the other
    host has the same address, for example of a bridge for containers.

    Example::

        nearest_first(["10.1.0.2", "10.2.0.2"], ["10.2.0.1"])  # ["10.2.0.2", "10.1.0.2"]
    """
    mine = [ipaddress.ip_address(address) for address in own]

    def apart(address: str) -> int:
        it = ipaddress.ip_address(address)
        bits = [(int(it) ^ int(other)).bit_length() for other in mine if other.version == it.version]
        least = min(bits, default=it.max_prefixlen)
        return 1000 if least == 0 else least

    return sorted(addresses, key=apart)


def endpoint_text(host: str, port: int) -> str:
    """The inverse of :func:`parse_endpoint`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_of(interface: str) -> str:
    """The address of an interface of this host.

    ``interface`` is a name (``eth0``), an address, a network (``10.0.0.0/16``), or several of them
    with commas, of which the first that exists here counts. Raises ValueError when none does.
    """
    own = interfaces()
    for item in filter(None, (part.strip() for part in interface.split(","))):
        for name, address in own:
            if item == name:
                return address
        try:
            network = ipaddress.ip_network(item, strict=False)
        except ValueError:
            continue
        for _, address in own:
            if ipaddress.ip_address(address) in network:
                return address
        if "/" not in item and _is_own_address(item):
            return item
    known = ", ".join(f"{name} {address}" for name, address in own)
    raise ValueError(
        f"there is no network interface {interface!r} on {socket.gethostname()} (it has: {known})"
    )


def loopback() -> str:
    """The address under which processes of this host reach each other: 127.0.0.1, or without IPv4 ::1."""
    return next(filter(_is_own_address, ("127.0.0.1", "::1")), "127.0.0.1")


def listener(address: str, port: int = 0) -> socket.socket:
    """A socket that listens on an address of this host; port 0: any that is free."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=_BACKLOG)


def listener_everywhere(port: int) -> socket.socket:
    """A socket that listens on all addresses of this host."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            family = socket.AF_INET6
            return socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=_BACKLOG)


def has_route(address: str) -> bool:
    """Return whether this host knows how to reach an address; sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
    except OSError:
        return False
    return True


def own_addresses() -> list[str]:
    """The addresses of this host by which others may reach it."""
    found = [address for _, address in interfaces()]
    return [address for address in found if not is_loopback(address)]


def is_loopback(host: str) -> bool:
    """Return whether this names the own host, on whichever host it is used."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def interfaces() -> list[tuple[str, str]]:
    """Names and addresses of this host's interfaces, with the loopback's."""
    return [*_addresses_v4(), *_addresses_v6()]


def resolve(host: str) -> list[str]:
    """The addresses of a host by its name, or its address itself; raises OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(item[4][0]) for item in found))


def host_identity() -> str:
    """An id shared by ranks that can share memory: of this boot of the machine, and its network.

    Two containers of one machine are two hosts unless they share the network, over whose Unix sockets
    memory is passed.
    """
    name = socket.gethostname()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        known = f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return name
    return f"{name} {hashlib.sha256(known.encode()).hexdigest()[:12]}"


def _addresses_v4() -> list[tuple[str, str]]:
    """An IPv4 address of each interface that has one."""
    addresses = []
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode()[:15])
                try:
                    reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                except OSError:
                    continue  # the interface has no IPv4 address
                addresses.append((name, socket.inet_ntoa(reply[20:24])))
    except OSError:
        pass  # the kernel has no IPv4
    return addresses


def _addresses_v6() -> list[tuple[str, str]]:
    """The IPv6 addresses of the interfaces, but those that only mean something on one link."""
    try:
        lines = Path("/proc/net/if_inet6").read_text("ascii").splitlines()
    except OSError:
        return []  # the kernel has no IPv6
    addresses = []
    for digits, _, _, _, flags, name in (line.split() for line in lines):
        address = ipaddress.IPv6Address(int(digits, 16))
        if not address.is_link_local and not int(flags, 16) & _IFA_F_UNUSABLE:
            addresses.append((name, str(address)))
    return addresses


def _is_own_address(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL):
            return False
        raise
    return True


def address_towards(host: str) -> str:
    """The address of this host that the kernel would use to reach ``host``; sends nothing."""
    targets = _targets(host) or (  # else an alias that only ssh knows: use the default route
        (socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("192.0.2.1", 9)),
        (socket.AF_INET6, socket.SOCK_DGRAM, 0, "", ("2001:db8::1", 9, 0, 0)),
    )
    for family, kind, protocol, _, target in targets:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    raise ValueError(
        f"this host has no route to {host}; name an interface with --network-interface or POLYHVD_GLOO_IFACE"
    )


def address_for(host: str) -> str:
    """The same, or where there is no such route any address of this host by which others may reach it."""
    try:
        return address_towards(host)
    except ValueError:
        return next(iter(own_addresses()), loopback())


def look_up(host: str) -> None:
    """Ask name servers for a host, so that :func:`is_local` and :func:`address_for` answer at once."""
    is_local(host)
    address_for(host.rpartition("@")[2])


def _targets(host: str) -> tuple[tuple[Any, ...], ...]:
    """The addresses of a host, as ``getaddrinfo`` returns them; empty: they are not known."""
    with contextlib.suppress(OSError):
        return _known(host)
    return ()


@functools.lru_cache(maxsize=4096)
def _known(host: str) -> tuple[tuple[Any, ...], ...]:
    """The same, from the first lookup of this process; raises OSError if it may succeed later."""
    try:
        return tuple(socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM))
    except UnicodeError:  # it cannot be a host's name
        return ()
    except socket.gaierror as error:
        if error.errno in (socket.EAI_SYSTEM, socket.EAI_MEMORY):  # of this process, and not of the name
            raise
        return ()


@functools.cache
def _own_names() -> tuple[str, ...]:
    return "localhost", socket.gethostname(), socket.getfqdn()


def is_local(host: str) -> bool:
    """Return whether processes of ``host`` are started here, without ssh.

    127.0.0.2 and above count as other hosts, so that several can be played on one machine.
    """
    if host in _own_names():
        return True
    found = {str(item[4][0]) for item in _targets(host)}
    return any(
        address in ("127.0.0.1", "::1") or (not address.startswith("127.") and _is_own_address(address))
        for address in found
    )
