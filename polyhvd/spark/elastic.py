"""``run_elastic``: calls a function on ranks that tasks of Spark start, and goes on when tasks are lost."""

from __future__ import annotations

import contextlib
import logging
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from polyhvd import __version__
from polyhvd.elastic.limits import Limits
from polyhvd.launch.elastic.driven import Elastic
from polyhvd.launch.job.function import load_result, payload_of
from polyhvd.rendezvous import network
from polyhvd.spark.cluster import Cluster, find
from polyhvd.spark.elastic_job import ElasticJob
from polyhvd.spark.running import START_TIMEOUT_S, in_short, wanted_size
from polyhvd.spark.slot import Post, slot_of

__all__ = ["limits_of", "run_elastic"]

_LOG = logging.getLogger("polyhvd")
_CALLER = "polyhvd.spark.run_elastic()"
_ELASTIC_TIMEOUT_S = 600.0  # as with Horovod
_SCHEMA = "nothing long"
#: In which Spark sees that all tasks have ended, and in which it cancels them.
_ENDED_S, _CANCELLED_S = 3.0, 10.0


def run_elastic(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: str | Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call an elastic function on ranks that tasks of Spark start; return the last world's results by rank.

    When a rank, a task or an executor is lost, the others keep their processes and continue from the last
    commit. Spark starts lost tasks again, and more tasks when it gets executors; their ranks join at a
    commit. The tasks belong to an ordinary job of the session of this process, which may be one of Spark
    Connect.

    Args:
        fn: calls ``hvd.init()``, and a function that ``hvd.elastic.run`` has wrapped or
            ``hvd.elastic.train``. New ranks call it as well. It, the arguments and the results travel by
            cloudpickle.
        args: its positional arguments.
        kwargs: its keyword arguments.
        num_proc: number of ranks at the beginning; None: as many as tasks can run at once now, by their CPUs
            and GPUs, but not fewer than ``min_num_proc`` nor more than ``max_num_proc``.
        min_num_proc: minimum number of ranks: with fewer the job waits for others; None: ``num_proc``.
            ``min_np`` is another name.
        max_num_proc: maximum number of ranks; None: ``num_proc``. ``max_np`` is another name.
        start_timeout: seconds for ``min_num_proc`` tasks to start; None: 600.
        elastic_timeout: seconds to wait for ``min_num_proc`` ranks after a loss; None: 600.
        reset_limit: how often the ranks may change before the job fails; None: any number.
        env: environment variables of the ranks, on top of those of the executors.
        stdout: to which the last MiB that each process has printed is written when it has ended, with its
            number; None: it is in the logs of the executors.
        stderr: likewise.
        verbose: 0: do not log where the ranks are started.
        nics: interface, network or address of all connections; several as a sequence.
        prefix_output_with_timestamp: has no effect.

    Raises:
        Exception: what a rank has raised; its ``__cause__`` is a RuntimeError with the process, its rank, its
            executor and the traceback.
        RuntimeError: too few ranks are left, or the ranks have changed more often than ``reset_limit``; Spark
            has ended the job, for instance since it was cancelled, or since a task has failed
            ``spark.task.maxFailures`` times; executors cannot reach this process, or have another version of
            polyhvd or Python; or there is no session of Spark.
        TimeoutError: too few tasks could start in time; the message has what was asked for, and what there
            is.
        TypeError: ``fn`` and its arguments cannot be pickled; nothing was run.
        ValueError: the numbers contradict each other, or ``num_proc`` is needed.
        KeyboardInterrupt: Ctrl-C. The ranks end.

    Example::

        results = polyhvd.spark.run_elastic(train, args=(0.01,), num_proc=4, min_num_proc=2, max_num_proc=8)
    """
    if not callable(fn):
        raise TypeError(f"{_CALLER}: fn must be a function; found {fn!r}")
    payload = payload_of((fn, tuple(args), dict(kwargs or {})), _CALLER)
    cluster = find(_CALLER)
    least = min_num_proc if min_np is None else min_np
    most = max_num_proc if max_np is None else max_np
    timeout_s = _ELASTIC_TIMEOUT_S if elastic_timeout is None else float(elastic_timeout)
    limits = limits_of(cluster, (num_proc, least, most), timeout_s, reset_limit)
    start_timeout_s = START_TIMEOUT_S if start_timeout is None else float(start_timeout)
    interface = nics if isinstance(nics, str) else ",".join(nics or ())
    variables = {**({"POLYHVD_GLOO_IFACE": interface} if interface else {}), **(env or {})}
    if verbose and _LOG.isEnabledFor(logging.INFO):
        _LOG.info("%s: %d ranks on Spark with %s", _CALLER, limits.size, cluster.described())
    with contextlib.ExitStack() as opened:
        job = _job(payload, variables, _address(interface, cluster), (stdout, stderr))
        opened.callback(job.close)
        post = Post(job.rendezvous.endpoint, job.secret, (stdout is not None, stderr is not None))
        opened.enter_context(_Tasks(cluster, limits.max_size, post, job))
        try:
            hosts = job.wait_for_slots(limits.size, limits.min_size, start_timeout_s)
        except TimeoutError as error:
            raise TimeoutError(
                f"{_CALLER}: {error}; there are {cluster.described()}. Give a smaller min_num_proc, add "
                "executors, or raise start_timeout"
            ) from None
        values = job.run(Elastic(limits, hosts, job.hosts))
    return [load_result(rank, value) for rank, value in enumerate(values)]


def limits_of(
    cluster: Cluster,
    sizes: tuple[int | None, int | None, int | None],
    timeout_s: float = _ELASTIC_TIMEOUT_S,
    reset_limit: int | None = None,
) -> Limits:
    """The limits of a job; ``sizes`` are num_proc, min_num_proc and max_num_proc. Raises ValueError."""
    given, least, most = sizes
    if given is None and least is not None:  # executors may come later
        size = max(cluster.slots() or 0, int(least))
    else:
        size = wanted_size(cluster, given, _CALLER)
    if given is None and most is not None:
        size = min(size, int(most))
    try:
        return Limits(
            size=size,
            min_size=size if least is None else int(least),
            max_size=size if most is None else int(most),
            reset_limit=reset_limit,
            timeout_s=timeout_s,
        )
    except ValueError as error:
        text = str(error)
        for option, name in (*ElasticJob.names.items(), ("-np", "num_proc")):
            text = text.replace(option, name)
        raise ValueError(f"{_CALLER}: {text}") from None


def _address(interface: str, cluster: Cluster) -> str:
    """Return the address on which this process listens."""
    if interface:
        return network.address_of(interface)
    found = socket.getaddrinfo(cluster.driver_host().strip("[]"), None, type=socket.SOCK_STREAM)
    return str(found[0][4][0])


def _job(
    payload: bytes, variables: Mapping[str, str], address: str, streams: tuple[TextIO | None, TextIO | None]
) -> ElasticJob:
    try:
        return ElasticJob(payload, variables, address, streams)
    except OSError as error:
        raise RuntimeError(
            f"{_CALLER}: cannot listen on {address}, at which executors reach this process: {error}. Give "
            "nics, an interface or address of this host that they can reach"
        ) from error


class _Tasks:
    """The tasks of a job, which a thread has Spark run. Leaving the context ends them.

    Args:
        cluster: on which.
        count: how many.
        post: where they find the driver.
        job: to end when Spark has ended the tasks.
    """

    def __init__(self, cluster: Cluster, count: int, post: Post, job: ElasticJob) -> None:
        self._cluster, self._count, self._post, self._job = cluster, count, post, job
        self._tag = f"polyhvd-{uuid.uuid4().hex}"
        self._thread = cluster.thread(self._run)
        self._thread.name, self._thread.daemon = "polyhvd-spark-tasks", True

    def __enter__(self) -> _Tasks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._job.end_processes()
        if self._job.ended < self._count:  # Spark would start others
            self._cancel()
        self._thread.join(_ENDED_S)
        if self._thread.is_alive():
            self._cancel()
            self._thread.join(_CANCELLED_S)

    def _cancel(self) -> None:
        with contextlib.suppress(Exception):  # Spark itself has ended
            self._cluster.cancel(self._tag)

    def _run(self) -> None:
        numbers = self._cluster.session.range(0, self._count, 1, self._count)
        reason = "Spark has ended all tasks of the job"
        try:
            with self._cluster.tagged(self._tag):
                numbers.mapInArrow(slot_of(self._post, __version__), _SCHEMA).collect()
        except Exception as error:
            reason = in_short(error)
        self._job.stop(f"{_CALLER}: {reason}")
