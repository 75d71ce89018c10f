"""One elastic job on Spark: the driver that polyhvdrun has, with processes that tasks of Spark start.

:mod:`polyhvd.launch.elastic.driver` decides; :mod:`polyhvd.spark.slot` is the other side.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TextIO

import cloudpickle

from polyhvd.elastic.limits import FINISHED
from polyhvd.launch.elastic.driver import Driver
from polyhvd.launch.elastic.function_job import DRIVER_TIMEOUT_S, Failure, FunctionJob
from polyhvd.launch.hosts.lists import Host
from polyhvd.launch.job.function import ERROR, FUNCTION, RESULT, TRACEBACK
from polyhvd.launch.job.programs import rank_environment
from polyhvd.runtime.placement import Placement
from polyhvd.spark.slot import ENDINGS, KINDS, ORDERS, OUTPUTS, SLOTS

__all__ = ["ElasticJob", "SlotHosts"]

#: After which a job with fewer slots than wanted begins, if they are enough, and no more come.
_MORE_S = 5.0
#: In which tasks end their ranks and themselves at the end of the job.
_END_S = 3.0


@dataclass
class _Slot:
    """A task that is running."""

    number: str
    host: str
    place: str  # for messages
    gpus: list[str]
    orders: int = 0
    member: int | None = None  # the process in it


class SlotHosts:
    """The hosts with their slots, see :class:`polyhvd.launch.elastic.driven.Hosts`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, int] | None = None  # not taken yet
        self._ring: Callable[[], None] = lambda: None

    def set(self, hosts: Mapping[str, int]) -> None:
        """These are the hosts; from any thread."""
        with self._lock:
            self._found = dict(hosts)
        self._ring()

    def begin(self, ring: Callable[[], None]) -> None:
        """Call this when there is something to take."""
        self._ring = ring

    def take(self) -> dict[str, int] | None:
        """The hosts, if they have changed."""
        with self._lock:
            found, self._found = self._found, None
            return found

    def complaints(self) -> list[str]:
        """None."""
        return []

    def close(self) -> None:
        """Call nothing any more."""
        self._ring = lambda: None


class ElasticJob(FunctionJob):
    """See the module.

    Args:
        payload: the function and its arguments, pickled.
        variables: environment variables of the ranks.
        address: at which executors reach this process.
        streams: for what ranks print to standard output and standard error; None: it is not sent here.
    """

    names: ClassVar[Mapping[str, str]] = {
        "--min-np": "min_num_proc",
        "--max-np": "max_num_proc",
        "--reset-limit": "reset_limit",
        "--elastic-timeout": "elastic_timeout",
    }

    def __init__(
        self,
        payload: bytes,
        variables: Mapping[str, str],
        address: str,
        streams: tuple[TextIO | None, TextIO | None],
    ) -> None:
        self._variables, self._streams = dict(variables), dict(zip(KINDS, streams, strict=True))
        self.hosts = SlotHosts()
        self._slots: dict[str, _Slot] = {}  # changed by the server's thread
        self._changed = threading.Condition()  # of the slots; guards them
        #: Number of tasks that were ended in good order; None: not yet.
        self._ended: int | None = None
        self._values: dict[str, bytes] = {}  # by scope: what processes have sent; likewise
        super().__init__(address)
        self.rendezvous.post(FUNCTION, 0, payload)

    def wait_for_slots(self, wanted: int, least: int, timeout_s: float) -> list[Host]:
        """Wait for tasks; return the hosts with their slots.

        Args:
            wanted: number of slots.
            least: number of slots with which the job may begin, if no more come for a while.
            timeout_s: for these.

        Raises:
            RuntimeError: the job was stopped.
            TimeoutError: there are fewer.
        """
        now = time.monotonic()
        deadline, count, since = now + timeout_s, 0, now
        with self._changed:
            while True:
                now = time.monotonic()
                if self._stopped:
                    raise RuntimeError(self._stopped)
                if len(self._slots) != count:
                    count, since = len(self._slots), now
                if count >= wanted or (count >= least and now >= min(deadline, since + _MORE_S)):
                    self.hosts.take()
                    return [Host(name, slots) for name, slots in self._counts().items()]
                if now >= deadline:
                    raise TimeoutError(
                        f"Spark has started {count} tasks within {timeout_s:g} s (start_timeout), fewer than "
                        f"min_num_proc={least}"
                    )
                until = min(deadline, since + _MORE_S) if count >= least else deadline
                self._changed.wait(max(0.0, min(until - now, 1.0)))

    def stop(self, reason: str) -> None:
        """Stop the job, and wake all threads that wait for its hosts."""
        super().stop(reason)
        with self._changed:
            self._changed.notify_all()

    @property
    def slots(self) -> int:
        """The number of tasks that are running; from any thread."""
        return len(self._slots)

    # For the driver, see DrivenJob

    def start_member(
        self, member: int, place: Placement, host: Host, number: int, *, knows_rank: bool
    ) -> None:
        """Have a task on the host start a process."""
        with self._changed:
            free = [item for item in self._slots.values() if item.host == host.name and item.member is None]
            if free:
                free[0].member = member
        if not free:
            self.places[member] = host.name
            reason = "is lost: the task for it has ended"
            return self.submit(lambda driver: self.exited(driver, member, 1, reason=reason))
        slot = free[0]
        self.places[member] = slot.place
        on_host = [gpu for item in list(self._slots.values()) if item.host == slot.host for gpu in item.gpus]
        gpus = ",".join(dict.fromkeys([*on_host, *slot.gpus]))
        visible = {"CUDA_VISIBLE_DEVICES": gpus, "POLYHVD_HOST_DEVICES": gpus} if gpus else {}
        if "CUDA_VISIBLE_DEVICES" in self._variables:
            visible = {}  # the user's own choice
        variables = {
            "POLYHVD_DEVICES": ",".join(slot.gpus),
            **visible,
            **self._variables,
            **rank_environment((), place, host.name, knows_rank=knows_rank),
            "POLYHVD_HOST_ID": str(number),
            "POLYHVD_RENDEZVOUS": self.rendezvous.endpoint,
            "POLYHVD_SECRET": self.secret,
            "POLYHVD_MEMBER": str(member),
            "POLYHVD_LAUNCHER_TIMEOUT_S": f"{DRIVER_TIMEOUT_S:g}",
        }
        self._order(slot, {"what": "start", "member": member, "variables": variables})

    def kill_member(self, member: int) -> None:
        """Have its task kill it."""
        for slot in list(self._slots.values()):
            if slot.member == member:
                self._order(slot, {"what": "kill", "member": member})

    def _order(self, slot: _Slot, order: dict[str, Any]) -> None:
        self.rendezvous.post(f"{ORDERS}/{slot.number}/{slot.orders}", 0, json.dumps(order).encode())
        slot.orders += 1

    def end_processes(self) -> None:
        """End all tasks, once."""
        if self._ended is not None:
            return
        slots = list(self._slots.values())
        for slot in slots:
            self._order(slot, {"what": "stop"})
        with self._changed:
            self._changed.wait_for(lambda: not self._slots, _END_S)
            self._ended = len(slots) - len(self._slots)

    @property
    def ended(self) -> int:
        """The number of tasks that :meth:`end_processes` has ended."""
        return self._ended or 0

    # What tasks and processes send

    def observe(self, scope: str, member: int, value: bytes) -> bool:
        """Take what is not for the driver."""
        kind, _, number = scope.rpartition("/")
        if kind == SLOTS:
            self._join(number, json.loads(value))
        elif scope.startswith(f"{ENDINGS}/"):
            slot, ending = scope.split("/")[-2], json.loads(value)
            self.submit(lambda driver: self._take(driver, slot, ending))
        elif scope.startswith(f"{OUTPUTS}/") or kind in (ERROR, RESULT, TRACEBACK):
            self._values[scope] = value
        else:
            return False
        return True

    def _counts(self) -> dict[str, int]:
        return dict(Counter(slot.host for slot in self._slots.values()))

    def _join(self, number: str, own: dict[str, Any]) -> None:
        host = f"{own['host']} ({own['address']})"
        place = f"executor {own['executor']} at {host}" if own["executor"] else f"an executor at {host}"
        with self._changed:
            self._slots[number] = _Slot(number, host, place, own["gpus"])
            self.hosts.set(self._counts())
            self._changed.notify_all()

    def observe_loss(self, scope: str, index: int) -> None:
        """A task has ended."""
        kind, _, number = scope.rpartition("/")
        if kind != SLOTS:
            return
        with self._changed:
            slot = self._slots.pop(number)
            self.hosts.set(self._counts())
            self._changed.notify_all()
        self.submit(lambda driver: self._lose(driver, slot))

    def _lose(self, driver: Driver, slot: _Slot) -> None:
        self.rendezvous.drop(f"{ORDERS}/{slot.number}/", waiters=True)
        driver.turn(time.monotonic())  # it starts no other process there
        if slot.member is None:
            return
        if f"{RESULT}/{slot.member}" in self._values:  # it had nothing to do any more
            reported = (FINISHED + b"\0").hex()
            self._take(driver, slot.number, {"member": slot.member, "status": 0, "reported": reported})
        else:
            self.exited(driver, slot.member, 1, reason="is lost: the task of Spark has ended")

    def _take(self, driver: Driver, number: str, ending: dict[str, Any]) -> None:
        """A process has ended."""
        member, status = int(ending["member"]), int(ending["status"])
        if (slot := self._slots.get(number)) is not None:
            slot.member = None
        for kind, stream in self._streams.items():
            printed = self._taken(f"{OUTPUTS}/{kind}/{member}").decode("utf-8", "replace")
            for line in printed.splitlines() if stream is not None else ():
                print(f"[{member}]<{kind}>:{line}", file=stream)
        failure = None
        text, error = self._taken(f"{TRACEBACK}/{member}"), self._taken(f"{ERROR}/{member}")
        if text or error:
            failure = Failure(text.decode("utf-8", "replace").rstrip(), error)
        if result := self._taken(f"{RESULT}/{member}"):
            self.add_result(*cloudpickle.loads(result))
        reported = bytes.fromhex(ending.get("reported", ""))
        reason = ending.get("reason", "")
        self.exited(driver, member, status, reason=reason, failure=failure, reported=reported)

    def _taken(self, scope: str) -> bytes:
        self.rendezvous.drop(scope)
        return self._values.pop(scope, b"")
