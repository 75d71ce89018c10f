"""The Spark that this process is connected to, classic or by Spark Connect: its slots and its jobs.

The classic one is asked through its JVM, since PySpark has no other way to what its web pages show.
"""

from __future__ import annotations

import abc
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Cluster", "find"]

_TASKS_MAX = 10_000  # of one stage, to look at
_ANY_PORT = 9
_FLUSH_S = 2.0  # from a heartbeat to what the status store has


class Cluster(abc.ABC):
    """A session of Spark.

    Args:
        session: of PySpark.
    """

    #: Seconds until :meth:`has_begun` and :meth:`described` know of a task that has started.
    lag_s = 0.0

    def __init__(self, session: Any) -> None:
        self.session = session

    @abc.abstractmethod
    def is_dynamic(self) -> bool:
        """Return whether Spark allocates executors dynamically, so that it runs no barrier stages."""

    @abc.abstractmethod
    def slots(self) -> int | None:
        """How many tasks can run at once, by their CPUs and GPUs; None: that is not known."""

    @abc.abstractmethod
    def tagged(self, tag: str) -> contextlib.AbstractContextManager[None]:
        """A context in which this thread's jobs have a tag."""

    @abc.abstractmethod
    def cancel(self, tag: str) -> None:
        """Cancel the jobs that have a tag."""

    @abc.abstractmethod
    def has_begun(self, tag: str) -> bool:
        """Return whether a task of the job that has this tag is running, or has been."""

    @abc.abstractmethod
    def lost(self, tag: str) -> str:
        """Which task of the job that has this tag has failed, and why; empty: none, or it is not known."""

    @abc.abstractmethod
    def described(self) -> str:
        """The slots and resources that exist, for messages."""

    @abc.abstractmethod
    def thread(self, function: Callable[[], None]) -> threading.Thread:
        """A thread that calls the function, with the job group and the tags of this one."""

    @abc.abstractmethod
    def driver_host(self) -> str:
        """Name or address of this host, at which executors reach this process."""


class ClassicCluster(Cluster):
    """That of a driver with a JVM beside it."""

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self._context = session.sparkContext
        self._scala = self._context._jsc.sc()
        self._numbers: dict[str, int] = {}  # of jobs that were found, by their tags
        # Spark's status store drops an event that follows another one within 0.1 s until the next heartbeat.
        heartbeat_ms = self._scala.conf().getTimeAsMs("spark.executor.heartbeatInterval", "10s")
        self.lag_s = heartbeat_ms / 1e3 + _FLUSH_S

    def is_dynamic(self) -> bool:
        """Return whether Spark's configuration enables dynamic allocation, which a local master ignores."""
        is_set = self._scala.conf().getBoolean("spark.dynamicAllocation.enabled", False)
        return bool(is_set and not self._scala.isLocal())

    def slots(self) -> int:
        """The slots of the executors that have registered."""
        profile = self._scala.resourceProfileManager().defaultResourceProfile()
        return int(self._scala.maxNumConcurrentTasks(profile))

    @contextlib.contextmanager
    def tagged(self, tag: str) -> Iterator[None]:
        """Add the tag to those of this thread."""
        self._context.addJobTag(tag)
        try:
            yield
        finally:
            self._context.removeJobTag(tag)

    def cancel(self, tag: str) -> None:
        """Cancel by the context."""
        self._context.cancelJobsWithTag(tag)

    def has_begun(self, tag: str) -> bool:
        """Return whether the job has begun, by Spark's status store."""
        job = self._job(tag)
        if job is None:
            return False
        ended = job.numCompletedTasks() + job.numFailedTasks() + job.numKilledTasks()
        return bool(job.numActiveTasks() + ended)

    def lost(self, tag: str) -> str:
        """The first failure that Spark has recorded."""
        job = self._job(tag)
        if job is None or not job.numFailedTasks():
            return ""
        for number in _items(job.stageIds()):
            for task in _items(self._scala.statusStore().taskList(number, 0, _TASKS_MAX)):
                if task.status() == "FAILED":
                    reason = task.errorMessage()
                    text = reason.get() if reason.isDefined() else "without a message"
                    where = f"executor {task.executorId()} on {task.host()}"
                    text = text.partition("\n\tat ")[0]  # the stack of the JVM follows
                    return f"task {task.partitionId()} ({where}) has failed: {text}"
        return ""

    def described(self) -> str:
        """Slots and running tasks."""
        executors = _items(self._scala.statusStore().executorList(True))
        active = sum(executor.activeTasks() for executor in executors)
        return f"{self.slots()} slots, in which {active} tasks are running"

    def thread(self, function: Callable[[], None]) -> threading.Thread:
        """PySpark's."""
        from pyspark import InheritableThread

        made: threading.Thread = InheritableThread(function)
        return made

    def driver_host(self) -> str:
        """Return the address at which executors reach the JVM, which is on this host."""
        return str(self._scala.conf().get("spark.driver.host"))

    def _job(self, tag: str) -> Any:
        """The job that has the tag, once Spark has recorded it; None: not yet.

        It is looked for once only: Spark records the last 1,000 jobs of a session.
        """
        store = self._scala.statusStore()
        if tag not in self._numbers:
            jobs = store.jobsList(None)  # the newest first
            for number in range(jobs.length()):
                job = jobs.apply(number)
                if tag in job.jobTags().mkString(" ").split():
                    self._numbers[tag] = job.jobId()
                    return job
            return None
        return store.job(self._numbers[tag])


class ConnectCluster(Cluster):
    """That of a server of Spark Connect, of which less can be known."""

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self._has_begun = False

    def is_dynamic(self) -> bool:
        """Return whether the server enables dynamic allocation, which a local master ignores."""
        configured = self.session.conf.get
        master = configured("spark.master", "")
        is_local = master == "local" or master.startswith("local[")
        return configured("spark.dynamicAllocation.enabled", "false") == "true" and not is_local

    def slots(self) -> int | None:
        """Spark's default parallelism, its number of cores; None: it is set, or GPUs limit the tasks."""
        configured = self.session.conf.get
        if configured("spark.default.parallelism", "") or configured("spark.task.resource.gpu.amount", ""):
            return None
        from pyspark.sql import functions

        numbers = self.session.range(1 << 16).select(functions.spark_partition_id().alias("number"))
        return int(numbers.distinct().count()) // int(configured("spark.task.cpus", "1"))

    @contextlib.contextmanager
    def tagged(self, tag: str) -> Iterator[None]:
        """Add the tag to those of this thread, and watch its progress."""
        self._has_begun = not hasattr(self.session, "registerProgressHandler")  # before Spark 4
        with contextlib.ExitStack() as undone:
            if not self._has_begun:
                self.session.registerProgressHandler(self._progress)
                undone.callback(self.session.removeProgressHandler, self._progress)
            self.session.addTag(tag)
            undone.callback(self.session.removeTag, tag)
            yield

    def _progress(self, stages: Any, inflight_tasks: int, **_: Any) -> None:
        self._has_begun |= inflight_tasks > 0

    def cancel(self, tag: str) -> None:
        """Interrupt by the session."""
        self.session.interruptTag(tag)

    def has_begun(self, tag: str) -> bool:
        """Return whether the server has reported it; always True with Spark 3.5, which reports nothing."""
        return self._has_begun

    def lost(self, tag: str) -> str:
        """Not known."""
        return ""

    def described(self) -> str:
        """The slots, if they are known."""
        slots = self.slots()
        return f"{'an unknown number of' if slots is None else slots} slots"

    def thread(self, function: Callable[[], None]) -> threading.Thread:
        """One that adds the tags of this thread to its own."""
        tags = self.session.getTags()

        def call() -> None:
            for tag in tags:
                self.session.addTag(tag)
            function()

        return threading.Thread(target=call)

    def driver_host(self) -> str:
        """The address from which this host reaches the server; executors may be in other networks."""
        host = str(self.session.client.host)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, _ANY_PORT))  # sends nothing
            return str(probe.getsockname()[0])


def find(caller: str) -> Cluster:
    """The cluster of the session of this process.

    Args:
        caller: with which messages begin.

    Raises:
        RuntimeError: there is no session.
    """
    from pyspark.sql import SparkSession

    try:
        session = SparkSession.active()
    except Exception:  # of a class that depends on the version
        raise RuntimeError(
            f"{caller}: there is no session of Spark in this process; make one with "
            "SparkSession.builder.getOrCreate()"
        ) from None
    is_connect = type(session).__module__.startswith("pyspark.sql.connect")
    return ConnectCluster(session) if is_connect else ClassicCluster(session)


def _items(sequence: Any) -> list[Any]:
    """The items of one of Scala's sequences."""
    return [sequence.apply(number) for number in range(sequence.length())]
