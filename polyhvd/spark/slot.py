"""The tasks of an elastic job: each is a slot, in which the job's driver starts one rank after another.

They are ordinary tasks, since Spark fails a job when a task of a barrier stage fails. A task that Spark
starts again, or a second time beside the first, is another slot. Ranks end with the Python worker of their
task, which ends when its parent does, or when it loses the driver.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from polyhvd.launch.job.function import kill_rank, start_rank
from polyhvd.rendezvous import network
from polyhvd.rendezvous.auth import NO_RANK, parse_secret
from polyhvd.rendezvous.client import Client
from polyhvd.rendezvous.store import StoreError

__all__ = ["ENDINGS", "ORDERS", "OUTPUTS", "SLOTS", "Post", "slot_of"]

#: Scopes in the driver's store: a slot announces itself in SLOTS/ID, reads orders in ORDERS/ID/0 and so on,
#: and reports the end of process M in ENDINGS/ID/M, and what it has printed in OUTPUTS/KIND/M.
SLOTS, ORDERS, ENDINGS, OUTPUTS = "spark/slot", "spark/order", "spark/ending", "spark/output"
KINDS = ("stdout", "stderr")
_CONNECT_S = 10.0
_LOOK_S = 0.2
_FOREVER_S = 3e7  # slots wait for the program of the user
_OUTPUT_BYTES_MAX = 1 << 20
_REPORT_BYTES_MAX = 1 << 16
#: Of the command line of Spark's executors.
_ID, _PARENTS_MAX = b"--executor-id", 4


@dataclass(frozen=True)
class Post:
    """The location of the driver.

    Args:
        endpoint: of its store.
        secret: of the job.
        captured: whether it wants what ranks print to standard output, and to standard error.
    """

    endpoint: str
    secret: str = field(repr=False)
    captured: tuple[bool, bool]


def slot_of(post: Post, version: str) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """The function that Spark calls in each task, for ``DataFrame.mapInArrow``; its tasks yield nothing.

    Spark pickles it by value, so that an executor with another version of polyhvd, or without it, can say so.
    """
    fields = {name: getattr(post, name) for name in post.__dataclass_fields__}

    def task(batches: Iterable[Any]) -> Iterator[Any]:
        import socket
        import sys

        from pyspark import TaskContext

        for _ in batches:
            pass
        try:
            import polyhvd

            found = polyhvd.__version__
        except ImportError as error:
            found = f"none ({error})"
        if found != version:
            where = f"{socket.gethostname()} ({sys.executable})"
            raise RuntimeError(f"the driver has polyhvd {version}, and executors have: {where}: {found}")
        from polyhvd.spark import slot

        slot.serve(slot.Post(**fields), TaskContext.get())
        yield from ()

    return task


def serve(post: Post, context: Any) -> None:
    """Be a slot until the driver ends the job.

    Args:
        post: where the driver is.
        context: Spark's of the task.

    Raises:
        RuntimeError: the driver cannot be reached, or is gone. Spark may start the task again.
    """
    from pyspark import SparkFiles

    host, deadline = socket.gethostname(), time.monotonic() + _CONNECT_S
    try:
        client = Client(
            post.endpoint,
            parse_secret(post.secret),
            rank=NO_RANK,
            generation=0,
            deadline=deadline,
            server="the driver",
        )
    except StoreError as error:
        raise RuntimeError(
            f"the executor on {host} cannot reach the driver: {error}. Give nics, an interface or address of "
            "the driver's host that executors can reach"
        ) from None
    gpus = context.resources().get("gpu")
    own = {
        "host": host,
        "address": client.address,
        "executor": _executor(),
        "gpus": [] if gpus is None else list(gpus.addresses),
    }
    number = uuid.uuid4().hex
    slot = _Slot(post, client, number, Path(SparkFiles.getRootDirectory()))
    try:
        client.put(f"{SLOTS}/{number}", 0, json.dumps(own).encode(), own=True)
        slot.work()
    except StoreError as error:
        raise RuntimeError(f"the task on {host} has lost the driver: {error}") from None
    finally:
        slot.kill()
        client.close()


def _executor() -> str:
    """Spark's id of this executor, which is in the command line of its JVM; empty: it is not known."""
    process = os.getppid()
    with contextlib.suppress(OSError, ValueError, IndexError):
        for _ in range(_PARENTS_MAX):
            words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
            if _ID in words:
                return words[words.index(_ID) + 1].decode("utf-8", "replace")
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return ""


class _Rank:
    """A process that is running.

    Args:
        order: of the driver.
        files: for what it prints; None: to that of this process.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, order: dict[str, Any], files: list[IO[bytes] | None]) -> None:
        self.member = int(order["member"])
        self.files = files
        self._report, pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            variables = {**order["variables"], "POLYHVD_REPORT": f"{pipe}:{os.fstat(pipe).st_ino}"}
            self._process = start_rank(None, variables, files, [pipe])
        except BaseException:
            os.close(self._report)
            raise
        finally:
            os.close(pipe)
        self.descriptor = os.pidfd_open(self._process.pid)  # readable when it has ended

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None: it is running."""
        return self._process.poll()

    def kill(self) -> None:
        """Kill it, if it is running, and those of its group."""
        kill_rank(self._process)

    def close(self) -> bytes:
        """Free what is held; returns what its engine has reported."""
        self.kill()
        reported = b""
        with contextlib.suppress(BlockingIOError):
            reported = os.read(self._report, _REPORT_BYTES_MAX)
        os.close(self._report)
        os.close(self.descriptor)
        return reported


class _Slot:
    """This task.

    Args:
        post: where the driver is.
        client: of its store.
        number: of this slot.
        folder: for output.
    """

    def __init__(self, post: Post, client: Client, number: str, folder: Path) -> None:
        self._client, self._number = client, number
        self._captured, self._folder = post.captured, folder
        self._parent = os.getppid()
        self._rank: _Rank | None = None

    def work(self) -> None:
        """Obey the driver until it ends the job; raises StoreError where it is gone."""
        count = 0
        orders = self._client.post_gather(f"{ORDERS}/{self._number}/0", 1, _FOREVER_S)
        while True:
            watched = [self._client.fileno(), *([] if self._rank is None else [self._rank.descriptor])]
            network.await_ready(watched, _LOOK_S)
            if os.getppid() != self._parent:
                self.kill()
                os._exit(1)  # the executor is gone
            if self._rank is not None and (status := self._rank.poll()) is not None:
                self._end(self._rank, status)
            while (values := self._client.take(orders)) is not None:
                count += 1
                orders = self._client.post_gather(f"{ORDERS}/{self._number}/{count}", 1, _FOREVER_S)
                order = json.loads(values[0])
                if order["what"] == "stop":
                    return
                if order["what"] == "start":
                    self._start(order)
                elif self._rank is not None and self._rank.member == order["member"]:
                    self._rank.kill()

    def kill(self) -> None:
        """End what is running."""
        if self._rank is not None:
            self._rank.close()
            self._rank = None

    def _start(self, order: dict[str, Any]) -> None:
        files = [self._file() if is_captured else None for is_captured in self._captured]
        try:
            self._rank = _Rank(order, files)
        except OSError as error:
            self._report(int(order["member"]), {"status": 1, "reason": f"was not started: {error}"})

    def _file(self) -> IO[bytes]:
        return tempfile.TemporaryFile(dir=self._folder)

    def _end(self, rank: _Rank, status: int) -> None:
        self._rank = None
        reported = rank.close()
        for kind, file in zip(KINDS, rank.files, strict=True):
            if file is not None:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _OUTPUT_BYTES_MAX))
                self._client.put(f"{OUTPUTS}/{kind}/{rank.member}", 0, file.read())
                file.close()
        self._report(rank.member, {"status": status, "reported": reported.hex()})

    def _report(self, member: int, ending: dict[str, Any]) -> None:
        value = json.dumps({"member": member, **ending}).encode()
        self._client.put(f"{ENDINGS}/{self._number}/{member}", 0, value)
