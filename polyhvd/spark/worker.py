"""The tasks of Spark: they meet, and each starts a process that is its rank.

A process in place of Spark's Python worker, since Spark reuses that one: what a rank has in memory and in
its environment ends with it. The process ends with the worker, and the worker ends when its parent does. No
rank is started twice: Spark neither repeats nor speculates on tasks of a barrier stage whose rows go to the
driver.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from polyhvd.launch.job.function import ERROR, FUNCTION, RESULT, TRACEBACK, kill_rank, start_rank
from polyhvd.rendezvous import network
from polyhvd.rendezvous.auth import NO_RANK, new_secret, parse_secret
from polyhvd.rendezvous.client import Client
from polyhvd.rendezvous.server import Server
from polyhvd.rendezvous.store import GatherTimeoutError, StoreError
from polyhvd.runtime.placement import Placement, by_host, placements, visible_gpus

__all__ = ["SCHEMA", "Kind", "Plan", "task_of"]

#: Of the rows that tasks yield: what it is, of which rank, its part of the bytes.
SCHEMA = "kind string, rank long, data binary"
_PART_BYTES = 1 << 22  # a message of Spark Connect has 128 MiB at most
_ENDED, _STOP, _OUTPUT = "spark/ended", "spark/stop", "spark/output"
#: Seconds in which the other ranks can end by themselves after one has failed, so that the cause is found.
_GRACE_S = 3.0
_CONNECT_S = 30.0
_LOOK_S = 0.05
_FOREVER_S = 3e7  # tasks wait for the program of the user
_OUTPUT_BYTES_MAX = 1 << 20


class Kind:
    """Kinds of rows that tasks yield."""

    RESULT = "result"
    ERROR = "error"  # a pickled exception
    FAILURE = "failure"  # how a rank has ended
    REFUSED = "refused"  # why no rank was started
    STDOUT = "stdout"
    STDERR = "stderr"


@dataclass(frozen=True)
class Plan:
    """The driver's message to all tasks.

    Args:
        payload: the function and its arguments, pickled.
        variables: environment variables of the ranks.
        interface: of all connections; empty: that of the executor's address.
        python: of the ranks; None: that of Spark's worker.
        captured: whether to return what ranks print to standard output, and to standard error.
        timeout_s: how long a task waits for the others.
    """

    payload: bytes
    variables: Mapping[str, str]
    interface: str
    python: str | None
    captured: tuple[bool, bool]
    timeout_s: float


def task_of(plan: Plan, version: str) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """The function that Spark calls in each task, for ``DataFrame.mapInArrow``.

    Spark pickles it by value, so that an executor with another version of polyhvd, or without it, can say so.
    """
    fields = {name: getattr(plan, name) for name in plan.__dataclass_fields__}

    def task(batches: Iterable[Any]) -> Iterator[Any]:
        import signal
        import socket
        import sys

        import pyarrow
        from pyspark import BarrierTaskContext

        def expire(*_: object) -> None:
            raise TimeoutError(
                f"the task on {socket.gethostname()} has waited {fields['timeout_s']:g} s (start_timeout) "
                "for the other tasks. Look for executors on which Python does not start, for example because "
                "a file system does not respond, or raise start_timeout"
            )

        for _ in batches:
            pass
        context = BarrierTaskContext.get()
        try:
            import polyhvd

            found = polyhvd.__version__
        except ImportError as error:
            found = f"none ({error})"
        wrong = "" if found == version else f"{socket.gethostname()} ({sys.executable}): {found}"
        signal.signal(signal.SIGALRM, expire)  # Spark's own wait has no limit
        signal.setitimer(signal.ITIMER_REAL, fields["timeout_s"])
        try:
            wrongs = context.allGather(wrong)
            if any(wrongs):
                listed = "; ".join(sorted({text for text in wrongs if text}))
                text = f"the driver has polyhvd {version}, and executors have: {listed}"
                rows: Any = [("refused", 0, text.encode())] if context.partitionId() == 0 else []
            else:
                from polyhvd.spark import worker

                rows = worker.work(context, worker.Plan(**fields))  # which stops the timer
            for kind, rank, data in rows:
                columns = [pyarrow.array([kind]), pyarrow.array([rank])]
                columns.append(pyarrow.array([data], pyarrow.binary()))
                yield pyarrow.RecordBatch.from_arrays(columns, ["kind", "rank", "data"])
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)

    return task


def work(context: Any, plan: Plan) -> Iterator[tuple[str, int, bytes]]:
    """Be one task: start a rank and watch it. The task of rank 0 yields what all ranks have left.

    Args:
        context: Spark's of the barrier.
        plan: of the driver.
    """
    from pyspark import SparkFiles

    folder = Path(SparkFiles.getRootDirectory())  # of the executor, which removes it
    executors = [info.address for info in context.getTaskInfos()]
    hosts = [executor.rpartition(":")[0] for executor in executors]
    order = by_host(hosts)
    rank = order.index(context.partitionId())
    executors, hosts = [executors[number] for number in order], [hosts[number] for number in order]
    gpus = context.resources().get("gpu")
    own: dict[str, Any] = {"gpus": [] if gpus is None else list(gpus.addresses)}
    server = None
    with contextlib.ExitStack() as opened:
        if rank == 0:
            own["secret"] = new_secret()
            server = Server(parse_secret(own["secret"]), _address(plan.interface, hosts))
            own["endpoint"] = opened.enter_context(server).endpoint
        texts = context.allGather(json.dumps(own))
        signal.setitimer(signal.ITIMER_REAL, 0)  # of the wait for the other tasks
        tasks = [json.loads(texts[number]) for number in order]
        secret, endpoint = tasks[0]["secret"], tasks[0]["endpoint"]
        place = placements(hosts)[rank]
        visible = visible_gpus([task["gpus"] for task in tasks], hosts, place.host)
        variables = {
            "POLYHVD_DEVICES": ",".join(own["gpus"]),
            **({"CUDA_VISIBLE_DEVICES": ",".join(visible)} if visible else {}),
            **plan.variables,
            **_variables_of(place, hosts),
            "POLYHVD_RENDEZVOUS": endpoint,
            "POLYHVD_SECRET": secret,
        }
        client = opened.enter_context(_client(endpoint, secret))
        if rank == 0:
            client.put(FUNCTION, 0, plan.payload)
        watch = opened.enter_context(_Watch(plan, client, rank, folder, variables))
        if watch.wait(len(hosts)):
            assert server is not None  # this is the task of rank 0
            yield from watch.rows(executors, server.values(RESULT))


def _address(interface: str, hosts: Sequence[str]) -> str:
    """Return the address at which the task of rank 0 listens; by default, Spark's address of its executor."""
    if interface:
        return network.address_of(interface)
    family_and_more = socket.getaddrinfo(hosts[0].strip("[]"), None, type=socket.SOCK_STREAM)
    address = str(family_and_more[0][4][0])
    others = len(set(hosts)) > 1 and network.is_loopback(address)  # Debian's /etc/hosts has 127.0.1.1
    return network.own_addresses()[0] if others else address


def _variables_of(place: Placement, hosts: Sequence[str]) -> dict[str, str]:
    """The place of a rank, as polyhvdrun gives it."""
    values = {f"POLYHVD_{name}": str(value) for name, value in place.values().items()}
    return {**values, "POLYHVD_HOST_ID": str(list(dict.fromkeys(hosts)).index(place.host))}


def _client(endpoint: str, secret: str) -> Client:
    deadline = time.monotonic() + _CONNECT_S
    key, server = parse_secret(secret), "the task of rank 0"
    return Client(endpoint, key, rank=NO_RANK, generation=0, deadline=deadline, server=server)


class _Watch:
    """The process of a rank, from its start to the end of the job.

    Args:
        plan: of the driver.
        client: of the store that the task of rank 0 serves.
        rank: of the process.
        folder: for its output.
        variables: of its environment.
    """

    def __init__(
        self, plan: Plan, client: Client, rank: int, folder: Path, variables: Mapping[str, str]
    ) -> None:
        self._client, self._rank, self._parent = client, rank, os.getppid()
        #: How ranks have ended that have failed, in the order in which it was seen; in the task of rank 0.
        self._failures: dict[int, str] = {}
        self._finished: list[int] = []  # ranks whose programs have ended without failing; likewise
        self._size = 0
        self._captured = plan.captured
        self._files = [self._file(folder) if is_captured else None for is_captured in plan.captured]
        try:
            self._process = start_rank(plan.python, variables, self._files)
        except OSError as error:
            raise RuntimeError(f"rank {rank} cannot be started: {plan.python}: {error}") from error

    @staticmethod
    def _file(folder: Path) -> IO[bytes]:
        return tempfile.TemporaryFile(dir=folder)

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        for file in filter(None, self._files):
            file.close()

    def wait(self, size: int) -> bool:
        """Wait for the end of the job; return whether this is the task of rank 0, where all ranks have ended.

        The others return when that one closes the store.
        """
        self._size = size
        stop: int | None = self._client.post_gather(_STOP, 1, _FOREVER_S)
        running = {}
        if self._rank == 0:
            running = {
                rank: self._client.post_gather(f"{_ENDED}/{rank}", 1, _FOREVER_S) for rank in range(size)
            }
        deadline, has_ended = 0.0, False
        while True:
            if os.getppid() != self._parent:
                self._kill()
                os._exit(1)  # nothing reads the results
            try:
                if not has_ended and (status := self._process.poll()) is not None:
                    has_ended = True
                    self._report(status)
                if stop is not None and self._client.take(stop) is not None:
                    stop = None
                    self._kill()
                    if not has_ended and self._process.poll() is None:
                        has_ended = True  # for this task: a dead file system can keep a process for ever
                        self._report(None)
                for rank in list(running):
                    if (values := self._client.take(running[rank])) is not None:
                        del running[rank]
                        if not values[0]:
                            self._finished.append(rank)
                        elif stop is not None:
                            self._failures[rank] = values[0].decode()
                if self._rank == 0 and not running:
                    return True
                if self._failures and not deadline:
                    deadline = time.monotonic() + _GRACE_S
                if deadline and time.monotonic() > deadline:
                    self._client.put(_STOP, 0, b"")
            except StoreError:
                if has_ended and self._rank != 0:
                    return False
                raise
            time.sleep(_LOOK_S)

    def _report(self, status: int | None) -> None:
        """Let the task of rank 0 know how this rank has ended, and what it has printed.

        Args:
            status: of the process, negative for a signal; None: SIGKILL has not ended it.
        """
        for kind, file in zip((Kind.STDOUT, Kind.STDERR), self._files, strict=True):
            if file is not None:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _OUTPUT_BYTES_MAX))
                self._client.put(f"{_OUTPUT}/{kind}/{self._rank}", 0, file.read())
        text = ""
        if status is None:
            text = "has not ended after SIGKILL"
        elif status < 0:
            text = f"was killed by signal {-status} ({signal.Signals(-status).name})"
        elif status:
            text = f"has ended with exit status {status}"
        self._client.put(f"{_ENDED}/{self._rank}", 0, text.encode())

    def rows(
        self, executors: Sequence[str], results: Mapping[int, bytes]
    ) -> Iterator[tuple[str, int, bytes]]:
        """The results, errors and output of all ranks.

        Args:
            executors: of the ranks, for messages.
            results: pickled, by rank.
        """
        for kind, is_captured in zip((Kind.STDOUT, Kind.STDERR), self._captured, strict=True):
            for rank in range(self._size) if is_captured else ():
                yield from self._parts(kind, rank, self._found(f"{_OUTPUT}/{kind}/{rank}"))
        if silent := [rank for rank in self._finished if rank not in results]:
            text = "has left no result: the function has ended the process"
            self._failures = {**dict.fromkeys(silent, text), **self._failures}
        for rank, text in self._failures.items():
            traceback = self._found(f"{TRACEBACK}/{rank}").decode().rstrip()
            text = f"rank {rank} (executor at {executors[rank]}) {text}"
            yield Kind.FAILURE, rank, (f"{text}:\n{traceback}" if traceback else text).encode()
            if error := self._found(f"{ERROR}/{rank}"):
                yield from self._parts(Kind.ERROR, rank, error)
        for rank in range(self._size) if not self._failures else ():
            yield from self._parts(Kind.RESULT, rank, results[rank])

    def _found(self, scope: str) -> bytes:
        try:
            return self._client.gather(scope, 1, 0.0)[0]
        except GatherTimeoutError:
            return b""

    @staticmethod
    def _parts(kind: str, rank: int, data: bytes) -> Iterator[tuple[str, int, bytes]]:
        for begin in range(0, len(data), _PART_BYTES):
            yield kind, rank, data[begin : begin + _PART_BYTES]

    def _kill(self) -> None:
        """Kill the process, if it is running, and those of its group."""
        kill_rank(self._process)
