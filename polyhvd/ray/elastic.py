"""Elastic jobs on Ray: executors with Horovod's arguments. See ``polyhvd docs ray``."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import ray

from polyhvd.elastic.limits import Limits
from polyhvd.launch.elastic.discovery import Discovery, HostDiscovery
from polyhvd.launch.elastic.driven import Elastic
from polyhvd.launch.hosts.lists import Host
from polyhvd.ray.elastic_job import FREED_S, ElasticJob, Workers
from polyhvd.ray.room import Demand, GroupRoom, KnownHosts, NodeRoom, RayHostDiscovery, Room, Watched
from polyhvd.ray.worker import Call
from polyhvd.rendezvous import network

__all__ = ["ElasticParams", "ElasticRayExecutor", "ElasticSettings", "Jobs"]

_INTERVAL_S = 1.0
_SETTLE_INTERVAL_S = 0.1


@dataclass
class ElasticParams:
    """How an elastic job may change; the arguments but for the last two are Horovod's.

    Args:
        cpus_per_worker: CPUs that Ray reserves for each rank.
        use_gpu: whether Ray reserves GPUs for each rank.
        gpus_per_worker: number of GPUs; None: one.
        min_workers: fewest ranks: with fewer the job waits for others.
        max_workers: most ranks; None: as many as the cluster has room for when the job starts, without
            ``spares``.
        reset_limit: how often the ranks may change before the job fails; None: any number.
        cooldown_range: seconds for which the slot of a process that has failed is not used: after the first
            failure, and at most; None: polyhvdrun's. Other slots are used meanwhile.
        elastic_timeout: seconds to wait for ``min_workers`` ranks.
        override_discovery: whether the nodes of Ray are the hosts; False: those of ``settings.discovery``.
        spares: number of processes beyond ``max_workers`` that have called the function up to ``init()``, and
            take the places of ranks that are lost. Ray reserves for each what it does for a rank.
        use_current_placement_group: in a placement group, such as that of a trial of Tune, start the ranks in
            it only.

    Raises:
        ValueError: the numbers contradict each other.
    """

    cpus_per_worker: float = 1
    use_gpu: bool = False
    gpus_per_worker: float | None = None
    min_workers: int = 1
    max_workers: int | None = None
    reset_limit: int | None = None
    cooldown_range: Sequence[float] | None = None
    elastic_timeout: float = 600
    override_discovery: bool = True
    spares: int = 0
    use_current_placement_group: bool = True

    def __post_init__(self) -> None:
        if self.gpus_per_worker is not None and not self.use_gpu:
            raise ValueError(f"gpus_per_worker={self.gpus_per_worker} needs use_gpu=True")
        resources = self.resources
        if not resources or min(resources.values()) < 0:
            raise ValueError(
                f"cpus_per_worker={self.cpus_per_worker}, gpus_per_worker={self.gpus_per_worker}: expected "
                "positive numbers"
            )
        most = self.min_workers if self.max_workers is None else self.max_workers
        if not 1 <= self.min_workers <= most:
            raise ValueError(
                f"min_workers={self.min_workers}, max_workers={self.max_workers}: expected "
                "1 <= min_workers <= max_workers"
            )
        if self.spares < 0:
            raise ValueError(f"spares={self.spares}: expected a number from 0 on")
        self.limits(self.min_workers)

    @property
    def resources(self) -> dict[str, float]:
        """The resources that Ray reserves for each rank, by name."""
        gpus = (1 if self.gpus_per_worker is None else self.gpus_per_worker) if self.use_gpu else 0
        return {name: n for name, n in (("CPU", self.cpus_per_worker), ("GPU", gpus)) if n}

    def limits(self, slots: int) -> Limits:
        """The limits of a job that begins where there is room for so many processes; raises ValueError."""
        most = self.max_workers
        if most is None:
            most = max(slots - self.spares, self.min_workers)
        cooldown = None
        if self.cooldown_range is not None:
            try:
                low, high = self.cooldown_range
                cooldown = float(low), float(high)
            except (TypeError, ValueError):
                raise ValueError(f"cooldown_range={self.cooldown_range}: expected two numbers") from None
        try:
            return Limits(
                size=min(max(slots, self.min_workers), most),
                min_size=self.min_workers,
                max_size=most,
                spares_in_slots=self.spares,
                reset_limit=self.reset_limit,
                timeout_s=float(self.elastic_timeout),
                cooldown_s=cooldown,
            )
        except ValueError as error:
            raise ValueError(ElasticJob.renamed(str(error))) from None


class Jobs:
    """Runs elastic jobs, one after another.

    Args:
        name: of the executor, for messages.
        params: how jobs may change.
        discovery: which hosts there are.
        timeout_s: seconds for ranks to meet in ``init()``.
        nics: interface, network or address of all connections; several with commas.
        start_timeout_s: seconds for Ray to start an actor.
    """

    #: Of this driver's last job: the resources of a process, how many processes it had, and until when Ray
    #: may list their resources as used.
    _former: ClassVar[tuple[Mapping[str, float], int, float]] = ({}, 0, 0.0)

    def __init__(
        self,
        name: str,
        params: ElasticParams,
        discovery: HostDiscovery | None,
        timeout_s: float,
        nics: str,
        start_timeout_s: float,
    ) -> None:
        if discovery is None:
            raise ValueError(
                f"{name}(override_discovery=False): settings.discovery is None; set it to an object"
            )
        self._name, self._params = name, params
        self._discovery = discovery if isinstance(discovery, RayHostDiscovery) else KnownHosts(discovery)
        self._timeout_s, self._nics, self._start_timeout_s = timeout_s, nics, start_timeout_s
        self._job: ElasticJob | None = None  # that runs
        self._lock = threading.Lock()  # while that changes
        self._stops = threading.Event()  # stop() was called since start() began

    def start(self) -> None:
        """Wait until there is room for the fewest ranks that a job may have.

        Raises:
            TimeoutError: it is not there within ``elastic_timeout``.
            RuntimeError: :meth:`stop` has been called meanwhile.
        """
        self._stops.clear()
        room = self._room()
        self._wait_for_room("start", room, lambda: self._hosts(room))

    def _wait_for_room(
        self, method: str, room: Room | None, look: Callable[[], Mapping[str, int]]
    ) -> Mapping[str, int]:
        """Return the hosts when they have room, as of :meth:`start`; ``look`` finds them."""
        name, params = f"{self._name}.{method}()", self._params
        begun, pause_s = time.monotonic(), 0.0
        demand = self._demand(room)
        resources, count, freed_at = self._former
        if room is None or resources != params.resources:
            count = 0
        elif params.max_workers is not None:
            count = min(count, params.max_workers + params.spares)
        try:
            while not self._stops.wait(pause_s):
                hosts, now = look(), time.monotonic()
                slots, left_s = sum(hosts.values()), begun + params.elastic_timeout - now
                is_settled = now >= freed_at or slots >= count
                if slots >= params.min_workers and (is_settled or left_s <= 0):
                    return hosts
                if left_s <= 0:
                    where = "settings.discovery" if room is None else room.name
                    found = "" if room is None else f" {room.resources()}."
                    if isinstance(self._discovery, KnownHosts) and self._discovery.unknown:
                        found = f" No node of Ray has the id or address {self._discovery.unknown}."
                    raise TimeoutError(
                        f"{name}: {where} has room for {slots} ranks with {params.resources} "
                        f"each, fewer than min_workers={params.min_workers}, and no more has come within "
                        f"{params.elastic_timeout:g} s.{found} Ask for fewer workers, or add nodes"
                    )
                if demand is not None and is_settled:
                    demand.show_whole(params.min_workers)
                pause_s = min(_INTERVAL_S if is_settled else _SETTLE_INTERVAL_S, left_s)
            raise RuntimeError(f"{name}: shutdown() has been called meanwhile")
        finally:
            if demand is not None:
                demand.close()

    def run(
        self, call: Any, variables: Mapping[str, str], callbacks: Sequence[Callable[[Any], Any]] | None
    ) -> list[Any]:
        """Run a job.

        Args:
            call: a reference to a :data:`polyhvd.ray.worker.Call`.
            variables: to set in the environment of each process.
            callbacks: called with each value that ``ray_logger.log()`` sends.

        Raises:
            TimeoutError: there is no room for it, as of :meth:`start`.
            RuntimeError: see :meth:`ElasticRayExecutor.run`.
        """
        given = {"POLYHVD_START_TIMEOUT": f"{self._timeout_s:g}", **variables}
        if self._nics:
            given["POLYHVD_GLOO_IFACE"] = self._nics
        address = network.address_of(self._nics) if self._nics else ray.util.get_node_ip_address()
        room = self._room()
        demand = self._demand(room)
        params = self._params
        workers = Workers(
            call, params.resources, given, address, self._start_timeout_s, params.min_workers, room, demand
        )
        with self._lock:
            if self._job is not None:
                raise RuntimeError(f"{self._name}.run(): another thread runs a job with this executor")
            job = self._job = ElasticJob(workers, list(callbacks or ()))
        try:
            watched = None if room is None else Watched(room, job.held, job.leave, demand)
            discovery = Discovery(watched or self._discovery, _INTERVAL_S)
            hosts = self._wait_for_room("run", room, discovery.look)
            limits = params.limits(sum(hosts.values()))
            if watched is not None:
                watched.wanted = limits.max_size + limits.spares_in_slots
                job.find_hosts = discovery.look
            return job.run(Elastic(limits, [Host(name, slots) for name, slots in hosts.items()], discovery))
        finally:
            if demand is not None:
                demand.close()
            if count := sum(job.held().values()):
                Jobs._former = params.resources, count, time.monotonic() + FREED_S
            with self._lock:
                self._job = None
            job.close()

    def stop(self) -> None:
        """End the job that runs, if there is one, or what waits for room."""
        self._stops.set()
        with self._lock:
            if self._job is not None:
                self._job.stop("the elastic job has ended: shutdown() has been called")

    def _room(self) -> Room | None:
        """Return where the job may start processes, from the job's thread; None: the discovery decides."""
        if not isinstance(self._discovery, RayHostDiscovery):
            return None
        params = self._params
        group = ray.util.get_current_placement_group() if params.use_current_placement_group else None
        if group is not None:
            return GroupRoom(group, params.resources)
        return NodeRoom(self._discovery, params.resources)

    def _demand(self, room: Room | None) -> Demand | None:
        """Return the request for more nodes, where they can be used."""
        return Demand(self._params.resources) if isinstance(room, NodeRoom) else None

    def _hosts(self, room: Room | None) -> Mapping[str, int]:
        return self._discovery.find_available_hosts_and_slots() if room is None else room.available(Counter())


@dataclass
class ElasticSettings:
    """The result of :meth:`ElasticRayExecutor.create_settings`; its arguments are the fields."""

    min_num_proc: int = 1
    max_num_proc: int | None = None
    reset_limit: int | None = None
    elastic_timeout: float = 600
    timeout_s: float = 30
    nics: str = ""
    cooldown_range: Sequence[float] | None = None
    discovery: HostDiscovery | None = None
    spares: int = 0


class ElasticRayExecutor:
    """Runs an elastic function on actors of Ray; the interface is Horovod's.

    Each process of the job is an actor. When one is lost, the others keep their processes, models and data.

    Args:
        settings: of :meth:`create_settings`.
        use_gpu: whether Ray reserves GPUs for each rank.
        cpus_per_slot: CPUs that Ray reserves for each rank.
        gpus_per_slot: number of GPUs; None: one.
        env_vars: environment variables of the ranks; values are converted by ``str()``.
        override_discovery: whether the nodes of Ray are the hosts. False: those of ``settings.discovery``, an
            object with a method ``find_available_hosts_and_slots()`` that returns ids or addresses of nodes
            with the number of ranks of each.
        use_current_placement_group: in a placement group, such as that of a trial of Tune, start the ranks in
            it only.

    Raises:
        ValueError: the numbers contradict each other.

    Example::

        executor = ElasticRayExecutor(ElasticRayExecutor.create_settings(min_num_proc=2, max_num_proc=8))
        executor.start()
        results = executor.run(train)
    """

    def __init__(
        self,
        settings: ElasticSettings,
        use_gpu: bool = False,
        cpus_per_slot: float = 1,
        gpus_per_slot: float | None = None,
        env_vars: Mapping[str, object] | None = None,
        override_discovery: bool = True,
        use_current_placement_group: bool = True,
    ) -> None:
        params = ElasticParams(
            cpus_per_worker=cpus_per_slot,
            use_gpu=use_gpu,
            gpus_per_worker=gpus_per_slot,
            min_workers=settings.min_num_proc,
            max_workers=settings.max_num_proc,
            reset_limit=settings.reset_limit,
            cooldown_range=settings.cooldown_range,
            elastic_timeout=settings.elastic_timeout,
            override_discovery=override_discovery,
            spares=settings.spares,
            use_current_placement_group=use_current_placement_group,
        )
        if override_discovery:
            settings.discovery = RayHostDiscovery(use_gpu, cpus_per_slot, gpus_per_slot)
        self._env_vars = {name: str(value) for name, value in (env_vars or {}).items()}
        timeout_s = float(settings.timeout_s)
        self._jobs = Jobs(
            "ElasticRayExecutor", params, settings.discovery, timeout_s, settings.nics, timeout_s
        )
        self._started = False

    @staticmethod
    def create_settings(
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: float = 600,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        nics: str | Sequence[str] | None = None,
        min_np: int | None = None,
        max_np: int | None = None,
        cooldown_range: Sequence[float] | None = None,
        discovery: HostDiscovery | None = None,
        verbose: int | bool | None = None,
        spares: int = 0,
    ) -> ElasticSettings:
        """Return the settings of an executor.

        Args:
            min_num_proc: fewest ranks: with fewer the job waits for others. ``min_np`` is another name.
            max_num_proc: most ranks; None: as many as the cluster has room for when the job starts.
                ``max_np`` is another name.
            reset_limit: how often the ranks may change before the job fails; None: any number.
            elastic_timeout: seconds to wait for ``min_num_proc`` ranks.
            timeout_s: seconds for Ray to start an actor, and for ranks to meet in ``init()``.
            ssh_identity_file: has no effect, and neither has ``verbose``: ranks need no ssh.
            nics: interface, network or address of all connections; several as a sequence.
            cooldown_range: seconds for which the slot of a process that has failed is not used: after the
                first failure, and at most; None: polyhvdrun's. Other slots are used meanwhile.
            discovery: for ``override_discovery=False``.
            spares: number of processes beyond the ranks that have called the function up to ``init()``, and
                take the places of ranks that are lost, see :class:`polyhvd.ray.ElasticParams`.
        """
        return ElasticSettings(
            min_num_proc=min_num_proc if min_np is None else min_np,
            max_num_proc=max_num_proc if max_np is None else max_np,
            reset_limit=reset_limit,
            elastic_timeout=elastic_timeout,
            timeout_s=timeout_s,
            nics=nics if isinstance(nics, str) else ",".join(nics or ()),
            cooldown_range=cooldown_range,
            discovery=discovery,
            spares=spares,
        )

    def start(self) -> None:
        """Wait until the cluster has room for ``min_num_proc`` ranks.

        Raises:
            TimeoutError: it has not within ``elastic_timeout``.
            RuntimeError: another thread has called :meth:`shutdown` meanwhile.
        """
        self._jobs.start()
        self._started = True

    def run(
        self, worker_fn: Callable[[], Any], callbacks: Sequence[Callable[[Any], Any]] | None = None
    ) -> list[Any]:
        """Call a function on every rank of an elastic job; return the results of its last world by rank.

        Args:
            worker_fn: calls ``hvd.init()``, and a function that ``hvd.elastic.run`` has wrapped or
                ``hvd.elastic.train``. New processes call it as well.
            callbacks: called with each value that ``polyhvd.ray.ray_logger.log()`` sends. What one raises
                ends the job.

        Raises:
            Exception: what has ended the job on a rank; its ``__cause__`` is a RuntimeError with the
                traceback.
            RuntimeError: the job has failed otherwise: too few ranks are left, or the ranks have changed more
                often than ``reset_limit``; or the executor was not started, or another thread runs a job with
                it or has called :meth:`shutdown`.
            TimeoutError: the cluster has no room for ``min_num_proc`` ranks within ``elastic_timeout``.
            TypeError: ``worker_fn`` cannot be pickled; nothing was run.
            KeyboardInterrupt: Ctrl-C. The ranks have ended.
        """
        if not self._started:
            raise RuntimeError("ElasticRayExecutor.run(): call start() first")
        call: Call = (worker_fn, (), {})
        return self._jobs.run(put("ElasticRayExecutor.run", worker_fn, call), self._env_vars, callbacks)

    def shutdown(self) -> None:
        """End the job that another thread runs, or its ``start()``, which raises a RuntimeError."""
        self._jobs.stop()
        self._started = False


def put(name: str, function: Callable[..., Any], call: object) -> Any:
    """A reference to a call, which Ray sends to each node once; raises TypeError if it cannot be pickled."""
    try:
        return ray.put(call)
    except Exception as error:
        called = getattr(function, "__qualname__", function)
        reason = str(error.__cause__ or error).partition("\n")[0]
        raise TypeError(
            f"{name}(): {called} and its arguments cannot be sent to the ranks: {reason}"
        ) from error
