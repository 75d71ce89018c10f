"""Limits of the machine, measured beside the collectives: memory copies, and bytes between two hosts."""

from __future__ import annotations

import secrets
import socket
import statistics
import threading
import time
from typing import Any

import numpy as np

import polyhvd
from polyhvd.config import Launched
from polyhvd.rendezvous import network
from polyhvd.runtime import current

__all__ = ["Link", "copy_seconds", "link"]

_TOKEN_BYTES = 32
_LINK_BYTES = 32 << 20
_PIECE_BYTES = 1 << 20
_TIMEOUT_S = 30.0
_COPY_BUDGET_S = 0.05
_CACHE_LINE = 64


def copy_seconds(size: int) -> float:
    """Median seconds of a copy of so many bytes, by all ranks at once."""
    source, target = _aligned(size), _aligned(size)
    np.copyto(target, source)
    polyhvd.barrier()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 3 or (time.perf_counter() - begin < _COPY_BUDGET_S and len(times) < 200):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _aligned(size: int) -> np.ndarray[Any, Any]:
    """Bytes that begin a cache line: some processors copy others at a tenth of the speed."""
    memory = np.ones(size + _CACHE_LINE, np.uint8)
    begin = -memory.ctypes.data % _CACHE_LINE
    return memory[begin : begin + size]


class Link:
    """Throughput of one TCP connection between rank 0's host and another, in both directions at once."""

    def __init__(self, peer: int, gigabytes_per_s: float) -> None:
        self.peer, self.gigabytes_per_s = peer, gigabytes_per_s


def link() -> Link | None:
    """Measure it on all ranks; None on a single host. Raises OSError if hosts cannot connect."""
    hosts: list[str] = polyhvd.allgather_object(current.world().placement.host)
    other = next((rank for rank, host in enumerate(hosts) if host != hosts[0]), None)
    if other is None:
        return None
    rank, token = polyhvd.rank(), secrets.token_bytes(_TOKEN_BYTES)
    listener = socket.create_server((_own_address(), 0)) if rank == 0 else None
    meeting = polyhvd.broadcast_object((listener.getsockname()[:2], token) if listener else None)
    seconds = 0.0
    if listener is not None:
        with listener:
            listener.settimeout(_TIMEOUT_S)
            seconds = _swap(_accepted(listener, meeting[1]))
    elif rank == other:
        connection = socket.create_connection(meeting[0], _TIMEOUT_S)
        connection.sendall(meeting[1])
        seconds = _swap(connection)
    slowest = max(polyhvd.allgather_object(seconds))
    return Link(other, _LINK_BYTES / slowest / 1e9)


def _own_address() -> str:
    """Return the address at which the other ranks reach this one."""
    settings = current.world().settings
    if settings.interface:
        return network.address_of(settings.interface)
    return network.address_towards(network.parse_endpoints(Launched.from_environment().rendezvous)[0][0])


def _accepted(listener: socket.socket, token: bytes) -> socket.socket:
    """The connection of the rank that knows the token, which came over the job's own connections."""
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        connection, _ = listener.accept()
        connection.settimeout(1.0)
        try:
            if secrets.compare_digest(connection.recv(_TOKEN_BYTES, socket.MSG_WAITALL), token):
                return connection
        except TimeoutError:
            pass
        connection.close()
    raise TimeoutError("the rank on the other host did not come to measure the link")


def _swap(connection: socket.socket) -> float:
    """Seconds to send and to receive the same number of bytes at once."""
    with connection:
        connection.settimeout(_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        piece = bytes(_PIECE_BYTES)
        buffer = bytearray(_PIECE_BYTES)

        def send() -> None:
            for _ in range(_LINK_BYTES // _PIECE_BYTES):
                connection.sendall(piece)

        begin = time.perf_counter()
        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        left = _LINK_BYTES
        while left > 0:
            received = connection.recv_into(buffer, min(left, _PIECE_BYTES))
            if received == 0:
                raise ConnectionError("the other host closed the connection that measures the link")
            left -= received
        sender.join(_TIMEOUT_S)
        return time.perf_counter() - begin
