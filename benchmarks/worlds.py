"""The driver's side of a peer: its ranks, alive and parked without CPU until they are given an order."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from benchmarks.launchers import CannotStart, Here, Launcher, Place
from benchmarks.peers import ENTRIES
from benchmarks.workloads import Workload

START_TIMEOUT_S = 120.0
ORDER_TIMEOUT_S = 300.0
CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Block:
    """Calls that one peer has done in its turn."""

    seconds: list[float]  # of each call, the mean of the ranks'
    others: float  # part of all cores that was not idle, and that this peer's ranks did not use


def busy_seconds() -> float:
    """CPU time that all processes of the machine have used since it was started."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _iowait, *interrupts = (int(field) for field in fields[:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


class World:
    """All ranks of one peer."""

    def __init__(self, peer: str, size: int, places: Sequence[Place], logs: Path) -> None:
        """Start them and wait for all; raises CannotStart with the end of their log when they do not come."""
        self.peer, self.size = peer, size
        self.label = ENTRIES[peer].label
        self.lost = ""  # why no order can be given any more
        self.pids: list[int] = []
        logs.mkdir(parents=True, exist_ok=True)
        self.log = logs / f"{peer}.{size}.log"
        key = secrets.token_bytes(16)
        # Plain memory for ranks that share some; it goes with this process, whatever happens.
        self._shared = os.memfd_create("bench")
        os.truncate(self._shared, 64 << 30)  # sparse
        with tempfile.TemporaryDirectory() as folder, self.log.open("wb") as log:
            path = os.path.join(folder, "driver")
            with Listener(path, "AF_UNIX", backlog=size, authkey=key) as listener:
                env = {
                    "BENCH_SOCKET": path,
                    "BENCH_KEY": key.hex(),
                    "BENCH_SHARED": f"/proc/{os.getpid()}/fd/{self._shared}",
                }
                self.launcher = Launcher(peer, size, places, env, log)
                try:
                    self.launcher.start()
                    self.ranks = self._accept(listener)
                    self._rest(True)
                except BaseException:
                    self._end()
                    raise

    def _accept(self, listener: Listener) -> list[Connection]:
        # Listener has no timeout.
        listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
        deadline = time.monotonic() + START_TIMEOUT_S
        waiting: list[Connection] = []
        while len(waiting) < self.size:
            try:
                waiting.append(listener.accept())
            except TimeoutError:
                gone = [p for p in self.launcher.processes if p.poll() is not None]
                if gone or time.monotonic() > deadline:
                    raise CannotStart(f"its ranks did not start; {self.last_words()}") from None
        found: dict[int, tuple[Connection, int]] = {}
        for connection in waiting:
            if not connection.poll(START_TIMEOUT_S):
                raise CannotStart(f"its ranks did not meet; {self.last_words()}")
            try:
                _, rank, pid = connection.recv()
            except EOFError:
                raise CannotStart(f"a rank failed; {self.last_words()}") from None
            found[rank] = connection, pid
        self.pids = [found[rank][1] for rank in range(self.size)]
        return [found[rank][0] for rank in range(self.size)]

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").split("\n")
        words = [line for line in lines if line.strip()]
        return f"{self.log} ends: {words[-1] if words else '(empty)'}"

    def order(self, *order: Any) -> list[Any]:
        """Give an order to all ranks and wait for all answers, by rank."""
        self._rest(False)
        try:
            return self._ask(order)
        finally:
            if order[0] != "close":
                self._rest(True)

    def _ask(self, order: Sequence[Any]) -> list[Any]:
        if self.lost:
            raise RuntimeError(self.lost)
        for number, connection in enumerate(self.ranks):
            with self._reaching(number, order[0]):
                connection.send(order)
        answers: list[tuple[str, Any]] = []
        for number, connection in enumerate(self.ranks):
            with self._reaching(number, order[0]):
                if not connection.poll(ORDER_TIMEOUT_S):
                    raise TimeoutError
                answers.append(connection.recv())
        for number, (verdict, answer) in enumerate(answers):
            if verdict != "ok":
                raise RuntimeError(f"{self.label}: rank {number}: {answer}")
        return [answer for _, answer in answers]

    @contextlib.contextmanager
    def _reaching(self, number: int, order: str) -> Iterator[None]:
        """Give no more orders to anybody after a rank that cannot be reached."""
        try:
            yield
            return
        except TimeoutError:
            self.lost = f"{self.label}: rank {number} did not answer {order!r}"
        except (EOFError, OSError):
            self.lost = f"{self.label}: rank {number} has ended; {self.last_words()}"
        raise RuntimeError(self.lost)

    def _rest(self, rest: bool) -> None:
        """Stop the ranks of a restless peer, or let them go on; a stopped rank takes no CPU from others."""
        for pid in self.pids if ENTRIES[self.peer].restless else ():
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(pid, signal.SIGSTOP if rest else signal.SIGCONT)

    def measure(self, workload: Workload, count: int) -> Block:
        """Let all ranks do `count` calls of what they are prepared for."""
        before, begin = busy_seconds(), time.monotonic()
        answers = self.order("measure", workload, count)
        passed = max(1e-9, time.monotonic() - begin)
        others = busy_seconds() - before - sum(cpu_s for _, cpu_s in answers)
        by_call = zip(*(times for times, _ in answers), strict=True)
        return Block(
            [sum(times) / len(times) for times in by_call],
            max(0.0, others / passed / (os.cpu_count() or 1)),
        )

    def close(self) -> None:
        """Let the ranks leave in good order; those that do not are ended."""
        with contextlib.suppress(RuntimeError, OSError):
            self.order("close")
        self._end()

    def _end(self) -> None:
        self._rest(False)
        os.close(self._shared)
        for connection in getattr(self, "ranks", []):
            connection.close()
        deadline = time.monotonic() + (0.0 if self.lost else CLOSE_TIMEOUT_S)
        for process in self.launcher.processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self.launcher.processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.terminate()
                try:
                    process.wait(2.0)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def here() -> list[Place]:
    return [Here()]
