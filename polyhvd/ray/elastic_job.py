"""One elastic job on Ray: the driver that polyhvdrun has, with actors as its processes.

:mod:`polyhvd.launch.elastic.driver` decides; this starts and watches actors for it, and is what it calls its
job: :class:`polyhvd.launch.elastic.driven.DrivenJob`.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NoReturn

import ray
import ray.cloudpickle
from ray.exceptions import ActorHandleNotFoundError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from polyhvd.config import Launched
from polyhvd.launch.elastic.driven import Elastic
from polyhvd.launch.elastic.driver import Driver
from polyhvd.launch.hosts.lists import Host
from polyhvd.launch.job.blame import Ending, describe
from polyhvd.launch.job.policy import StartReplacement, StopOthers
from polyhvd.launch.job.verdict import Verdict
from polyhvd.ray.ray_logger import LOGGED
from polyhvd.ray.worker import ElasticWorker, Outcome
from polyhvd.rendezvous.auth import new_secret, parse_secret
from polyhvd.rendezvous.server import Server
from polyhvd.runtime.placement import Placement

__all__ = ["ElasticJob", "Workers"]

#: After which a process gives the silent driver up. Its end is seen at once, but for that of its host.
_DRIVER_TIMEOUT_S = 20.0
#: In which Ray makes the resources of an actor that has ended available.
_FREED_S = 3.0
#: What options of polyhvdrun are called here, in the words of the membership.
_NAMES = {
    "--min-np": "min_workers",
    "--max-np": "max_workers",
    "--reset-limit": "reset_limit",
    "--elastic-timeout": "elastic_timeout",
}


@dataclass(frozen=True)
class Workers:
    """What the actors of a job are started with.

    Args:
        call: a reference to the function, with its arguments.
        resources: "CPU" and "GPU" of each.
        variables: to set in the environment of each.
        address: of this host, at which they reach the driver.
        start_timeout_s: seconds for Ray to start one.
    """

    call: Any
    resources: Mapping[str, float]
    variables: Mapping[str, str]
    address: str
    start_timeout_s: float


@dataclass
class _Process:
    """A process that has not ended."""

    actor: Any
    host: str
    start_by: float  # infinite: it has been started


class ElasticJob:
    """See the module. A job runs once.

    Args:
        workers: what actors are started with.
        callbacks: called with each value that ``ray_logger.log()`` sends.
    """

    def __init__(self, workers: Workers, callbacks: Sequence[Callable[[Any], Any]]) -> None:
        self._workers = workers
        self._callbacks = callbacks
        self._driver: Driver | None = None
        self._processes: dict[int, _Process] = {}
        self._freed: dict[int, tuple[str, float]] = {}  # host of one that has ended, and until when it counts
        self._ended: deque[tuple[int, bool, Future[Any]]] = deque()  # by Ray's threads; needs no lock
        self._logged: deque[bytes] = deque()  # by the server's thread; needs no lock
        self._verdict = Verdict(Driver.noun)
        self._failures: dict[int, Outcome] = {}
        self._results: dict[int, dict[int, Any]] = {}  # by generation and rank
        self._sizes: dict[int, int] = {}  # by generation
        self._reason = ""  # why the job has failed, where no process is to blame
        self._stop_at = float("inf")
        self._finished = self._stopped = False
        self._wake, self._alarm = os.pipe()
        for descriptor in (self._wake, self._alarm):
            os.set_blocking(descriptor, False)
        self._secret = new_secret()
        self.rendezvous = Server(parse_secret(self._secret), workers.address, observe=self._observe)

    def run(self, elastic: Elastic) -> list[Any]:
        """Run the job; return the results of its last world in rank order.

        Raises:
            Exception: that of the process which has ended the job, from a RuntimeError with its traceback.
            RuntimeError: the job has failed otherwise; or :meth:`stop` was called.
        """
        driver = self._driver = Driver(elastic, elastic.hosts)
        try:
            driver.begin(self, time.monotonic())
            while not (self._finished or self._stopped or time.monotonic() >= self._stop_at):
                self._turn(driver)
            return self._conclude(driver)
        finally:
            self._driver = None
            for member in list(self._processes):
                self.kill_member(member)
            self.rendezvous.close()  # from now on nothing is received for the driver
            driver.close()

    def close(self) -> None:
        """Free what is held, after :meth:`run`."""
        self.rendezvous.close()
        alarm, self._alarm = self._alarm, -1
        os.close(self._wake)
        os.close(alarm)

    def stop(self) -> None:
        """End the job; from any thread."""
        self._stopped = True
        self._ring()

    def held(self) -> Counter[str]:
        """How many slots of each host have a process, or had one a moment ago; from any thread."""
        now = time.monotonic()
        counts = Counter(item.host for item in list(self._processes.values()))
        counts.update(host for host, until in list(self._freed.values()) if now < until)
        return counts

    # For the driver, see DrivenJob

    def start_member(
        self, member: int, place: Placement, host: Host, number: int, *, knows_rank: bool
    ) -> None:
        """Ask Ray for an actor."""
        workers = self._workers
        node = next((node for node in ray.nodes() if host.name == node["NodeID"]), None)
        launched = Launched(
            rendezvous=self.rendezvous.endpoint,
            secret=self._secret,
            member=member,
            host_id=str(number),
            launcher_timeout_s=_DRIVER_TIMEOUT_S,
        )
        options: dict[str, Any] = {"resources": {f"node:{host.name}": 0.001}}  # an address
        gpus = 0
        if node is not None:
            gpus = int(node["Resources"].get("GPU", 0))
            options = {"scheduling_strategy": NodeAffinitySchedulingStrategy(host.name, soft=False)}
        actor = (
            ray.remote(ElasticWorker)
            .options(
                num_cpus=workers.resources.get("CPU", 0),
                num_gpus=workers.resources.get("GPU", 0),
                max_restarts=0,
                **options,
            )
            .remote()
        )
        start_by = time.monotonic() + workers.start_timeout_s
        self._processes[member] = _Process(actor, host.name, start_by)
        self._watch(member, actor.ready.remote(), has_ended=False)
        self._watch(
            member, actor.work.remote(launched, gpus, dict(workers.variables), workers.call), has_ended=True
        )

    def kill_member(self, member: int) -> None:
        """Kill its actor."""
        if (found := self._processes.get(member)) is not None and ray.is_initialized():
            with contextlib.suppress(ActorHandleNotFoundError):
                ray.kill(found.actor)

    def endpoint(self, number: int, numbers: Set[int]) -> str:
        """All meet at the driver."""
        return self.rendezvous.endpoint

    def report(self, text: str) -> None:
        """Print a line to standard error."""
        print(f"polyhvd: {_renamed(text)}", file=sys.stderr, flush=True)

    def end(self, reason: str, cause: Ending | None, status: int) -> None:
        """The job has failed."""
        self._reason = _renamed(reason)
        self._verdict.status = status if cause is None else 0
        if cause is not None:
            self._verdict.add(cause)
        self._stop_at = min(self._stop_at, time.monotonic())

    def finish(self) -> None:
        """The job is done."""
        self._finished = True

    # The loop

    def _observe(self, scope: str, member: int, value: bytes) -> None:
        if scope == LOGGED:
            self._logged.append(value)
            self._ring()
        elif (driver := self._driver) is not None:
            driver.observe(scope, member, value)

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # it rings already, or the job is over
            os.write(self._alarm, b"+")

    def _watch(self, member: int, call: Any, *, has_ended: bool) -> None:
        """Have the loop take the result of a call, or see that its actor has died, as soon as Ray knows."""

        def take(future: Future[Any]) -> None:
            self._ended.append((member, has_ended, future))
            self._ring()

        call.future().add_done_callback(take)

    def _turn(self, driver: Driver) -> None:
        now = time.monotonic()
        starts = [item.start_by for item in self._processes.values()]
        left_s = min([driver.next_at(now), self._stop_at, *starts]) - now
        select.select([driver.wake, self._wake], [], [], max(0.0, left_s) if left_s < 1e6 else None)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake, 4096):
                pass
        while self._ended:
            member, has_ended, future = self._ended.popleft()
            if has_ended:
                self._take(driver, member, future)
            elif future.exception() is None and member in self._processes:
                self._processes[member].start_by = float("inf")
        self._call_back()
        now = time.monotonic()
        for member in [number for number, item in self._processes.items() if now >= item.start_by]:
            self.kill_member(member)
            limit = f"within {self._workers.start_timeout_s:g} s"
            self._exited(driver, member, 1, f"is lost: Ray has not started its actor {limit}")
        driver.turn(time.monotonic())

    def _call_back(self) -> None:
        while self._logged:
            value = ray.cloudpickle.loads(self._logged.popleft())
            for callback in self._callbacks:
                callback(value)

    def _take(self, driver: Driver, member: int, future: Future[Any]) -> None:
        """A process has ended."""
        error = future.exception()
        if isinstance(error, ray.exceptions.RayTaskError):  # what Ray itself does with calls has failed
            self._failures[member] = Outcome(1, b"", (0, member, 1), text=str(error))
            self._exited(driver, member, 1, tail=str(error))
        elif error is not None:
            is_unstartable = getattr(error, "actor_init_failed", False)  # would recur
            what = "was not started" if is_unstartable else "is lost"
            self._exited(driver, member, 1, f"{what}: {_in_a_line(error)}")
        else:
            outcome: Outcome = future.result()
            if outcome.has_value:
                generation, rank, size = outcome.place
                self._results.setdefault(generation, {})[rank] = outcome.value
                self._sizes[generation] = size
            elif outcome.status:
                self._failures[member] = outcome
            self._verdict.report(member, outcome.progress)
            self._exited(driver, member, outcome.status, tail=outcome.text)

    def _exited(self, driver: Driver, member: int, status: int, reason: str = "", tail: str = "") -> None:
        if member not in self._processes:
            return
        self.kill_member(member)  # an actor is one process of the job, and no more
        host = self._processes[member].host
        now = time.monotonic()
        self._freed = {number: item for number, item in self._freed.items() if now < item[1]}
        self._freed[member] = host, now + _FREED_S
        del self._processes[member]
        ending = self._verdict.ending(member, host, status, tail.encode().splitlines(), reason)
        self._verdict.forget(member)
        decision = driver.on_ending(ending, frozenset(self._processes), now)
        if self._finished or isinstance(decision, StartReplacement):
            return  # one that the others have gone on without may end after them
        if ending.failed:
            self._verdict.add(ending)
        if isinstance(decision, StopOthers):
            self._stop_at = min(self._stop_at, decision.at)

    # The end

    def _conclude(self, driver: Driver) -> list[Any]:
        self._call_back()
        if self._stopped and not self._finished:
            raise RuntimeError("the elastic job has ended: shutdown() has been called")
        status = self._verdict.conclude(())
        if self._verdict.cause is not None:
            self._raise(self._verdict.cause)
        if status:
            raise RuntimeError(f"the elastic job has failed: {self._reason}")
        if text := driver.summary(failed=False):
            self.report(text)
        last = max(self._results, default=0)
        found = self._results.get(last, {})
        if missing := [rank for rank in range(self._sizes.get(last, 1)) if rank not in found]:
            ranks = ", ".join(map(str, missing))
            raise RuntimeError(f"no result of rank {ranks}: the function has called sys.exit()")
        return [value for _, value in sorted(found.items())]

    def _raise(self, cause: Ending) -> NoReturn:
        outcome = self._failures.get(cause.rank)
        text = describe(cause) if outcome is None else f"process {cause.rank} on {cause.host} has failed"
        if self._reason:
            text += f"; {self._reason}"
        failure = RuntimeError(text if outcome is None else f"{text}:\n{outcome.text}")
        if outcome is None or not outcome.error:
            raise failure
        error = ray.cloudpickle.loads(outcome.error)
        if isinstance(error, Exception):
            raise error from failure
        raise RuntimeError(f"{failure}\n({error})")


def _in_a_line(error: BaseException) -> str:
    """Ray's last line, without its guesses."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].partition(" Some common causes")[0] if lines else type(error).__name__


def _renamed(text: str) -> str:
    for option, name in _NAMES.items():
        text = text.replace(option, name)
    return text
