"""A port of this process that stands for a dispatcher of tf.data's service elsewhere.

TensorFlow waits without a limit for a dispatcher that is gone, since it could be started again. One that is
new does not know the iterators of before, and TensorFlow raises an error. So when the dispatcher's job is
lost, a new one takes this port. Only requests to the dispatcher come through here; elements come straight
from the workers.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from typing import Any

import tensorflow as tf

from polyhvd.rendezvous import network

__all__ = ["Forward"]

_LOG = logging.getLogger("polyhvd")
_BYTES = 1 << 16
_CONNECT_S = 10.0
_PORT_S = 10.0  # in which the port that was closed can be bound again
_LOOK_S = 0.1


class Forward:
    """Passes connections on to a dispatcher.

    Args:
        target: address of the dispatcher, with its protocol.

    Raises:
        OSError: no port is available.
    """

    def __init__(self, target: str) -> None:
        self._protocol, _, place = target.partition("://")
        self._target = network.parse_endpoint(place)
        self._lock = threading.Lock()
        self._is_closed = False
        self._connections: set[socket.socket] = set()
        self._successor: Any = None
        host = network.loopback()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self._port = self._listener.getsockname()[1]
        #: For ``tf.data.experimental.service.distribute``.
        self.address = f"{self._protocol}://{network.endpoint_text(host, self._port)}"
        self._start(self._accept)

    def fail(self) -> None:
        """Have iterators that use this address raise an error; returns when that is prepared."""
        with self._lock:
            if self._is_closed:
                return
            self._end()
            deadline = time.monotonic() + _PORT_S
            service = tf.data.experimental.service
            while self._successor is None:
                try:
                    config = service.DispatcherConfig(port=self._port, protocol=self._protocol)
                    self._successor = service.DispatchServer(config)
                except tf.errors.OpError as error:
                    if time.monotonic() > deadline:
                        return _LOG.error("tf.data's iterators may wait for a lost dispatcher: %s", error)
                    time.sleep(_LOOK_S)

    def close(self) -> None:
        """End all connections, and give the port back."""
        with self._lock:
            self._is_closed = True
            self._end()
            self._successor = None

    def _end(self) -> None:
        for end in (self._listener, *self._connections):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _start(self, function: Any, *args: Any) -> None:
        threading.Thread(target=function, args=args, name="polyhvd-forward", daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                connection, _ = self._listener.accept()
                self._start(self._serve, connection)

    def _serve(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(self._target, _CONNECT_S)
        except OSError:
            return near.close()
        for end in (near, far):
            end.settimeout(None)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections |= {near, far}
        self._start(self._pump, far, near)
        self._pump(near, far)
        self._connections -= {near, far}
        near.close()
        far.close()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_BYTES):
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
