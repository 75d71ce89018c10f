"""Measures the network between hosts: a program that agents run, once as the server and once as the client.

Every connection proves the secret of this examination before anything else. All of it is bounded in time and
bytes. It is sent to hosts as text, so it uses only the standard library of Python 3.8.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import statistics
import struct
import threading
import time
from typing import Any

from polyhvd.launch.hosts.facts import reach_one, report
from polyhvd.rendezvous.auth import NO_RANK, Answerer, Greeting, prove
from polyhvd.rendezvous.network import loopback, nearest_first, own_addresses, tune

__all__ = ["PURPOSE", "main"]

#: Of the connections, in their greeting.
PURPOSE = "doctor"
_PING, _STREAM = b"p", b"s"
_COUNT = struct.Struct("!Q")
_CHUNK_BYTES = 1 << 18
_STREAM_BYTES_MAX = 1 << 28  # of one connection, whatever the client requests
_PINGS_MIN, _PINGS_MAX = 5, 500
_PATIENCE_S = 10.0  # of a server with a client
_CLIENTS_MAX = 64


def main(request: dict[str, Any]) -> None:
    """Serve, or measure the ways to the servers that are named."""
    secret = bytes.fromhex(request["secret"])
    if request["do"] == "serve":
        _serve(secret)
        return
    for target in request["targets"]:
        report(_measure(target, secret, request["seconds"], request["bytes"], request["timeout_s"]))


# The server


def _serve(secret: bytes) -> None:
    """Listen on every address of this host, until the agent ends this process."""
    listeners = []
    for address in own_addresses() or [loopback()]:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError):
            listeners.append(socket.create_server((address, 0), family=family))
    report({"listening": [list(listener.getsockname()[:2]) for listener in listeners]})
    room = threading.Semaphore(_CLIENTS_MAX)
    while listeners:
        for listener in select.select(listeners, [], [])[0]:
            connection, _ = listener.accept()
            if room.acquire(blocking=False):
                threading.Thread(target=_attend, args=(connection, secret, room), daemon=True).start()
            else:
                connection.close()


def _attend(connection: socket.socket, secret: bytes, room: threading.Semaphore) -> None:
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError), connection:
        stack.callback(room.release)
        tune(connection)
        connection.settimeout(_PATIENCE_S)
        machine = Answerer(secret)
        while machine.wanted:
            reply = machine.receive(_read(connection, machine.wanted))
            connection.sendall(reply)
        kind = _read(connection, 1)
        if kind == _PING:
            while data := connection.recv(1):
                connection.sendall(data)
        elif kind == _STREAM:
            count = 0
            while count < _STREAM_BYTES_MAX and (data := connection.recv(_CHUNK_BYTES)):
                count += len(data)
            connection.sendall(_COUNT.pack(count))


# The client


def _measure(
    target: dict[str, Any], secret: bytes, seconds: float, most: int, timeout_s: float
) -> dict[str, Any]:
    """Properties of the connection to one server; a dictionary of JSON."""
    link: dict[str, Any] = {"to": target["to"], "reached": False, "tried": []}
    ports = {address: port for address, port in target["listening"]}
    order = nearest_first(ports, own_addresses())
    number, _, failed = reach_one([[item, ports[item]] for item in order], secret, timeout_s, PURPOSE)
    link["tried"] = failed
    if number < 0:
        return link
    address = order[number]
    try:
        with _connect(address, ports[address], secret) as connection:
            link["from_address"] = connection.getsockname()[0]
            link["latency_us"] = _latency_us(connection, seconds)
        with _connect(address, ports[address], secret) as connection:
            link["bandwidth_mb_s"] = _bandwidth_mb_s(connection, seconds, most)
    except OSError as error:
        link["tried"] = [*failed, [address, f"it connects, and then: {error.strerror or error}"]]
        return link
    return {**link, "reached": True, "address": address}


def _connect(address: str, port: int, secret: bytes) -> socket.socket:
    connection = socket.create_connection((address, port), timeout=_PATIENCE_S)
    try:
        tune(connection)
        prove(connection, secret, Greeting(PURPOSE, 0, NO_RANK, NO_RANK), time.monotonic() + _PATIENCE_S)
        connection.settimeout(_PATIENCE_S)
    except BaseException:
        connection.close()
        raise
    return connection


def _latency_us(connection: socket.socket, seconds: float) -> float:
    """Half of the median round trip of a byte."""
    connection.sendall(_PING)
    trips: list[float] = []
    deadline = time.monotonic() + seconds
    while len(trips) < _PINGS_MAX and (len(trips) < _PINGS_MIN or time.monotonic() < deadline):
        begin = time.perf_counter()
        connection.sendall(b".")
        _read(connection, 1)
        trips.append(time.perf_counter() - begin)
    return round(1e6 * statistics.median(trips) / 2, 1)


def _bandwidth_mb_s(connection: socket.socket, seconds: float, most: int) -> float:
    """The throughput of one connection, until the other side confirms that it has received all."""
    connection.sendall(_STREAM)
    chunk = os.urandom(_CHUNK_BYTES)
    begin = time.perf_counter()
    count = 0
    while count < min(most, _STREAM_BYTES_MAX) and time.perf_counter() < begin + seconds:
        connection.sendall(chunk)
        count += len(chunk)
    connection.shutdown(socket.SHUT_WR)
    (arrived,) = _COUNT.unpack(_read(connection, _COUNT.size))
    return float(round(arrived / (time.perf_counter() - begin) / 1e6, 1))


def _read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return data
