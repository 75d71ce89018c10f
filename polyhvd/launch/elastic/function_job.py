"""An elastic job that calls a function, on processes that a cluster's own scheduler starts.

:mod:`polyhvd.launch.elastic.driver` decides; a job for one cluster starts and watches processes for it. This
is what all of them share: the loop, the ends of processes, and their results.
"""

from __future__ import annotations

import abc
import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

from polyhvd.launch.elastic.driven import Elastic
from polyhvd.launch.elastic.driver import Driver
from polyhvd.launch.hosts.lists import Host
from polyhvd.launch.job.blame import Ending, describe
from polyhvd.launch.job.function import load_error
from polyhvd.launch.job.policy import StartReplacement, StopOthers
from polyhvd.launch.job.verdict import Verdict
from polyhvd.rendezvous import network
from polyhvd.rendezvous.auth import new_secret, parse_secret
from polyhvd.rendezvous.server import Server
from polyhvd.runtime.placement import Placement

__all__ = ["DRIVER_TIMEOUT_S", "Failure", "FunctionJob"]

#: After which a process gives the silent driver up. Its end is seen at once, but for that of its host.
DRIVER_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Failure:
    """How the function of a process has failed.

    Args:
        text: traceback of its exception, or what the function has called.
        error: the pickled exception, or a pickled text why it is not there; empty: it has raised none.
    """

    text: str
    error: bytes = field(default=b"", repr=False)


class FunctionJob(abc.ABC):
    """See the module. A job runs once, and is what its driver calls its job: see
    :class:`polyhvd.launch.elastic.driven.DrivenJob`.

    Args:
        address: of this host, at which processes reach the driver.
    """

    #: What options of polyhvdrun are called here, in the words of the membership.
    names: ClassVar[Mapping[str, str]] = {}

    def __init__(self, address: str) -> None:
        self._driver: Driver | None = None
        #: Where the processes are that have not ended, as messages name it.
        self.places: dict[int, str] = {}
        self._ranks: dict[int, int] = {}  # of processes that have failed
        self._events: deque[Callable[[Driver], None]] = deque()  # by other threads; needs no lock
        self._verdict = Verdict(Driver.noun)
        self._failures: dict[int, Failure] = {}
        self._results: dict[int, dict[int, Any]] = {}  # by generation and rank
        self._sizes: dict[int, int] = {}  # by generation
        self._reason = ""  # why the job has failed, where no process is to blame
        self._stop_at = float("inf")
        self._ending: threading.Thread | None = None
        self._finished = False
        self._stopped = ""  # why it was ended from outside; empty: it was not
        self._wake, self._alarm = os.pipe()
        for descriptor in (self._wake, self._alarm):
            os.set_blocking(descriptor, False)
        self.secret = new_secret()
        self.rendezvous = Server(
            parse_secret(self.secret), address, observe=self._observe, observe_loss=self.observe_loss
        )

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
            return self.conclude(driver)
        finally:
            ending = self._ending = threading.Thread(
                target=self._end_all, args=(driver,), name="polyhvd-job-end"
            )
            ending.start()  # which another Ctrl-C does not interrupt, as it does the main thread
            ending.join()

    def _end_all(self, driver: Driver) -> None:
        self._driver = None
        self.kill_members(list(self.places))
        self.end_processes()
        self.rendezvous.close()  # from now on nothing is received for the driver
        driver.close()

    def close(self) -> None:
        """Free what is held, after :meth:`run`."""
        if self._ending is not None:
            self._ending.join()
        self.rendezvous.close()
        alarm, self._alarm = self._alarm, -1
        os.close(self._wake)
        os.close(alarm)

    def stop(self, reason: str) -> None:
        """End the job; from any thread.

        Args:
            reason: with which :meth:`run` raises a RuntimeError.
        """
        self._stopped = reason
        self.ring()

    # For jobs on a cluster

    @abc.abstractmethod
    def start_member(
        self, member: int, place: Placement, host: Host, number: int, *, knows_rank: bool
    ) -> None:
        """See DrivenJob; adds the process to :attr:`places`."""

    @abc.abstractmethod
    def kill_member(self, member: int) -> None:
        """See DrivenJob."""

    def kill_members(self, members: Sequence[int]) -> None:
        """The same of several, at the end of the job."""
        for member in members:
            self.kill_member(member)

    def end_processes(self) -> None:  # noqa: B027
        """The job is over, and its processes were killed: wait until they are gone, if that is needed."""

    def observe(self, scope: str, member: int, value: bytes) -> bool:
        """A value was written to the store, on the server's thread; whether it is not for the driver."""
        return False

    def observe_loss(self, scope: str, index: int) -> None:  # noqa: B027
        """The connection that has written an own value has ended; on the server's thread."""

    def look(self, driver: Driver, now: float) -> float:
        """Called in each turn; returns when to call it again at the latest."""
        return float("inf")

    def submit(self, event: Callable[[Driver], None]) -> None:
        """Have the loop call this; from any thread."""
        self._events.append(event)
        self.ring()

    def ring(self) -> None:
        """Begin the next turn of the loop; from any thread."""
        with contextlib.suppress(OSError):  # it rings already, or the job is over
            os.write(self._alarm, b"+")

    def add_result(self, generation: int, rank: int, size: int, value: Any) -> None:
        """Record the function's result in a process with this last world and rank."""
        self._results.setdefault(generation, {})[rank] = value
        self._sizes[generation] = size

    def exited(
        self,
        driver: Driver,
        member: int,
        status: int,
        *,
        reason: str = "",
        failure: Failure | None = None,
        reported: bytes = b"",
    ) -> None:
        """A process has ended; does nothing if that is known.

        Args:
            driver: of this job.
            member: which process.
            status: its exit status, negative for a signal.
            reason: in place of one, in the words of :class:`polyhvd.launch.job.blame.Ending`.
            failure: of its function.
            reported: as :meth:`polyhvd.launch.job.verdict.Verdict.report` takes it.
        """
        if member not in self.places:
            return
        host = self.places.pop(member)
        if failure is not None:
            self._failures[member] = failure
        tail = [] if failure is None else failure.text.encode().splitlines()
        if (rank := driver.rank_of(member)) is not None:
            self._ranks[member] = rank
        self._verdict.report(member, reported)
        ending = self._verdict.ending(member, host, status, tail, reason)
        self._verdict.forget(member)
        decision = driver.on_ending(ending, frozenset(self.places), time.monotonic())
        if self._finished or isinstance(decision, StartReplacement):
            return  # one that the others have gone on without may end after them
        if ending.failed:
            self._verdict.add(ending)
        if isinstance(decision, StopOthers):
            self._stop_at = min(self._stop_at, decision.at)
            self._reason = self._reason or self.renamed(decision.reason)

    # For the driver, see DrivenJob

    def endpoint(self, number: int, numbers: Set[int]) -> str:
        """All meet at the driver."""
        return self.rendezvous.endpoint

    def report(self, text: str) -> None:
        """Print a line to standard error."""
        print(f"polyhvd: {self.renamed(text)}", file=sys.stderr, flush=True)

    def end(self, reason: str, cause: Ending | None, status: int) -> None:
        """The job has failed."""
        self._reason = self.renamed(reason)
        self._verdict.status = status if cause is None else 0
        if cause is not None:
            self._verdict.add(cause)
        self._stop_at = min(self._stop_at, time.monotonic())

    def finish(self) -> None:
        """The job is done."""
        self._finished = True

    @classmethod
    def renamed(cls, text: str) -> str:
        """A message with the names that options of polyhvdrun have here."""
        for option, name in cls.names.items():
            text = text.replace(option, name)
        return text

    # The loop

    def _observe(self, scope: str, member: int, value: bytes) -> None:
        if not self.observe(scope, member, value) and (driver := self._driver) is not None:
            driver.observe(scope, member, value)

    def _turn(self, driver: Driver) -> None:
        look_at = self.look(driver, time.monotonic())
        now = time.monotonic()
        left_s = min(driver.next_at(now), self._stop_at, look_at) - now
        if not self._events:
            descriptors = [driver.wake, self._wake]
            network.await_ready(descriptors, left_s if left_s < 1e6 else None)
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake, 4096):
                pass
        self.take_events(driver)
        driver.turn(time.monotonic())

    def take_events(self, driver: Driver) -> None:
        """Call what was submitted."""
        while self._events:
            self._events.popleft()(driver)

    # The end

    def conclude(self, driver: Driver) -> list[Any]:
        """Return the results, or raise why there are none."""
        if self._stopped and not self._finished:
            raise RuntimeError(self._stopped)
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
            raise RuntimeError(f"no result of rank {ranks}: the function has ended the process")
        return [value for _, value in sorted(found.items())]

    def _raise(self, cause: Ending) -> NoReturn:
        found = self._failures.get(cause.rank)
        process, rank = f"process {cause.rank}", self._ranks.get(cause.rank)
        text = describe(cause) if found is None else f"{process} on {cause.host} has failed"
        if rank is not None:
            text = text.replace(process, f"{process} (rank {rank})", 1)
        if self._reason:
            text += f"; {self._reason}"
        failure = RuntimeError(text if found is None else f"{text}:\n{found.text}")
        if found is None or not found.error:
            raise failure
        error = load_error(found.error)
        if isinstance(error, Exception):
            raise error from failure
        raise RuntimeError(f"{failure}\n({error})")
