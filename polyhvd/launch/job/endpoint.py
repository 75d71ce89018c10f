"""The page for Prometheus: ``polyhvdrun --metrics-port``."""

from __future__ import annotations

import contextlib
import errno
import socket
import socketserver
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any

from polyhvd.rendezvous import network

__all__ = ["Endpoint"]

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PATH = "/metrics"
_CLIENTS_MAX = 16
_CLIENT_TIMEOUT_S = 5.0
_END_TIMEOUT_S = 1.0  # until a thread whose connection was shut down has ended


class Endpoint:
    """Serves a page over HTTP, with a thread for each client, until ``close``.

    If too many clients are connected, the oldest connection ends. So clients that send nothing, or slowly, do
    not keep others from the page.

    Args:
        address: to listen on.
        port: likewise; 0: any free one.
        page: makes the page; it must not wait.

    Raises:
        ValueError: it cannot listen there.
    """

    def __init__(self, address: str, port: int, page: Callable[[], str]) -> None:
        try:
            self._server = _Server(address, port, page)
        except (OSError, OverflowError) as error:
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                raise ValueError(
                    f"--metrics-port {port}: another process listens on port {port} of {address}; choose "
                    "another port, or 0 for any free one"
                ) from None
            why = getattr(error, "strerror", "") or str(error)
            raise ValueError(f"--metrics-address {address} --metrics-port {port}: {why}") from None
        #: Its address for users.
        self.url = f"http://{network.endpoint_text(address, self._server.server_address[1])}{_PATH}"
        threading.Thread(target=self._server.serve_forever, name="polyhvd-endpoint", daemon=True).start()

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    # Not that of http.server, which looks up the name of its address and may wait for that.
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 32

    def __init__(self, address: str, port: int, page: Callable[[], str]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.page = page
        self._clients = threading.BoundedSemaphore(_CLIENTS_MAX)
        self._connections: dict[socket.socket, None] = {}  # the oldest one first; each operation is atomic
        super().__init__((address, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._clients.acquire(blocking=False):
            self._end_oldest()
            if not self._clients.acquire(timeout=_END_TIMEOUT_S):
                self.shutdown_request(request)
                return
        self._connections[request] = None
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the system has no more threads
            self._connections.pop(request, None)
            self._clients.release()
            self.shutdown_request(request)

    def _end_oldest(self) -> None:
        for connection in list(self._connections)[:1]:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                connection.shutdown(socket.SHUT_RDWR)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.pop(request, None)
            self._clients.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client has gone: nothing to print."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "polyhvdrun", ""
    timeout = _CLIENT_TIMEOUT_S

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        is_found = self.path.partition("?")[0] == _PATH
        body = (self.server.page() if is_found else f"the metrics are at {_PATH}\n").encode()
        with contextlib.suppress(OSError):
            self.send_response(200 if is_found else 404)
            self.send_header("Content-Type", _CONTENT_TYPE if is_found else "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """No line for a request."""
