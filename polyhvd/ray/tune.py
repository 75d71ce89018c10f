"""Ray Tune: trials that are jobs. See ``polyhvd docs ray``."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any

import ray
import ray.cloudpickle
from ray import tune
from ray.train._internal import session as tune_session

from polyhvd.launch.providers.precedence import RAY
from polyhvd.ray.executor import RayExecutor, StaticParams
from polyhvd.rendezvous.auth import new_secret, parse_secret
from polyhvd.rendezvous.client import Client
from polyhvd.rendezvous.server import Server
from polyhvd.rendezvous.store import GatherTimeoutError

__all__ = ["DistributedTrainableCreator"]

_REPORTED, _TAKEN = "tune/reported", "tune/taken"
_CONNECT_S = 30.0
_WAIT_S = 60.0


def DistributedTrainableCreator(
    func: Callable[[dict[str, Any]], Any],
    use_gpu: bool = False,
    num_hosts: int | None = None,
    num_slots: int = 1,
    num_cpus_per_slot: float = 1,
    timeout_s: float = 30,
    replicate_pem: bool = False,
    *,
    num_workers: int | None = None,
    num_gpus_per_slot: float | None = None,
    placement_group_timeout_s: float = 100,
) -> Callable[[dict[str, Any]], Any]:
    """Make a function for Tune that runs each trial as a job of several ranks.

    ``func`` runs on every rank, and calls ``hvd.init()``. ``ray.tune.report()`` reports on rank 0 only, and
    returns there when Tune has copied the checkpoint. ``ray.tune.get_checkpoint()`` returns the checkpoint
    from which the trial starts, or None, on every rank.

    Args:
        func: the training function; it takes the trial's config.
        use_gpu: whether Ray reserves GPUs for each rank.
        num_hosts: number of nodes of a trial, each with ``num_slots`` ranks; None: one.
        num_slots: number of ranks on each node.
        num_cpus_per_slot: CPUs that Ray reserves for each rank.
        timeout_s: seconds for all ranks to meet in ``init()``.
        replicate_pem: has no effect: ranks need no ssh.
        num_workers: number of ranks of a trial on any nodes, in place of ``num_hosts`` and ``num_slots``.
        num_gpus_per_slot: number of GPUs; None: one.
        placement_group_timeout_s: seconds for Ray to start the ranks of a trial.

    Returns:
        A function for ``ray.tune.Tuner`` or ``ray.tune.run()``, with the resources of a trial.

    Raises:
        ValueError: the numbers contradict each other, or one is not positive.

    Example::

        trainable = DistributedTrainableCreator(train, num_workers=4)
        results = tune.Tuner(trainable, param_space={"lr": tune.grid_search([0.1, 0.01])}).fit()
    """
    params = StaticParams(
        cpus_per_worker=num_cpus_per_slot,
        use_gpu=use_gpu,
        gpus_per_worker=num_gpus_per_slot,
        num_workers=num_workers,
        num_hosts=(num_hosts or 1) if num_workers is None else num_hosts,
        num_workers_per_host=num_slots,
    )

    def trial(config: dict[str, Any]) -> Any:
        settings = RayExecutor.create_settings(timeout_s, placement_group_timeout_s=placement_group_timeout_s)
        placed = {**asdict(params), "num_workers": params.size, "num_hosts": None}
        return _run(func, config, RayExecutor(settings, **placed))

    trial.__name__ = getattr(func, "__name__", "trial")
    # The trial's own process needs no resources, and is on the node of the first bundle.
    bundles = [{}, *params.bundles]
    trainable: Callable[[dict[str, Any]], Any] = tune.with_resources(
        trial, tune.PlacementGroupFactory(bundles, strategy=params.strategy)
    )
    return trainable


@dataclass(frozen=True)
class _Trial:
    """The facts about its trial that a rank needs.

    Args:
        endpoint: at which the trial's process takes reports.
        secret: to prove there.
        checkpoint: from which the trial starts.
        facts: for ``ray.tune.get_context()``.
    """

    endpoint: str
    secret: str = field(repr=False)
    checkpoint: Any
    facts: Mapping[str, Any]


# In the process of a trial --------------------------------------------------


def _run(func: Callable[[dict[str, Any]], Any], config: dict[str, Any], executor: RayExecutor) -> Any:
    """Run a trial, and return what ``func`` has returned on rank 0."""
    events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
    secret = new_secret()

    def report(server: Server, number: int, value: bytes) -> None:
        metrics, checkpoint = ray.cloudpickle.loads(value)
        tune.report(metrics, checkpoint=checkpoint)
        server.post(f"{_TAKEN}/{number}", 0, b"")

    def observe(scope: str, number: int, value: bytes) -> None:
        if scope == _REPORTED:
            events.put(lambda: report(server, number, value))

    own = tune_session.get_session()
    names = ("experiment_name", "trial_name", "trial_id", "trial_resources", "trial_dir")
    with Server(parse_secret(secret), ray.util.get_node_ip_address(), observe=observe) as server:
        facts = {name: getattr(own, name) for name in names}
        trial = _Trial(server.endpoint, secret, tune.get_checkpoint(), facts)
        executor.start()
        ended: Future[list[Any]] = Future()

        def run() -> None:
            try:
                ended.set_result(executor.run(_train, [func, config, trial]))
            except BaseException as error:
                ended.set_exception(error)
            events.put(None)

        try:
            threading.Thread(target=run, name="polyhvd-tune-run", daemon=True).start()
            while (take := events.get()) is not None:
                take()
            results = ended.result()
        except BaseException:  # Tune stops a trial by SystemExit from report()
            executor._end("the trial has ended")
            raise
        executor.shutdown()
        return results[0]


# In the processes of the ranks --------------------------------------------------


def _train(func: Callable[[dict[str, Any]], Any], config: dict[str, Any], trial: _Trial) -> Any:
    """Call the training function where Tune's functions find a session."""
    claim = RAY.detect({})
    with _Session(trial, 0 if claim is None else claim.rank or 0) as session:
        tune_session._session = session
        try:
            return func(config)
        finally:
            tune_session._session = None


class _Session:
    """The session that ``ray.tune.report()``, ``get_checkpoint()`` and ``get_context()`` use in a rank."""

    world_rank = None  # Tune's, not Ray Train's

    def __init__(self, trial: _Trial, rank: int) -> None:
        self.loaded_checkpoint = trial.checkpoint
        self.__dict__.update(trial.facts)
        self._client: Client | None = None
        self._count = 0
        if rank == 0:
            secret, deadline = parse_secret(trial.secret), time.monotonic() + _CONNECT_S
            self._client = Client(
                trial.endpoint, secret, rank=0, generation=0, deadline=deadline, server="the trial"
            )

    def __enter__(self) -> _Session:
        return self

    def __exit__(self, *_: object) -> None:
        if self._client is not None:
            self._client.close()

    def report(self, metrics: Mapping[str, Any], checkpoint: Any = None) -> None:
        """Report on rank 0; return when Tune has taken it."""
        client, number = self._client, self._count
        self._count += 1
        if client is None:
            return
        client.put(_REPORTED, number, ray.cloudpickle.dumps((dict(metrics), checkpoint)))
        client.forget(_REPORTED, number)
        while True:
            try:
                client.gather(f"{_TAKEN}/{number}", 1, _WAIT_S)
            except GatherTimeoutError:
                continue  # a scheduler may pause a trial; if its process ends, the connection does
            return
