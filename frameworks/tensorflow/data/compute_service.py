"""tf.data's own service beside a training job, with Horovod's names. See ``polyhvd docs data``.

Dispatchers and workers run in a compute job (:mod:`polyhvd.tensorflow.data.compute_worker`), or dispatchers
in the training job. TensorFlow's servers trust everybody in their network.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import polyhvd.tensorflow as hvd
import tensorflow as tf
from polyhvd.tensorflow.data.forwarding import Forward
from polyhvd.tensorflow.data.registry import Addresses, ComputeClient, ComputeService

from polyhvd.config import Settings
from polyhvd.errors import DataError
from polyhvd.rendezvous import network

__all__ = [
    "ComputeClient",
    "ComputeService",
    "TfDataServiceConfig",
    "compute_worker_fn",
    "send_to_data_service",
    "tf_data_service",
]

_LOG = logging.getLogger("polyhvd")
_SERVICE = tf.data.experimental.service
_SIDES = ("compute", "training")
_HEARTBEAT_MS = 1000
_FILE_S = 600.0  # to wait for a file at most
_LOOK_S = 0.2


@dataclass(frozen=True)
class TfDataServiceConfig:
    """How training processes find a compute job, and what is in it.

    Args:
        dispatchers: how many there are: one for all ranks of the training job, or one for each.
        workers_per_dispatcher: how many ranks of the compute job work for each of them.
        dispatcher_side: where dispatchers run: ``"compute"`` or ``"training"``.
        addresses: of the :class:`ComputeService`.
        key: of the same, with which processes prove that they belong to the job.
        timeout: seconds in which dispatchers and workers have to start, and to be reached.

    Raises:
        ValueError: a number is not positive, or the side is no such word.

    Example::

        config = TfDataServiceConfig.read("/shared/compute.json", wait_for_file_creation=True)
    """

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    addresses: Addresses
    key: bytes
    timeout: int = 60

    def __post_init__(self) -> None:
        for name in ("dispatchers", "workers_per_dispatcher", "timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive; found {getattr(self, name)!r}")
        if self.dispatcher_side not in _SIDES:
            raise ValueError(f"dispatcher_side must be one of {_SIDES}; found {self.dispatcher_side!r}")

    def compute_client(self, verbose: int = 1) -> ComputeClient:
        """A connection to the compute job, which can end it.

        Args:
            verbose: has no effect.

        Raises:
            ConnectionError: it cannot be reached within ``timeout``.
        """
        return ComputeClient(self.addresses, self.key, self.timeout, self.workers_per_dispatcher)

    def to_dict(self) -> dict[str, Any]:
        """The fields as values of JSON."""
        return {**asdict(self), "key": self.key.hex()}

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> TfDataServiceConfig:
        """The inverse of :meth:`to_dict`.

        Args:
            config: the fields.

        Raises:
            ValueError: a field is missing, unknown, or cannot be used.
        """
        names = {field.name for field in fields(TfDataServiceConfig)}
        if wrong := names.symmetric_difference(config) - {"timeout"}:
            raise ValueError(
                f"not a configuration of tf.data's service: missing or unknown keys: {sorted(wrong)}"
            )
        listed = config["addresses"].items()
        addresses = {name: [(str(host), int(port)) for host, port in items] for name, items in listed}
        values = {**config, "key": bytes.fromhex(config["key"]), "addresses": addresses}
        return TfDataServiceConfig(**values)

    def write(self, filename: str) -> None:
        """Write a file that only this user can read, which replaces an older one at once.

        Args:
            filename: of the file; it contains the key.

        Raises:
            OSError: it cannot be written.
        """
        path = Path(filename)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
            try:
                json.dump(self.to_dict(), file)
                file.flush()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise

    @staticmethod
    def read(
        filename: str, wait_for_file_creation: bool = False, timeout: float = _FILE_S
    ) -> TfDataServiceConfig:
        """The configuration that :meth:`write` has written.

        Args:
            filename: of the file.
            wait_for_file_creation: whether to wait for a file that is not there.
            timeout: seconds to wait for it.

        Raises:
            TimeoutError: it was not there in time.
            OSError: it cannot be read.
            ValueError: it has something else in it.
        """
        path, deadline = Path(filename), time.monotonic() + timeout
        while wait_for_file_creation and not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{path} was not written within {timeout:g} s; start the compute job that writes it: "
                    f"polyhvdrun -np 2 python -m polyhvd.tensorflow.data.compute_worker {path}"
                )
            time.sleep(_LOOK_S)
        try:
            return TfDataServiceConfig.from_dict(json.loads(path.read_text()))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error


@contextlib.contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """The address of the dispatcher for this rank of a training job, which it starts if that is its part.

    While this process lives, so does the compute job. If the compute job is lost, TensorFlow's iterators
    raise an error instead of waiting for it.

    Args:
        compute_config: of the compute job.
        rank: of this process in the training job.

    Raises:
        ConnectionError: the compute job cannot be reached.
        TimeoutError: a dispatcher or worker has not started within ``timeout`` of the configuration.
        ValueError: there is no dispatcher for this rank.
        DataError: from the body, in place of an error that it has raised, after the compute job was lost.

    Example::

        with tf_data_service(config, hvd.rank()) as address:
            data = data.apply(tf.data.experimental.service.distribute("distributed_epoch", address))
            model.fit(data, steps_per_epoch=100)
    """
    with contextlib.ExitStack() as opened:
        link, address = _open(compute_config, rank, opened)
        try:
            yield address
        except tf.errors.OpError as error:
            if link.loss:
                raise DataError(link.loss) from error
            raise


def send_to_data_service(
    dataset: tf.data.Dataset,
    compute_config: TfDataServiceConfig,
    rank: int,
    size: int | None = None,
    processing_mode: str = "distributed_epoch",
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> tf.data.Dataset:
    """Have the compute job produce the elements of a dataset, which is also a method of ``tf.data.Dataset``.

    Args:
        dataset: what the workers do; it cannot call Python.
        compute_config: of the compute job, with dispatchers on the compute side.
        rank: of this process in the training job.
        size: number of ranks of the training job; needed for ``round_robin``.
        processing_mode: as of ``tf.data.experimental.service.distribute``.
        reuse_dataset: whether all ranks share the elements, each of which goes to the rank that asks first;
            False: each rank gets all elements.
        round_robin: whether they go to the ranks in turn, with ``reuse_dataset``; the dataset must not end.

    Raises:
        ConnectionError: the compute job cannot be reached.
        RuntimeError: dispatchers are on the training side: use :func:`tf_data_service`.
        TimeoutError: a dispatcher or worker has not started within ``timeout`` of the configuration.
        ValueError: there is no dispatcher for this rank, or no size.

    Example::

        data = data.batch(128).send_to_data_service(config, hvd.rank(), hvd.size(), reuse_dataset=True)
    """
    if compute_config.dispatcher_side == "training":
        raise RuntimeError(
            "send_to_data_service(): the dispatchers of this configuration are on the training side; use "
            "tf_data_service() as a context manager, with tf.data.experimental.service.distribute()"
        )
    in_turn = reuse_dataset and round_robin
    if in_turn and size is None:
        raise ValueError("send_to_data_service(): round_robin needs size, the number of ranks")
    _, address = _open(compute_config, rank, _until_the_end)
    return dataset.apply(
        _SERVICE.distribute(
            processing_mode=processing_mode,
            service=address,
            job_name="job" if reuse_dataset else None,
            consumer_index=rank if in_turn else None,
            num_consumers=size if in_turn else None,
        )
    )


tf.data.Dataset.send_to_data_service = send_to_data_service


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """Be a rank of a compute job, until it is to end: a worker, and on some ranks a dispatcher.

    Args:
        compute_config: of the job.

    Raises:
        ConnectionError: the :class:`ComputeService` cannot be reached, or was killed.
        TimeoutError: the dispatcher of this rank has not started in time.
        ValueError: the number of ranks is not that of the configuration.

    Example::

        polyhvd.run(compute_worker_fn, args=(config,), np=4)
    """
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    each = compute_config.workers_per_dispatcher
    if size != compute_config.dispatchers * each:
        raise ValueError(
            f"the compute job has {size} ranks; dispatchers ({compute_config.dispatchers}) times "
            f"workers_per_dispatcher ({each}) have to be as many"
        )
    number = rank // each
    dispatcher = worker = None
    with compute_config.compute_client() as client:
        host = _own_host(client)
        if compute_config.dispatcher_side == "compute" and rank % each == 0:
            dispatcher = _SERVICE.DispatchServer()
            client.register_dispatcher(number, _address(host, dispatcher))
        address = client.wait_for_dispatcher_registration(number, compute_config.timeout)
        worker = _SERVICE.WorkerServer(
            _SERVICE.WorkerConfig(
                dispatcher_address=address.partition("://")[2],
                worker_address=f"[{host}]:%port%" if ":" in host else f"{host}:%port%",
                heartbeat_interval_ms=_HEARTBEAT_MS,
                dispatcher_timeout_ms=1000 * compute_config.timeout,
            )
        )
        client.register_worker_for_dispatcher(number, rank)
        client.wait_for_shutdown()
        del worker, dispatcher  # which stops them, and has no public name in all versions


class _Link:
    """The presence of this process in a compute job, from its first use to the end of the process."""

    def __init__(self, config: TfDataServiceConfig) -> None:
        self.client = config.compute_client()
        self.client.register_training()
        self.loss = ""  # why the compute job is gone
        self._lock = threading.Lock()
        self._forwards: set[Forward] = set()
        threading.Thread(target=self._watch, name="polyhvd-data-service", daemon=True).start()

    def _watch(self) -> None:
        try:
            self.client.wait_for_shutdown()
            loss, level = "tf.data's service was requested to end, by shutdown()", logging.INFO
        except ConnectionError as error:
            loss, level = f"{error}; its compute job was killed, or has failed", logging.ERROR
        with self._lock:
            self.loss = loss
            forwards = list(self._forwards)
        _LOG.log(level, "%s; datasets that read from it raise NotFoundError", loss)
        for forward in forwards:
            forward.fail()

    def forward(self, address: str, opened: contextlib.ExitStack) -> str:
        """An address of this process for that of a dispatcher."""
        forward = Forward(address)
        opened.callback(self._close, forward)
        with self._lock:
            if self.loss:
                raise ConnectionError(self.loss)
            self._forwards.add(forward)
        return forward.address

    def _close(self, forward: Forward) -> None:
        with self._lock:
            self._forwards.discard(forward)
        forward.close()


_links: dict[bytes, _Link] = {}
_until_the_end = contextlib.ExitStack()  # what datasets need that have no context


def _open(config: TfDataServiceConfig, rank: int, opened: contextlib.ExitStack) -> tuple[_Link, str]:
    """The link to a compute job, and the address of a rank's dispatcher, while the stack is open."""
    number = rank if config.dispatchers > 1 else 0
    if not 0 <= number < config.dispatchers:
        raise ValueError(
            f"rank {rank} has no dispatcher, since tf.data's service has {config.dispatchers}: start it with "
            "one dispatcher for all ranks, or with one for each"
        )
    link = _links.get(config.key)
    if link is None or link.loss:
        link = _links[config.key] = _Link(config)
    if config.dispatcher_side == "training" and number == rank:
        dispatcher = _SERVICE.DispatchServer()
        opened.callback(lambda kept: None, dispatcher)  # it stops when it is dropped
        link.client.register_dispatcher(number, _address(_own_host(link.client), dispatcher))
        opened.callback(link.client.withdraw_dispatcher, number)
    address = link.client.wait_for_dispatcher_registration(number, config.timeout)
    link.client.wait_for_dispatcher_worker_registration(number, config.timeout)
    return link, link.forward(address, opened)


def _own_host(client: ComputeClient) -> str:
    """The address of this host for processes of other hosts."""
    if interface := Settings.from_environment().interface:
        return network.address_of(interface)
    if network.is_loopback(client.address):
        return next(iter(network.own_addresses()), client.address)
    return client.address


def _address(host: str, server: Any) -> str:
    """That of a dispatcher, whose ``target`` names this host ``localhost``."""
    protocol, _, place = server.target.partition("://")
    return f"{protocol}://{network.endpoint_text(host, int(place.rpartition(':')[2]))}"


def __dir__() -> list[str]:
    return __all__
