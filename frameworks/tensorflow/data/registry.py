"""Where dispatchers and workers of tf.data's service register, and training processes find them.

One process of the compute job serves it, or Spark's driver. An entry ends with the connection of the process
that made it. When all training processes are gone, however they ended, the service ends, too.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from polyhvd.rendezvous import network
from polyhvd.rendezvous.auth import NO_RANK
from polyhvd.rendezvous.client import Client
from polyhvd.rendezvous.server import Server
from polyhvd.rendezvous.store import GatherTimeoutError, StoreError

__all__ = ["Addresses", "ComputeClient", "ComputeService"]

#: Addresses and ports under which a :class:`ComputeService` can be reached, by network interface.
Addresses = Mapping[str, Sequence[tuple[str, int]]]

_LOG = logging.getLogger("polyhvd")
_DISPATCHER, _WORKER, _TRAINING, _SHUTDOWN = "dispatcher", "worker", "training", "shutdown"
_LINGER_S = 10.0  # in which another training process may follow the last one
_END_S = 10.0  # for the workers to stop
_WARN_S = 60.0  # without a training process
_LOOK_S, _LOOK_S_MAX = 0.05, 0.4
_FOREVER_S = 3e7  # workers wait for the training job
_NUMBERS = 1 << 31
_KEY_BYTES = 32


class ComputeService:
    """Serves the addresses of dispatchers and workers, in a process that outlives neither of them.

    Workers are asked to end by :meth:`shutdown`, by a client, or ten seconds after the last training process
    has ended.

    Args:
        dispatchers: how many there will be.
        workers_per_dispatcher: how many workers each of them will have.
        key: that clients have to prove, at least 16 bytes; None: a new one.
        nics: interface, network or address to listen on, or several; None: all of this host.
        keep_running: whether to serve further training jobs when one has ended.

    Raises:
        ValueError: there is no such interface.
        OSError: no port is available.

    Example::

        service = ComputeService(1, 2)
        config = TfDataServiceConfig(1, 2, "compute", service.addresses(), service.key)
    """

    def __init__(
        self,
        dispatchers: int,
        workers_per_dispatcher: int,
        key: bytes | None = None,
        nics: str | Sequence[str] | None = None,
        keep_running: bool = False,
    ) -> None:
        self.dispatchers, self.workers_per_dispatcher = dispatchers, workers_per_dispatcher
        self.key = key or secrets.token_bytes(_KEY_BYTES)
        self._keep_running = keep_running
        self._lock = threading.Lock()
        self._is_closed = False
        self._present: dict[str, set[tuple[str, int]]] = {}  # by kind: what is registered
        self._timer = self._after(_WARN_S, self._warn)
        found = network.interfaces()
        if nics:
            wanted = [nics] if isinstance(nics, str) else list(nics)
            chosen = [network.address_of(name) for name in wanted]
            found = [(name, address) for name, address in found if address in chosen] or [("", chosen[0])]
        found.sort(key=lambda item: network.is_loopback(item[1]))  # another host has it, too
        self._server = Server(self.key, found[0][1], observe=self._came, observe_loss=self._left)
        endpoints = [self._server.endpoint, *(self._server.listen(address) for _, address in found[1:])]
        self._addresses: dict[str, list[tuple[str, int]]] = {}
        for (name, _), endpoint in zip(found, endpoints, strict=True):
            self._addresses.setdefault(name, []).append(network.parse_endpoint(endpoint))

    def addresses(self) -> Addresses:
        """Addresses and ports under which this service can be reached, by network interface."""
        return self._addresses

    def shutdown(self) -> None:
        """Ask workers and dispatchers to end, wait for it ten seconds at most, and end the service."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._timer.cancel()
        self._server.post(_SHUTDOWN, 0, b"")
        deadline = time.monotonic() + _END_S
        while self._count(_WORKER) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        self._server.close()

    def _came(self, scope: str, index: int, _: bytes) -> None:
        kind = scope.partition("/")[0]
        with self._lock:
            self._present.setdefault(kind, set()).add((scope, index))
            if kind == _TRAINING:
                self._timer.cancel()

    def _left(self, scope: str, index: int) -> None:
        kind = scope.partition("/")[0]
        with self._lock:
            self._present[kind].discard((scope, index))
            if kind == _TRAINING and not (self._present[kind] or self._keep_running or self._is_closed):
                self._timer = self._after(_LINGER_S, self._end)

    def _count(self, kind: str) -> int:
        with self._lock:
            return len(self._present.get(kind, ()))

    def _after(self, seconds: float, function: Any) -> threading.Timer:
        timer = threading.Timer(seconds, function)
        timer.daemon = True
        timer.start()
        return timer

    def _end(self) -> None:
        with self._lock:
            if not (self._present[_TRAINING] or self._is_closed):
                self._server.post(_SHUTDOWN, 0, b"")

    def _warn(self) -> None:
        _LOG.warning(
            "tf.data's service: no training process has connected within %g s; it keeps waiting until "
            "one has connected and ended, or until Ctrl-C",
            _WARN_S,
        )


class ComputeClient:
    """A process's connection to the :class:`ComputeService` of its compute job; usable by several threads.

    Args:
        addresses: as :meth:`ComputeService.addresses` returns them.
        key: of the service.
        timeout: seconds in which the connection has to succeed.
        workers_per_dispatcher: as of the service.

    Raises:
        ConnectionError: the service cannot be reached, or has another key.

    Example::

        with config.compute_client() as client:
            client.shutdown()
    """

    def __init__(
        self, addresses: Addresses, key: bytes, timeout: float = 60, workers_per_dispatcher: int = 1
    ) -> None:
        listed = [network.endpoint_text(host, port) for items in addresses.values() for host, port in items]
        self._place = ",".join(listed)
        self._per_dispatcher = workers_per_dispatcher
        self._lock = threading.Lock()
        deadline = time.monotonic() + timeout
        try:
            self._client = Client(
                self._place, key, rank=NO_RANK, generation=0, deadline=deadline, server="tf.data's service"
            )
        except StoreError as error:
            raise ConnectionError(
                f"tf.data's service cannot be reached within {timeout:g} s at {self._place}: {error}. Is its "
                "compute job running, and is the configuration that of this job?"
            ) from None

    def __enter__(self) -> ComputeClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """The address of this host at which the service is reached."""
        return self._client.address

    def close(self) -> None:
        """Close the connection, and withdraw what was registered with it."""
        with self._lock:
            self._client.close()

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        """Register a dispatcher.

        Args:
            dispatcher_id: its number, from 0.
            dispatcher_address: with protocol and port, such as ``"grpc://10.0.0.1:5050"``.
        """
        self._put(f"{_DISPATCHER}/{dispatcher_id}", 0, dispatcher_address.encode())

    def withdraw_dispatcher(self, dispatcher_id: int) -> None:
        """Remove what :meth:`register_dispatcher` has registered; does nothing if the service is gone.

        Args:
            dispatcher_id: its number, from 0.
        """
        with self._lock, contextlib.suppress(StoreError):
            self._client.forget(f"{_DISPATCHER}/{dispatcher_id}", 0)

    def wait_for_dispatcher_registration(self, dispatcher_id: int, timeout: float) -> str:
        """The address of a dispatcher, once it is registered.

        Args:
            dispatcher_id: its number, from 0.
            timeout: seconds to wait.

        Raises:
            TimeoutError: it was not registered in time.
            ConnectionError: the service has ended.
        """
        try:
            (address,) = self._gather(f"{_DISPATCHER}/{dispatcher_id}", 1, timeout)
        except GatherTimeoutError:
            raise TimeoutError(
                f"tf.data's service at {self._place}: dispatcher {dispatcher_id} has not started within "
                f"{timeout:g} s. See what the processes that are to start it have printed, or raise timeout"
            ) from None
        return address.decode()

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int) -> None:
        """Register a worker that has started.

        Args:
            dispatcher_id: of its dispatcher.
            worker_id: its rank in the compute job.
        """
        self._put(f"{_WORKER}/{dispatcher_id}", worker_id % self._per_dispatcher, b"")

    def wait_for_dispatcher_worker_registration(self, dispatcher_id: int, timeout: float) -> None:
        """Return when all workers of a dispatcher are registered.

        Args:
            dispatcher_id: its number, from 0.
            timeout: seconds to wait.

        Raises:
            TimeoutError: they were not registered in time; the message has their ranks.
            ConnectionError: the service has ended.
        """
        try:
            self._gather(f"{_WORKER}/{dispatcher_id}", self._per_dispatcher, timeout)
        except GatherTimeoutError as error:
            ranks = [dispatcher_id * self._per_dispatcher + number for number in error.missing]
            raise TimeoutError(
                f"tf.data's service at {self._place}: the workers with ranks {ranks} of the compute job have "
                f"not started within {timeout:g} s. See what they have printed, or raise timeout"
            ) from None

    def register_training(self) -> None:
        """Have the service last as long as this connection, as far as it depends on this process."""
        self._put(_TRAINING, secrets.randbelow(_NUMBERS), b"")

    def shutdown(self) -> None:
        """Ask the workers and dispatchers of the compute job to end."""
        with self._lock, contextlib.suppress(StoreError):
            self._client.put(_SHUTDOWN, 0, b"")
            self._client.gather(f"{_SHUTDOWN}/arrived", 1, _END_S, own=(0, b""))

    def wait_for_shutdown(self) -> None:
        """Return when the compute job is asked to end, however late that is.

        Raises:
            ConnectionError: the service has ended without asking, since its process was killed.
        """
        self._gather(_SHUTDOWN, 1, _FOREVER_S)

    def _put(self, scope: str, index: int, value: bytes) -> None:
        try:
            with self._lock:
                self._client.put(scope, index, value, own=True)
        except StoreError as error:
            raise self._gone(error) from None

    def _gather(self, scope: str, count: int, timeout: float) -> list[bytes]:
        try:
            with self._lock:
                request = self._client.post_gather(scope, count, timeout)
            pause_s = _LOOK_S
            while True:
                with self._lock:
                    if (values := self._client.take(request)) is not None:
                        return values
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LOOK_S_MAX)
        except GatherTimeoutError:
            raise
        except StoreError as error:
            raise self._gone(error) from None

    def _gone(self, error: StoreError) -> ConnectionError:
        return ConnectionError(f"tf.data's service at {self._place} has ended: {error}")
