"""``run``: calls a function on ranks that tasks of Spark start."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TextIO

from polyhvd import __version__
from polyhvd.errors import HorovodInternalError
from polyhvd.launch.job.function import in_a_line, load_error, load_result, payload_of
from polyhvd.spark.cluster import Cluster, find
from polyhvd.spark.worker import SCHEMA, Kind, Plan, task_of

__all__ = ["START_TIMEOUT_S", "in_short", "require_static", "run", "wanted_size"]

_LOG = logging.getLogger("polyhvd")
START_TIMEOUT_S = 600.0  # as with Horovod
_LOOK_S = 0.1
#: Limits of the time that a task waits for the others, which Spark starts at once.
_MEETING_S, _TIMER_S_MAX = 5.0, 1e6
_KILL_S = 3.0  # until executors have ended whose tasks were killed while they waited for others
_JAVA = re.compile(r"^(\t(at|\.\.\.) |Caused by: ).*$", re.MULTILINE)  # lines of its stacks


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: str | Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on ranks that tasks of Spark start, and return the results in rank order.

    The tasks run at the same time, in a barrier stage of the session of this process, which may be one of
    Spark Connect. Each starts a process, the rank. Ranks of one host are consecutive.

    Args:
        fn: the function; it, the arguments and the results travel by cloudpickle.
        args: its positional arguments.
        kwargs: its keyword arguments.
        num_proc: number of ranks; None: as many as tasks can run at once now, by their CPUs and GPUs.
        start_timeout: seconds for all tasks to start; None: 600. Spark reports tasks up to 12 seconds late,
            so the error may come so much later. A task that has started waits as long for the others.
        use_mpi: has no effect, and neither have ``use_gloo`` and ``extra_mpi_args``: no MPI is needed.
        env: environment variables of the ranks, on top of those of the executors.
        stdout: to which the last MiB that each rank has printed is written when the job has ended; None: it
            is in the logs of the executors.
        stderr: likewise.
        verbose: 0: do not log where the ranks are started.
        nics: interface, network or address of all connections; several as a sequence.
        prefix_output_with_timestamp: has no effect.
        executable: Python of the ranks; None: that of Spark's tasks.

    Raises:
        Exception: what the rank has raised that failed first; its ``__cause__`` is a RuntimeError with the
            rank and its executor.
        RuntimeError: a rank was killed, has called ``sys.exit()``, or failed with an exception that cannot be
            pickled; a task was lost; the job was cancelled; executors have another version of polyhvd or
            Python; or there is no session of Spark.
        TimeoutError: not all tasks could start in time; the message has what was asked for, and what there
            is.
        TypeError: ``fn`` and its arguments cannot be pickled; nothing was run.
        ValueError: ``num_proc`` is not positive, or is needed.
        KeyboardInterrupt: Ctrl-C. The ranks end.

    Example::

        results = polyhvd.spark.run(train, args=(0.01,), num_proc=4)
    """
    if not callable(fn):
        raise TypeError(f"polyhvd.spark.run(): fn must be a function; found {fn!r}")
    payload = payload_of((fn, tuple(args), dict(kwargs or {})), "polyhvd.spark.run()")
    cluster = find("polyhvd.spark.run()")
    require_static(cluster)
    size = wanted_size(cluster, num_proc, "polyhvd.spark.run()")
    timeout_s = START_TIMEOUT_S if start_timeout is None else float(start_timeout)
    plan = Plan(
        payload=payload,
        variables=dict(env or {}),
        interface=nics if isinstance(nics, str) else ",".join(nics or ()),
        python=executable,
        captured=(stdout is not None, stderr is not None),
        timeout_s=min(max(_MEETING_S, timeout_s), _TIMER_S_MAX),
    )
    if verbose and _LOG.isEnabledFor(logging.INFO):
        _LOG.info("polyhvd.spark.run(): %d ranks on Spark with %s", size, cluster.described())
    rows = _Job(cluster, size, timeout_s, f"polyhvd-{uuid.uuid4().hex}").collect(plan)
    for rank in range(size):
        for stream, kind in ((stdout, Kind.STDOUT), (stderr, Kind.STDERR)):
            text = rows.get((kind, rank), b"").decode("utf-8", "replace")
            for line in text.splitlines() if stream is not None else ():
                print(f"[{rank}]<{kind}>:{line}", file=stream)
    return _results(rows, size)


def require_static(cluster: Cluster) -> None:
    """Raise RuntimeError if Spark allocates executors dynamically."""
    if cluster.is_dynamic():
        raise RuntimeError(
            "polyhvd.spark.run(): spark.dynamicAllocation.enabled is true, so Spark runs no barrier stages; "
            "set it to false, or use polyhvd.spark.run_elastic, or elastic=True for an estimator"
        )


def wanted_size(cluster: Cluster, num_proc: int | None, caller: str) -> int:
    """The number of ranks; None: the number of slots. Raises a ValueError that begins with ``caller``."""
    size = cluster.slots() if num_proc is None else int(num_proc)
    if size is not None and size >= 1:
        return size
    hint = f"found {num_proc}"
    if num_proc is None:
        hint = "the number of Spark's slots is not known here" if size is None else "Spark has no slots yet"
    raise ValueError(f"{caller}: num_proc must be a positive number; {hint}")


#: What tasks have yielded, by kind and rank, in the order in which it came.
_Rows = dict[tuple[str, int], bytes]


class _Job:
    """One job of Spark.

    Args:
        cluster: on which.
        size: number of tasks.
        timeout_s: for all of them to start.
        tag: by which Spark knows it.
    """

    def __init__(self, cluster: Cluster, size: int, timeout_s: float, tag: str) -> None:
        self._cluster, self._size, self._tag = cluster, size, tag
        self._timeout_s, self._deadline = timeout_s, time.monotonic() + timeout_s
        self._verdict: Exception | None = None  # why the watching thread has cancelled the job
        self._has_ended = threading.Event()

    def collect(self, plan: Plan) -> _Rows:
        """Run the job, and return what its tasks yield. What it raises is as of :func:`run`."""
        self._wait_for_slots()
        numbers = self._cluster.session.range(0, self._size, 1, self._size)
        frame = numbers.mapInArrow(task_of(plan, __version__), SCHEMA, barrier=True)
        watching = threading.Thread(target=self._watch, name="polyhvd-spark-watch", daemon=True)
        rows: _Rows = {}
        try:
            with self._cluster.tagged(self._tag):
                watching.start()
                for kind, rank, data in frame.collect():
                    rows[kind, rank] = rows.get((kind, rank), b"") + bytes(data)
        except Exception as error:
            lost = ""
            with contextlib.suppress(Exception):  # Spark itself has ended
                lost = self._cluster.lost(self._tag)
                # Spark looks once in a second whether a task at a barrier was killed, and then ends the
                # executor with an uncaught exception. Until then it may give it a task of the next job.
                if self._cluster.has_begun(self._tag):
                    time.sleep(_KILL_S)
            raise (self._verdict or _failure(lost or in_short(error))) from error
        except BaseException:
            self._cluster.cancel(self._tag)
            raise
        finally:
            self._has_ended.set()
        return rows

    def _wait_for_slots(self) -> None:
        """Wait until there are enough: Spark itself would refuse the job after minutes only."""
        while (slots := self._cluster.slots()) is not None and slots < self._size:
            if time.monotonic() > self._deadline:
                raise self._late()
            time.sleep(_LOOK_S)

    def _watch(self) -> None:
        """Cancel the job if its tasks do not start in time, or if one is lost; this ends the others."""
        late = self._deadline + self._cluster.lag_s
        try:
            while not self._has_ended.wait(_LOOK_S):
                if lost := self._cluster.lost(self._tag):
                    self._verdict = _failure(lost)
                elif time.monotonic() > late and not self._cluster.has_begun(self._tag):
                    self._verdict = self._late()
                if self._verdict is not None:
                    return self._cluster.cancel(self._tag)
        except Exception as error:
            if not self._has_ended.is_set():
                _LOG.warning("polyhvd.spark.run(): the job is not watched any more: %s", in_a_line(error))

    def _late(self) -> TimeoutError:
        return TimeoutError(
            f"polyhvd.spark.run(): Spark has not started {self._size} tasks at once within "
            f"{self._timeout_s:g} s (start_timeout); there are {self._cluster.described()}. Give a smaller "
            "num_proc, add executors, or raise start_timeout"
        )


def _failure(text: str) -> Exception:
    """The error of a job that Spark has ended."""
    waits = [line for line in text.splitlines() if "(start_timeout)" in line]
    if waits:  # without the traceback of the task
        return TimeoutError(f"polyhvd.spark.run(): {waits[-1].removeprefix('TimeoutError: ')}")
    return RuntimeError(f"polyhvd.spark.run(): {text}")


def in_short(error: BaseException) -> str:
    """The message of Spark, without the stack of its JVM."""
    java = getattr(error, "java_exception", None)
    text = str(error if java is None else java.getMessage()).partition("\nDriver stacktrace:")[0]
    return "\n".join(filter(None, _JAVA.sub("", text.partition("\nJVM stacktrace:")[0]).splitlines()))


def _results(rows: _Rows, size: int) -> list[Any]:
    """The results of all ranks; raises the error of a rank that has failed."""
    for (kind, _), data in rows.items():
        if kind == Kind.REFUSED:
            raise RuntimeError(f"polyhvd.spark.run(): {data.decode()}")
    failures = [(rank, data.decode()) for (kind, rank), data in rows.items() if kind == Kind.FAILURE]
    if failures:
        _raise([(text, rows.get((Kind.ERROR, rank))) for rank, text in failures])
    return [load_result(rank, rows[Kind.RESULT, rank]) for rank in range(size)]


def _raise(failures: list[tuple[str, bytes | None]]) -> NoReturn:
    """Raise the failure that may have led to the others: those of ranks that were lost come first."""
    loaded = [(text, "" if data is None else load_error(data)) for text, data in failures]
    text, error = min(loaded, key=lambda item: isinstance(item[1], HorovodInternalError))
    failure = RuntimeError(f"polyhvd.spark.run(): {text}")
    if isinstance(error, Exception):
        raise error from failure
    raise RuntimeError(f"{failure} ({error})") if error else failure
