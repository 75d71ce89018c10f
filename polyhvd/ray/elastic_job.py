"""One elastic job on Ray: the driver that polyhvdrun has, with actors as its processes.

:mod:`polyhvd.launch.elastic.driver` decides; this starts and watches actors for it.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar

import ray
import ray.cloudpickle
from ray.exceptions import ActorUnschedulableError, RayError, RaySystemError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from polyhvd.config import Launched
from polyhvd.launch.elastic.driver import Driver
from polyhvd.launch.elastic.function_job import DRIVER_TIMEOUT_S, Failure, FunctionJob
from polyhvd.launch.hosts.lists import Host
from polyhvd.launch.job.function import too_few_results
from polyhvd.ray.meeting import check_versions
from polyhvd.ray.ray_logger import LOGGED
from polyhvd.ray.raylet import kill
from polyhvd.ray.room import ANY, Demand, Held, Room
from polyhvd.ray.worker import ElasticWorker, Outcome
from polyhvd.runtime.placement import Placement

__all__ = ["FREED_S", "ElasticJob", "Workers"]

#: In which Ray makes the resources of an actor that has ended available.
FREED_S = 3.0
#: Ids of nodes in Ray, as opposed to addresses.
_NODE_ID = re.compile("[0-9a-f]{56}")
#: Actors in a row that have ended before they could be called: another one would end, too.
_UNSTARTED_MAX = 4


@dataclass(frozen=True)
class Workers:
    """The settings with which a job's actors are started.

    Args:
        call: a reference to the function, with its arguments.
        resources: "CPU" and "GPU" of each.
        variables: to set in the environment of each.
        address: of this host, at which they reach the driver.
        start_timeout_s: seconds for Ray to start one.
        least: number of results that the job needs.
        room: where they are started; None: on the nodes with the ids or addresses that are found.
        demand: of the job, which is not to take resources from actors that are being started.
    """

    call: Any
    resources: Mapping[str, float]
    variables: Mapping[str, str]
    address: str
    start_timeout_s: float
    least: int
    room: Room | None = None
    demand: Demand | None = None


@dataclass
class _Process:
    """A process that has not ended."""

    actor: Any
    host: str
    bundle: int  # of the placement group in which the job runs, or ANY
    start_by: float  # infinite: it has been started
    is_late: bool = False  # Ray has not started it in time, so that something else has its resources


class ElasticJob(FunctionJob):
    """See the module.

    Args:
        workers: what actors are started with.
        callbacks: called with each value that ``ray_logger.log()`` sends.
    """

    names: ClassVar[Mapping[str, str]] = {
        "--min-np": "min_workers",
        "--max-np": "max_workers",
        "--reset-limit": "reset_limit",
        "--elastic-timeout": "elastic_timeout",
        "--blacklist-cooldown-range": "cooldown_range",
        "--spares": "spares",
    }

    def __init__(self, workers: Workers, callbacks: Sequence[Callable[[Any], Any]]) -> None:
        super().__init__(workers.address)
        self._workers = workers
        self._actor_class: Any = ray.remote(ElasticWorker)  # one for all: Ray sends each to its GCS
        self._callbacks = callbacks
        self._processes: dict[int, _Process] = {}
        #: Host and bundle of one that has ended, and until when they count as held.
        self._freed: dict[int, tuple[tuple[str, int], float]] = {}
        self._numbers: dict[str, int] = {}  # of hosts, as the driver has them
        self._logged: deque[bytes] = deque()  # by the server's thread; needs no lock
        self._is_short = False  # of resources, since the last actor was started
        self._unstarted = 0  # actors that have ended before they could be called, since then
        #: Finds the hosts with their slots now; None: the user's discovery does, at its own times.
        self.find_hosts: Callable[[], Mapping[str, int]] | None = None

    def held(self) -> Held:
        """How many processes each host and bundle has, or had a moment ago; from any thread."""
        now = time.monotonic()
        counts = self._running()
        counts.update(place for place, until in list(self._freed.values()) if now < until)
        return counts

    def _running(self) -> Held:
        return Counter(
            (item.host, item.bundle) for item in list(self._processes.values()) if not item.is_late
        )

    def leave(self, host: str) -> None:
        """Have the processes of a node that Ray is draining leave at their next commit; from any thread."""
        if (number := self._numbers.get(host)) is not None:
            self.submit(lambda driver: driver.host_leaves(number, time.monotonic()))

    # For the driver, see DrivenJob

    def start_member(
        self, member: int, place: Placement, host: Host, number: int, *, knows_rank: bool
    ) -> None:
        """Ask Ray for an actor."""
        workers = self._workers
        launched = Launched(
            rendezvous=self.rendezvous.endpoint,
            secret=self.secret,
            member=member,
            host_id=str(number),
            launcher_timeout_s=DRIVER_TIMEOUT_S,
        )
        self._numbers[host.name] = number
        if workers.demand is not None:
            workers.demand.pause()
        bundle = ANY
        options: dict[str, Any] = {}
        if workers.room is not None:
            strategy = workers.room.strategy(host.name, self._running())
            bundle = getattr(strategy, "placement_group_bundle_index", ANY)
            options["scheduling_strategy"] = strategy
        elif _NODE_ID.fullmatch(host.name):
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(host.name, soft=False)
        else:
            options["resources"] = {f"node:{host.name}": 0.001}  # an address
        actor = self._actor_class.options(
            num_cpus=workers.resources.get("CPU", 0),
            num_gpus=workers.resources.get("GPU", 0),
            max_restarts=0,
            lifetime="non_detached",  # a JobConfig can have another default
            **options,
        ).remote()
        start_by = time.monotonic() + workers.start_timeout_s
        self._processes[member] = _Process(actor, host.name, bundle, start_by)
        self.places[member] = host.name
        self._watch(member, actor.ready.remote(), has_ended=False)
        result = actor.work.remote(launched, dict(workers.variables), workers.call)
        self._watch(member, result, has_ended=True)

    def kill_member(self, member: int) -> None:
        """Kill its actor, without waiting: without its GCS, Ray takes seconds for each."""
        if (found := self._processes.get(member)) is not None:
            threading.Thread(target=kill, args=([found.actor],), name="polyhvd-ray-end", daemon=True).start()

    def kill_members(self, members: Sequence[int]) -> None:
        """Kill their actors, for which Ray has a few seconds together."""
        processes = list(map(self._processes.get, members))
        kill([process.actor for process in processes if process is not None])

    # The loop

    def observe(self, scope: str, member: int, value: bytes) -> bool:
        """Keep what ``ray_logger.log()`` sends."""
        if scope != LOGGED:
            return False
        self._logged.append(value)
        self.ring()
        return True

    def _watch(self, member: int, call: Any, *, has_ended: bool) -> None:
        """Have the loop take the result of a call, or see that its actor has died, as soon as Ray knows."""

        def take(future: Future[Any]) -> None:
            self.submit(lambda driver: self._take(driver, member, future, has_ended=has_ended))

        call.future().add_done_callback(take)

    def look(self, driver: Driver, now: float) -> float:
        """Give up actors that Ray has not started in time, and replace those for which there is room."""
        if self._events:  # which may be that actors were started, while callbacks took long
            return now
        late = [number for number, item in self._processes.items() if now >= item.start_by]
        limit = f"within {self._workers.start_timeout_s:g} s"
        for member in late:
            self._processes[member].is_late = True
        if late and self.find_hosts is not None:
            with contextlib.suppress(RayError):  # the hosts stay as they are
                hosts = self.find_hosts()
                if sum(hosts.values()) < len(self._processes) and not self._is_short:
                    self._is_short = True
                    what = f"Ray has not started actors of the job {limit}: their resources are in use"
                    self.report(f"{what}; the job continues without them until there is room")
                driver.discover(hosts, now)
        for member in late:
            self._end(driver, member, 1, reason=f"is lost: Ray has not started its actor {limit}")
        return min((item.start_by for item in self._processes.values()), default=float("inf"))

    def take_events(self, driver: Driver) -> None:
        """Also call the callbacks."""
        super().take_events(driver)
        self._call_back()

    def conclude(self, driver: Driver) -> list[Any]:
        """Call the callbacks before."""
        self._call_back()
        found = super().conclude(driver)
        last = max(self._results, default=0)
        if last == 0 and len(found) < self._workers.least:  # a world may be smaller when ranks have finished
            raise too_few_results(len(found), f"min_workers={self._workers.least}")
        return found

    def _call_back(self) -> None:
        while self._logged:
            value = ray.cloudpickle.loads(self._logged.popleft())
            for callback in self._callbacks:
                callback(value)

    def _take(self, driver: Driver, member: int, future: Future[Any], *, has_ended: bool) -> None:
        """A call has ended: the process has been started, or has ended."""
        error = future.exception()
        if not has_ended:
            if error is None and member in self._processes:
                self._processes[member].start_by = float("inf")
                self._is_short = False
                self._unstarted = 0
                try:
                    check_versions({"its actor": (self.places[member], future.result())})
                except RuntimeError as other:
                    self._end(driver, member, 1, reason=f"was not started: {other}")
        elif isinstance(error, RayTaskError):  # what Ray itself does with calls has failed
            self._end(driver, member, 1, failure=Failure(str(error)))
        elif isinstance(error, RaySystemError):  # of loading; another process would have the same result
            text = f"its result cannot be loaded in the driver: {error}"
            self._end(driver, member, 1, failure=Failure(text))
        elif error is not None:
            is_new = member in self._processes and self._processes[member].start_by < float("inf")
            if is_new and not _has_lost_its_node(error):
                self._unstarted += 1
            is_unstartable = getattr(error, "actor_init_failed", False)  # would recur
            is_unstartable = is_unstartable or self._unstarted >= _UNSTARTED_MAX
            what = "was not started" if is_unstartable else "is lost"
            self._end(driver, member, 1, reason=f"{what}: {_in_a_line(error)}")
        else:
            outcome: Outcome = future.result()
            if outcome.has_value:
                self.add_result(*outcome.place, outcome.value)
            failure = Failure(outcome.text, outcome.error) if outcome.status else None
            self._end(driver, member, outcome.status, failure=failure, reported=outcome.progress)

    def _end(
        self,
        driver: Driver,
        member: int,
        status: int,
        *,
        reason: str = "",
        failure: Failure | None = None,
        reported: bytes = b"",
    ) -> None:
        """A process has ended, as of exited()."""
        if member not in self._processes:
            return
        self.kill_member(member)  # an actor is one process of the job, and no more
        now = time.monotonic()
        self._freed = {number: item for number, item in self._freed.items() if now < item[1]}
        process = self._processes.pop(member)
        if not process.is_late:
            self._freed[member] = (process.host, process.bundle), now + FREED_S
        self.exited(driver, member, status, reason=reason, failure=failure, reported=reported)


def _has_lost_its_node(error: BaseException) -> bool:
    """Return whether Ray could not start an actor because its node is lost."""
    return isinstance(error, ActorUnschedulableError) or "its node has died" in str(error)


def _in_a_line(error: BaseException) -> str:
    """Ray's last line with a reason, without its guesses."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("The actor never ran")] or lines
    return lines[-1].partition(" Some common causes")[0] if lines else type(error).__name__
