"""``RayExecutor``: runs functions on Ray actors, the ranks of one job. See ``polyhvd docs ray``."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn

import ray
from ray.exceptions import RayError, RaySystemError, RayTaskError, UnserializableException
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from polyhvd.errors import HorovodInternalError
from polyhvd.launch.elastic.discovery import HostDiscovery
from polyhvd.ray.elastic import ElasticParams, Jobs, put
from polyhvd.ray.meeting import by_node, join, locate
from polyhvd.ray.raylet import kill
from polyhvd.ray.room import RayHostDiscovery
from polyhvd.ray.worker import Call, ExitedError, PolyhvdWorker, call_with_object

__all__ = ["RayExecutor", "RaySettings", "StaticParams"]

#: Seconds in which the other ranks can end by themselves after one has failed, so that the cause is found.
_GRACE_S = 3.0
#: Seconds in which ranks can leave their world when the executor shuts down.
_LEAVE_S = 5.0


@dataclass
class RaySettings:
    """The result of :meth:`RayExecutor.create_settings`.

    Args:
        timeout_s: seconds for all ranks to meet in ``init()``.
        placement_group_timeout_s: seconds for Ray to start the workers.
        nics: interface, network or address of all connections; several with commas.
        discovery: of elastic jobs with ``override_discovery=False``, see
            :class:`polyhvd.ray.ElasticRayExecutor`.
    """

    timeout_s: float = 30.0
    placement_group_timeout_s: float = 100.0
    nics: str = ""
    discovery: HostDiscovery | None = None


@dataclass
class StaticParams:
    """The workers of a job that does not change; the arguments are Horovod's.

    Args:
        cpus_per_worker: CPUs that Ray reserves for each rank.
        use_gpu: whether Ray reserves GPUs for each rank.
        gpus_per_worker: number of GPUs; None: one.
        num_workers: number of ranks, on as few nodes as possible.
        num_hosts: number of nodes, each with ``num_workers_per_host`` ranks, in place of ``num_workers``.
        num_workers_per_host: with ``num_hosts``.
        use_current_placement_group: in a placement group, start the ranks in it, and make no other.

    Raises:
        ValueError: the numbers contradict each other, or one is not positive.
    """

    cpus_per_worker: float = 1
    use_gpu: bool = False
    gpus_per_worker: float | None = None
    num_workers: int | None = None
    num_hosts: int | None = None
    num_workers_per_host: int = 1
    use_current_placement_group: bool = True

    def __post_init__(self) -> None:
        if (self.num_workers is None) == (self.num_hosts is None):
            raise ValueError(
                f"num_workers={self.num_workers}, num_hosts={self.num_hosts}: expected exactly one of them"
            )
        if self.gpus_per_worker is not None and not self.use_gpu:
            raise ValueError(f"gpus_per_worker={self.gpus_per_worker} needs use_gpu=True")
        resources = self.resources
        if min(self.size, self.on_host) < 1 or not resources or min(resources.values()) < 0:
            raise ValueError(
                f"expected positive numbers; found {self.size} workers with {self.cpus_per_worker} CPUs and "
                f"{resources.get('GPU', 0)} GPUs each"
            )

    @property
    def size(self) -> int:
        """Number of ranks."""
        hosts = self.num_hosts or 0
        return hosts * self.num_workers_per_host if self.num_workers is None else self.num_workers

    @property
    def on_host(self) -> int:
        """Number of ranks that have to be on one node."""
        return 1 if self.num_hosts is None else self.num_workers_per_host

    @property
    def resources(self) -> dict[str, float]:
        """The resources that Ray reserves for each rank, by name."""
        gpus = (1 if self.gpus_per_worker is None else self.gpus_per_worker) if self.use_gpu else 0
        return {name: n for name, n in (("CPU", self.cpus_per_worker), ("GPU", gpus)) if n}

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Return the bundles of a placement group."""
        bundle = {name: amount * self.on_host for name, amount in self.resources.items()}
        return [bundle] * (self.size // self.on_host)

    @property
    def strategy(self) -> str:
        """That of a placement group."""
        return "PACK" if self.num_hosts is None else "STRICT_SPREAD"


class RayExecutor:
    """Runs functions on actors of Ray that are the ranks of one job; the interface is Horovod's.

    Ranks of one node are consecutive. When a rank fails, all workers end; :meth:`start` starts others. With
    ``min_workers`` each call of :meth:`run` is an elastic job: its workers are started for it, and the others
    go on when some of them are lost.

    Args:
        settings: of :meth:`create_settings`; None: its defaults.
        num_workers: number of ranks, on as few nodes as possible.
        num_hosts: number of nodes, each with ``num_workers_per_host`` ranks, in place of ``num_workers``.
        num_workers_per_host: with ``num_hosts``.
        cpus_per_worker: CPUs that Ray reserves for each rank.
        use_gpu: whether Ray reserves GPUs for each rank. A rank sees all GPUs of its job on its node, in
            the order of local ranks.
        gpus_per_worker: how many; None: one.
        use_current_placement_group: in a placement group, such as that of a trial of Tune, start the ranks in
            it, and make no other.
        min_workers: in place of ``num_workers``: fewest ranks of an elastic job. This and the arguments below
            are those of :class:`polyhvd.ray.ElasticParams`.
        max_workers: most ranks.
        reset_limit: how often the ranks may change before the job fails.
        cooldown_range: seconds for which the slot of a process that has failed is not used.
        elastic_timeout: seconds to wait for ``min_workers`` ranks.
        override_discovery: whether the nodes of Ray are the hosts; False: those of ``settings.discovery``.
        spares: number of processes beyond ``max_workers`` that take the places of ranks that are lost.

    Raises:
        ValueError: the numbers contradict each other, or one is not positive.

    Example::

        executor = RayExecutor(RayExecutor.create_settings(), num_workers=4)
        executor.start()
        results = executor.run(train, args=[0.01])
        executor.shutdown()
    """

    def __init__(
        self,
        settings: RaySettings | None = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: float = 1,
        use_gpu: bool = False,
        gpus_per_worker: float | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[float] | None = None,
        elastic_timeout: float = 600,
        override_discovery: bool = True,
        spares: int = 0,
    ) -> None:
        self._settings = settings or RaySettings()
        self._elastic: Jobs | None = None
        if min_workers is not None:
            if num_workers is not None or num_hosts is not None:
                raise ValueError(
                    f"RayExecutor(num_workers={num_workers}, num_hosts={num_hosts}, "
                    f"min_workers={min_workers}): give one of them"
                )
            params = ElasticParams(
                cpus_per_worker=cpus_per_worker,
                use_gpu=use_gpu,
                gpus_per_worker=gpus_per_worker,
                min_workers=min_workers,
                max_workers=max_workers,
                reset_limit=reset_limit,
                cooldown_range=cooldown_range,
                elastic_timeout=elastic_timeout,
                override_discovery=override_discovery,
                spares=spares,
                use_current_placement_group=use_current_placement_group,
            )
            if override_discovery:
                self._settings.discovery = RayHostDiscovery(use_gpu, cpus_per_worker, gpus_per_worker)
            self._elastic = Jobs(
                "RayExecutor",
                params,
                self._settings.discovery,
                self._settings.timeout_s,
                self._settings.nics,
                self._settings.placement_group_timeout_s,
            )
            num_workers = min_workers
        elif (max_workers, reset_limit, cooldown_range, spares) != (None, None, None, 0):
            raise ValueError(
                f"RayExecutor(max_workers={max_workers}, reset_limit={reset_limit}, "
                f"cooldown_range={cooldown_range}, spares={spares}): needs min_workers"
            )
        self._params = StaticParams(
            cpus_per_worker=cpus_per_worker,
            use_gpu=use_gpu,
            gpus_per_worker=gpus_per_worker,
            num_workers=num_workers,
            num_hosts=num_hosts,
            num_workers_per_host=num_workers_per_host,
            use_current_placement_group=use_current_placement_group,
        )
        self._made: Call | None = None  # of an elastic job: the class of its workers' objects
        self._variables: dict[str, str] = {}  # likewise, of their environment
        #: Removes the placement group that was made for this executor.
        self._group: weakref.finalize[[Any], RayExecutor] | None = None
        self._workers: list[Any] = []  # in rank order
        self._connection: object = None  # to Ray, in which they were started
        self._ended = "it has not been started"
        self._stops = False  # shutdown() has been called since start() began
        self._lock = threading.Lock()  # while the five above change: run_remote() watches from threads
        self._is_ready = False  # of an elastic executor: start() has returned
        self._submitting = threading.Lock()
        self._starting = threading.Lock()  # until start() returns: the order of the workers is not final

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: str | Sequence[str] | None = None,
    ) -> RaySettings:
        """Return the settings of an executor.

        Args:
            timeout_s: seconds for all ranks to meet in ``init()``.
            ssh_identity_file: has no effect, and neither has ``ssh_str``: ranks need no ssh.
            placement_group_timeout_s: seconds for Ray to start the workers.
            nics: interface, network or address of all connections; several as a sequence.
        """
        interfaces = nics if isinstance(nics, str) else ",".join(nics or ())
        return RaySettings(float(timeout_s), float(placement_group_timeout_s), interfaces)

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, object] | None = None,
    ) -> None:
        """Start the workers, and make an object of ``executable_cls`` in each of them.

        An elastic executor waits until the cluster has room for ``min_workers`` ranks. :meth:`run` and
        :meth:`execute` start its workers.

        Args:
            executable_cls: a class whose objects :meth:`execute` passes to its function.
            executable_args: positional arguments of the class.
            executable_kwargs: keyword arguments of the class.
            extra_env_vars: environment variables of the ranks; values are converted by ``str()``.

        Raises:
            TimeoutError: Ray cannot start the workers in time; the message has the resources.
            RuntimeError: the executor is running, another thread is starting it, or one has called
                :meth:`shutdown` meanwhile.
            TypeError: the class and its arguments cannot be pickled.
            Exception: what the class has raised on a rank, as of :meth:`run`.
        """
        settings = self._settings
        given = {name: str(value) for name, value in (extra_env_vars or {}).items()}
        variables = {"POLYHVD_START_TIMEOUT": f"{settings.timeout_s:g}", **given}
        if settings.nics:
            variables["POLYHVD_GLOO_IFACE"] = settings.nics
        if executable_cls is not None:
            call = (executable_cls, tuple(executable_args or ()), dict(executable_kwargs or {}))
        if self._elastic is not None:
            self._elastic.start()
            self._made = None if executable_cls is None else call
            self._variables = given
            self._is_ready = True
            return
        made = None if executable_cls is None else put("RayExecutor.start", executable_cls, call)
        deadline = time.monotonic() + settings.placement_group_timeout_s
        if not self._starting.acquire(blocking=False):
            raise RuntimeError("RayExecutor.start(): another thread is starting it")
        try:
            if self._connected():
                raise RuntimeError("RayExecutor.start(): it is running; call shutdown() first")
            self._ended, self._stops = "start() has not returned", False
            try:
                self._start_workers(deadline, variables)
                if made is not None:
                    self._collect([worker.construct.remote(made) for worker in self._workers])
            except BaseException as error:
                is_stopped = self._stops and isinstance(error, Exception)
                self._end("start() has failed")
                if is_stopped:
                    raise _stopped() from None
                raise
        finally:
            self._starting.release()

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[[Any], Any]] | None = None,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank, and return the results in rank order.

        Arrays in the results may be read-only, since they lie in Ray's object store. An elastic executor does
        what :meth:`polyhvd.ray.ElasticRayExecutor.run` does; only it takes ``callbacks``.

        Raises:
            Exception: that of the rank that failed first; its ``__cause__`` is a RuntimeError with the rank
                and its traceback. The workers have ended.
            RuntimeError: a rank was killed, has called ``sys.exit()``, or failed with an exception that
                cannot be pickled; or the executor is not running, or another thread has called
                :meth:`shutdown`.
            TypeError: ``fn`` and its arguments cannot be pickled; nothing was run.
            KeyboardInterrupt: Ctrl-C. The workers have ended.
        """
        if self._elastic is not None:
            return self._run_elastic("run", fn, (fn, tuple(args or ()), dict(kwargs or {})), callbacks)
        self._refuse_callbacks("run", callbacks)
        return self._collect(self._called("run", fn, args, kwargs))

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Do what :meth:`run` does without waiting; return references to the results for ``ray.get()``.

        That raises Ray's own errors, which are of the class of the exception as well. The workers end after a
        failure as with :meth:`run`. An elastic executor raises NotImplementedError: its workers change.
        """
        self._refuse_elastic("run_remote", "run")
        calls = self._called("run_remote", fn, args, kwargs)
        workers = self._workers

        def watch() -> None:
            with contextlib.suppress(Exception):  # for the caller's ray.get() to raise
                self._collect(calls, workers)

        threading.Thread(target=watch, name="polyhvd-ray-watch", daemon=True).start()
        return calls

    def execute(
        self, fn: Callable[[Any], Any], callbacks: Sequence[Callable[[Any], Any]] | None = None
    ) -> list[Any]:
        """Call ``fn(executable)`` on every rank with the object that :meth:`start` has made there.

        Raises what :meth:`run` does, and returns what it does; so are ``callbacks``.
        """
        if self._elastic is not None:
            call: Call = (call_with_object, (self._made, fn), {})
            return self._run_elastic("execute", fn, call, callbacks)
        self._refuse_callbacks("execute", callbacks)
        workers = self._running("execute")
        function = put("RayExecutor.execute", fn, fn)
        return self._collect(self._submit(workers, "execute", function))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call ``fn(executable)`` on rank 0 only, and return its result; raises what :meth:`run` does.

        An elastic executor raises NotImplementedError: rank 0 may be lost.
        """
        self._refuse_elastic("execute_single", "execute")
        worker = self._running("execute_single")[0]
        return self._collect([worker.execute.remote(put("RayExecutor.execute_single", fn, fn))])[0]

    def shutdown(self) -> None:
        """End the workers, and give Ray their resources back; :meth:`start` may follow.

        It does the same when the executor is garbage-collected, and nothing after ``ray.shutdown()``.
        """
        if self._elastic is not None:
            self._is_ready = False
            self._elastic.stop()
            return
        try:
            if ray.is_initialized():
                with contextlib.suppress(Exception):
                    ray.wait(
                        [worker.leave.remote() for worker in self._connected()],
                        num_returns=len(self._workers),
                        timeout=_LEAVE_S,
                    )
        finally:  # also after Ctrl-C
            self._end("shutdown() has been called", stops=True)

    def _called(
        self, name: str, fn: Callable[..., Any], args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
    ) -> list[Any]:
        workers = self._running(name)
        call = put(f"RayExecutor.{name}", fn, (fn, tuple(args or ()), dict(kwargs or {})))
        return self._submit(workers, "run", call)

    def _run_elastic(
        self,
        name: str,
        fn: Callable[..., Any],
        call: Call,
        callbacks: Sequence[Callable[[Any], Any]] | None,
    ) -> list[Any]:
        assert self._elastic is not None
        if not self._is_ready:
            raise RuntimeError(f"RayExecutor.{name}(): call start() first")
        return self._elastic.run(put(f"RayExecutor.{name}", fn, call), self._variables, callbacks)

    def _refuse_elastic(self, name: str, other: str) -> None:
        if self._elastic is not None:
            raise NotImplementedError(f"RayExecutor.{name}(): not with min_workers; use {other}()")

    @staticmethod
    def _refuse_callbacks(name: str, callbacks: Sequence[Callable[[Any], Any]] | None) -> None:
        if callbacks:
            raise ValueError(f"RayExecutor.{name}(callbacks=...) needs min_workers")

    def _submit(self, workers: list[Any], method: str, argument: Any) -> list[Any]:
        """Call a method of all workers; calls of several threads reach all of them in the same order."""
        try:
            with self._submitting:
                return [getattr(worker, method).remote(argument) for worker in workers]
        except BaseException:  # Ctrl-C: some ranks may have the call, and others not
            self._end("the last call was interrupted", workers)
            raise

    def _connected(self) -> list[Any]:
        """Return the workers; ends them if the connection to Ray in which they were started has ended."""
        if self._workers and self._connection != _connection():
            self._end("ray.shutdown() has been called")
        return self._workers

    def _running(self, name: str) -> list[Any]:
        workers = self._connected()
        if not workers or self._starting.locked():
            raise RuntimeError(
                f"RayExecutor.{name}(): no workers are running: {self._ended}. Call start() first"
            )
        return workers

    def _start_workers(self, deadline: float, variables: Mapping[str, str]) -> None:
        """Start the actors, and make them ranks, before ``deadline`` by ``time.monotonic()``."""
        group, bundles = self._place(deadline)
        actor = ray.remote(PolyhvdWorker)
        resources = self._params.resources
        with self._lock:
            if self._stops:
                raise _stopped()
            actors = [
                actor.options(
                    num_cpus=resources.get("CPU", 0),
                    num_gpus=resources.get("GPU", 0),
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
                ).remote()
                for bundle in bundles
            ]
            self._workers, self._connection = actors, _connection()

        def submit(number: int, function: Callable[..., Any], /, *arguments: Any) -> Any:
            return self._workers[number].call.remote(function, *arguments)

        try:
            found = locate(submit, len(actors), deadline)
        except TimeoutError:
            raise TimeoutError(self._not_started()) from None
        order = by_node(found, first=ray.get_runtime_context().get_node_id())
        with self._lock:
            if self._stops:
                raise _stopped()
            self._workers = [actors[number] for number in order]
        join(
            submit,
            [found[number] for number in order],
            time.monotonic() + self._settings.placement_group_timeout_s,
            variables,
        )

    def _place(self, deadline: float) -> tuple[Any, list[int]]:
        """A placement group, and for each worker a bundle of it; -1: any."""
        params = self._params
        if (current := self._current_group()) is not None:
            return current, [-1] * params.size
        bundles = params.bundles

        def make() -> Any:
            with self._lock:
                if self._stops:
                    raise _stopped()
                group = placement_group(bundles, strategy=params.strategy)
                self._group = weakref.finalize(self, _remove, group)
                self._group.atexit = False  # Ray removes it when the driver ends
            return group

        with ThreadPoolExecutor(1) as thread:  # in which Ctrl-C cannot come before the group is kept
            group = thread.submit(make).result()
        while not group.wait(1):  # in which Ray ignores Ctrl-C
            if time.monotonic() >= deadline:
                raise TimeoutError(self._not_started())
        return group, [number for number in range(len(bundles)) for _ in range(params.on_host)]

    def _current_group(self) -> Any:
        """The placement group in which the workers are started; None: they get one."""
        return ray.util.get_current_placement_group() if self._params.use_current_placement_group else None

    def _not_started(self) -> str:
        """The message for workers that Ray has not started in time."""
        params = self._params
        asked = f"{params.size} workers with {_shown(params.resources)} each"
        if params.num_hosts is not None:
            asked += f", {params.on_host} on each of {params.num_hosts} nodes"
        limit = f"{self._settings.placement_group_timeout_s:g} s"
        if (group := self._current_group()) is not None:
            return (
                f"RayExecutor.start(): Ray has not started {asked} in the current placement group, within "
                f"{limit}. Its bundles: {group.bundle_specs}, of which this process may use a part. Ask for "
                "fewer workers, make the group larger, or pass use_current_placement_group=False"
            )
        nodes = [_shown(node["Resources"]) for node in ray.nodes() if node["Alive"]]
        return (
            f"RayExecutor.start(): Ray has not started {asked}, within {limit}. Free in the cluster: "
            f"{_shown(ray.available_resources())}; its nodes have: {', '.join(nodes)}. Ask for fewer "
            "workers, add nodes, or raise placement_group_timeout_s"
        )

    def _collect(self, calls: list[Any], workers: list[Any] | None = None) -> list[Any]:
        """The results in rank order; after a failure the workers of the calls end."""
        workers = self._workers if workers is None else workers
        pending = {call: rank for rank, call in enumerate(calls)}
        results: list[Any] = [None] * len(calls)
        failures: dict[int, Exception] = {}
        deadline = 0.0
        try:
            while pending:
                left_s = max(0.0, deadline - time.monotonic()) if failures else None
                ready, _ = ray.wait(list(pending), timeout=left_s)
                if not ready:
                    break
                rank = pending.pop(ready[0])
                try:
                    results[rank] = ray.get(ready[0])
                except RayError as error:
                    failures[rank] = error
                    deadline = deadline or time.monotonic() + _GRACE_S
        except BaseException:
            self._end("the last call was interrupted", workers)
            raise
        if failures:
            rank = min(failures, key=lambda rank: _precedence(failures[rank]))
            with self._lock:  # another thread may have ended the workers
                ended = "" if self._workers else self._ended
            self._end(f"rank {rank} has failed", workers)
            if ended and not isinstance(failures[rank], RayTaskError):
                raise RuntimeError(f"the workers have ended during the call: {ended}") from failures[rank]
            _raise(rank, failures[rank])
        return results

    def _end(self, why: str, only: list[Any] | None = None, *, stops: bool = False) -> None:
        """Kill the workers, or these only, and give their resources back; with ``stops`` end start(), too."""
        with self._lock:
            if only is not None and self._workers is not only:
                return
            workers, self._workers = self._workers, []
            group, self._group = self._group, None
            self._stops |= stops
            if workers or group is not None:
                self._ended = why
        if workers or group is not None:
            # Ray 2.51 ends a process that uses handles of a former connection.
            kill(workers if self._connection == _connection() else (), group)


def _remove(group: Any) -> None:
    """Remove a placement group, unless the connection to Ray that has made it has ended."""
    if ray.is_initialized():
        with contextlib.suppress(Exception):
            remove_placement_group(group)


def _connection() -> object:
    """Return what identifies the connection of this process to Ray; None: it has none, or Ray Client's."""
    connected = ray._private.worker.global_worker
    return None if connected.node is None else connected.current_cluster_and_job


def _stopped() -> RuntimeError:
    return RuntimeError("RayExecutor.start(): shutdown() has been called meanwhile")


def _shown(resources: Mapping[str, float]) -> str:
    return (
        " and ".join(f"{resources.get(name, 0):g} {name}s" for name in ("CPU", "GPU") if name in resources)
        or "none"
    )


def _precedence(error: Exception) -> int:
    """0 for what may have led to the other failures: the death of a rank, and then its exceptions."""
    if not isinstance(error, (RayTaskError, UnserializableException)):
        return 0
    return 2 if isinstance(getattr(error, "cause", None), HorovodInternalError) else 1


def _raise(rank: int, error: Exception) -> NoReturn:
    """Raise the exception of a rank."""
    if isinstance(error, UnserializableException):
        raise RuntimeError(f"rank {rank} has failed; {error}") from error
    if isinstance(error, RaySystemError) and not isinstance(error, RayTaskError):
        raise RuntimeError(f"the result of rank {rank} cannot be loaded in the driver: {error}") from error
    if not isinstance(error, RayTaskError):
        raise RuntimeError(f"rank {rank} has ended: {error}") from error
    if isinstance(error.cause, ExitedError):
        raise RuntimeError(f"rank {rank} has {error.cause}") from None
    failure = RuntimeError(f"rank {rank} has failed:\n{error}")
    if isinstance(error.cause, Exception) and not isinstance(error.cause, RayError):
        raise error.cause from failure
    raise failure from error
