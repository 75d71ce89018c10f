"""Warm pools of ranks: worker processes that import one framework once and serve many tests.

The ranks find each other as in a job, through the launcher's rendezvous, which the pool serves itself. A rank
that fails or hangs ends its pool.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from polyhvd.launch.hosts.lists import Host, place
from polyhvd.rendezvous.auth import new_secret, parse_secret
from polyhvd.rendezvous.server import Server
from polyhvd.runtime.placement import Placement
from polyhvd.testing.processes import is_running, processes_with

__all__ = ["MARK", "START_S", "WORKER", "Pool", "PoolSpec", "Pools", "Rank", "RankFailure"]

#: In the environment of every process of a pool, children of its ranks included.
MARK = "POLYHVD_TEST_POOL"
#: The program of a rank, which ``python -c`` runs.
WORKER = "from polyhvd.testing import worker; worker.main()"
#: Until all ranks have imported their framework and found each other.
START_S = 180.0  # imports of four TensorFlows on two cores
_RUN_S = 60.0
_END_S = 20.0
_DUMP_S = 2.0
_EMPTY_S = 5.0
#: Selectors take no infinite limit.
_WAIT_S_MAX = 1e6
_LOG_BYTES_SHOWN = 4000
#: Unless the user says otherwise: one core a rank may be more than there is.
_THREADS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def _left_s(deadline: float) -> float:
    """The time until then, in seconds."""
    return min(max(0.0, deadline - time.monotonic()), _WAIT_S_MAX)


class RankFailure(AssertionError):
    """A rank raised, died or hung."""


@dataclass(frozen=True)
class PoolSpec:
    """The settings of a pool. Equal specs share a pool."""

    framework: str  # "torch+mxnet": of each rank its own
    hosts: tuple[int, ...]  # ranks on each
    settings: tuple[tuple[str, str], ...] = ()  # environment on top

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(self.hosts)

    def framework_of(self, rank: int) -> str:
        """The module that a rank imports."""
        each = self.framework.split("+")
        return each[rank] if len(each) > 1 else self.framework

    def __str__(self) -> str:
        settings = "".join(f" {name}={value}" for name, value in self.settings)
        return f"{self.framework} {'+'.join(map(str, self.hosts))}{settings}"


class Rank:
    """The pool's end of one worker."""

    def __init__(
        self, number: int, command: list[str], parent: int, env: dict[str, str], folder: Path
    ) -> None:
        self.number = number
        self.stacks = folder / f"rank{number}.stacks"
        self.log = folder / f"rank{number}.log"
        self.notes: list[Any] = []
        self.answer: tuple[str, Any] | None = None
        ours, theirs = socket.socketpair()
        with theirs, self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *command,
                    *("-c", WORKER),
                    *(str(theirs.fileno()), str(parent), str(self.stacks)),
                    env["POLYHVD_TEST_FRAMEWORK"],
                ],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for pytest
            )
        self.connection = connection.Connection(ours.detach())

    def receive(self) -> None:
        """Read one message; the end of the stream becomes an answer too."""
        try:
            kind, value = self.connection.recv()
        except (EOFError, ConnectionError):
            status = self.process.wait(_END_S)
            how = f"exit status {status}" if status >= 0 else signal.Signals(-status).name
            kind, value = "end", f"the process ended: {how}"
        if kind == "note":
            self.notes.append(value)
        else:
            self.answer = (kind, value)

    def printed_since(self, offset: int) -> str:
        """The output of the rank since its log had this size."""
        with self.log.open("rb") as log:
            log.seek(offset)
            return log.read()[-_LOG_BYTES_SHOWN:].decode("utf-8", "replace").strip()

    def shown_log(self) -> str:
        """The end of what the rank has printed."""
        data = self.log.read_bytes()[-_LOG_BYTES_SHOWN:].decode("utf-8", "replace").strip()
        return f"\n--- printed by rank {self.number}:\n{data}" if data else ""


class Pool:
    """Ranks that wait for functions. Close it, or use it as a context manager."""

    def __init__(self, spec: PoolSpec) -> None:
        """Start the ranks, and run ``hvd.init()`` on all of them."""
        self.spec = spec
        self.mark = secrets.token_hex(8)
        self.usable = True
        self.is_prepared = False  # whether pytest's session has begun on the ranks
        self._folder = tempfile.TemporaryDirectory(prefix="polyhvd-pool-")
        self._ranks: list[Rank] = []
        secret = new_secret()
        self._rendezvous = self._meeting_place(secret)
        placements = place([Host(f"host{number}", slots) for number, slots in enumerate(spec.hosts)])
        try:
            self._start(placements, secret)
            self._awaited = list(self._ranks)
            #: Process ids, by rank.
            self.pids: list[int] = self._gather(START_S, f"the start of {spec}")
        except BaseException:  # Ctrl-C, too
            self.kill()
            raise

    def _meeting_place(self, secret: str) -> Server:
        """Return the server at which the ranks find each other."""
        return Server(parse_secret(secret), "127.0.0.1")

    def _start(self, placements: Sequence[Placement], secret: str) -> None:
        """Add the processes to ``self._ranks``."""
        for placement in placements:
            self._ranks.append(self._start_rank(placement, secret))

    def _command(self, placement: Placement) -> tuple[list[str], int]:
        """The interpreter of a rank, and the process that it ends with; 0: it sees to that itself."""
        return [sys.executable], os.getpid()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.spec.size

    def run(self, function: Callable[..., Any], *arguments: Any, deadline_s: float = _RUN_S) -> list[Any]:
        """Call a function of a module on every rank, and return what it returned, by rank.

        The first rank that raises, dies or takes longer than ``deadline_s`` fails the run for all:
        RankFailure with its traceback or stacks, and the pool is gone.
        """
        __tracebackhide__ = True
        self.start(function, *arguments)
        return self._gather(deadline_s, function.__qualname__)

    def start(
        self, function: Callable[..., Any] | str, *arguments: Any, ranks: Sequence[int] | None = None
    ) -> None:
        """Begin a run, on some ranks or on all; ``answer`` and ``note`` receive from them.

        A function of a module that only ranks import is given by name, as "module:function".
        """
        assert self.usable, "this pool has ended"
        if isinstance(function, str):
            module, _, name = function.partition(":")
        else:
            module, name = function.__module__, function.__qualname__
        self._awaited = [self._ranks[number] for number in ranks or range(self.size)]
        for rank in self._awaited:
            rank.answer = None
            rank.notes.clear()
            rank.connection.send((module, name, arguments))

    def answer(self, number: int, deadline_s: float = _RUN_S) -> Any:
        """Wait for what one rank returns; RankFailure as in ``run``."""
        __tracebackhide__ = True
        rank = self._ranks[number]
        self._listen(lambda: rank.answer is not None, [rank], deadline_s, f"rank {number}")
        assert rank.answer is not None
        self._check(rank)
        return rank.answer[1]

    def settle(self, deadline_s: float, grace_s: float, good: Callable[[Any], bool]) -> bool:
        """Wait for all that were started, after a bad answer for ``grace_s`` at most; False: no longer.

        ``good`` says of what a rank has returned whether the others will, too. No rank is ended.
        """
        now = time.monotonic()
        deadline = late = now + deadline_s
        while waiting := {rank.connection: rank for rank in self._awaited if rank.answer is None}:
            answers = [rank.answer for rank in self._awaited if rank.answer is not None]
            if deadline == late and not all(kind == "value" and good(value) for kind, value in answers):
                deadline = min(late, time.monotonic() + grace_s)
            ready = connection.wait(list(waiting), _left_s(deadline))
            if not ready:
                return deadline < late
            for end in ready:
                waiting[end].receive()  # type: ignore[index]
        return True

    def answers(self) -> list[tuple[str, Any] | None]:
        """Return "value", "error" or "end" of each rank, with what it is; None: it has not answered."""
        return [rank.answer for rank in self._ranks]

    def log_sizes(self) -> list[int]:
        """How much each rank has printed."""
        return [rank.log.stat().st_size for rank in self._ranks]

    def printed_since(self, sizes: Sequence[int]) -> list[str]:
        """The output of each rank since :meth:`log_sizes` returned these sizes."""
        return [rank.printed_since(size) for rank, size in zip(self._ranks, sizes, strict=True)]

    def stacks(self) -> dict[int, str]:
        """Return the Python stacks of each rank that has not ended."""
        running = [rank for rank in self._ranks if rank.process.poll() is None]
        for rank in running:
            rank.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + _DUMP_S
        while time.monotonic() < deadline:
            if all(rank.stacks.exists() and rank.stacks.stat().st_size for rank in running):
                break
            time.sleep(0.05)
        return {rank.number: rank.stacks.read_text() for rank in running if rank.stacks.exists()}

    def has_answered(self, number: int) -> bool:
        """Return whether a rank has returned or raised by now."""
        rank = self._ranks[number]
        while rank.answer is None and rank.connection.poll():
            rank.receive()
        return rank.answer is not None

    def is_alive(self) -> bool:
        """Return whether all ranks run, and wait for functions."""
        return self.usable and all(
            # poll() notices the end of a child of a fork server a moment later than the system shows it.
            rank.process.poll() is None and is_running(rank.process.pid) and not rank.connection.poll()
            for rank in self._ranks
        )

    def note(self, number: int, deadline_s: float = _RUN_S) -> Any:
        """Wait for the next value that a rank sends with ``worker.note``."""
        __tracebackhide__ = True
        rank = self._ranks[number]

        def heard() -> bool:
            return bool(rank.notes) or rank.answer is not None

        self._listen(heard, [rank], deadline_s, f"a note of rank {number}")
        if not rank.notes:
            self._check(rank)
            raise RankFailure(f"rank {number} returned without a note")
        return rank.notes.pop(0)

    def end(self, number: int, deadline_s: float = _END_S) -> int:
        """Let one rank end in good order; returns its exit status."""
        rank = self._ranks[number]
        rank.connection.close()
        return rank.process.wait(deadline_s)

    def signal(self, number: int, which: int) -> None:
        """Send a signal to one rank."""
        os.kill(self.pids[number], which)

    def processes(self) -> list[int]:
        """Every process of this pool that runs: ranks, and children of them."""
        return processes_with(MARK, self.mark)

    def close(self) -> None:
        """End the ranks in good order; RankFailure when one does not manage to."""
        if not self.usable:
            return
        self.usable = False
        try:
            for rank in self._ranks:
                rank.connection.close()
            deadline = time.monotonic() + _END_S
            for rank in self._ranks:
                try:
                    status = rank.process.wait(_left_s(deadline))
                except subprocess.TimeoutExpired:
                    raise RankFailure(
                        f"rank {rank.number} of {self.spec} does not end{self._stacks()}"
                    ) from None
                if status != 0:
                    raise RankFailure(
                        f"rank {rank.number} of {self.spec} ended with status {status}{rank.shown_log()}"
                    )
        finally:
            self.kill()

    def kill(self) -> None:
        """End everything at once; idempotent."""
        self.usable = False
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + _EMPTY_S
        for rank in self._ranks:
            # One that waits for a file system that does not answer outlives SIGKILL.
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(_left_s(deadline))
            rank.connection.close()
        self._rendezvous.close()
        deadline = time.monotonic() + _EMPTY_S
        while True:
            try:
                self._folder.cleanup()
                break
            except OSError:  # a rank that is being killed still writes its flight dump
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def _start_rank(self, placement: Placement, secret: str) -> Rank:
        values = {
            **placement.values(),
            "HOST_ID": placement.host,
            "RENDEZVOUS": self._rendezvous.endpoint,
            "SECRET": secret,
            "FLIGHT_DIR": self._folder.name,
        }
        env = {**self._environment(), **{f"POLYHVD_{name}": str(value) for name, value in values.items()}}
        framework = self.spec.framework_of(placement.rank)
        env |= {"POLYHVD_TEST_FRAMEWORK": framework, **dict(self.spec.settings)}
        command, parent = self._command(placement)
        return Rank(placement.rank, command, parent, env, Path(self._folder.name))

    def _environment(self) -> dict[str, str]:
        """The common environment of ranks, without settings of the launcher's or the user's."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("POLYHVD_", "HOROVOD_", "PYTEST_"))
        }
        return {
            **_THREADS,
            **inherited,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            MARK: self.mark,
        }

    def _gather(self, deadline_s: float, what: str) -> list[Any]:
        """Wait for all that were started; the first that fails ends it for all."""
        __tracebackhide__ = True

        def settled() -> bool:
            answers = [rank.answer for rank in self._awaited]
            return None not in answers or any(a is not None and a[0] != "value" for a in answers)

        self._listen(settled, self._awaited, deadline_s, what)
        for rank in sorted(
            self._awaited, key=lambda rank: rank.answer is not None and rank.answer[0] == "end"
        ):
            if rank.answer is not None:
                self._check(rank)
        return [rank.answer[1] for rank in self._awaited if rank.answer is not None]

    def _listen(self, done: Callable[[], bool], ranks: Sequence[Rank], deadline_s: float, what: str) -> None:
        __tracebackhide__ = True
        deadline = time.monotonic() + deadline_s
        while not done():
            open_ends = {rank.connection: rank for rank in ranks if rank.answer is None}
            ready = connection.wait(list(open_ends), _left_s(deadline))
            if not ready:
                stacks = self._stacks()
                self.kill()
                raise RankFailure(f"{what} takes more than {deadline_s:g} s{stacks}")
            for end in ready:
                open_ends[end].receive()  # type: ignore[index]

    def _check(self, rank: Rank) -> None:
        """Raise what a rank has raised, and end the pool."""
        __tracebackhide__ = True
        assert rank.answer is not None
        kind, value = rank.answer
        if kind == "value":
            return
        log = rank.shown_log()
        self.kill()
        raise RankFailure(f"rank {rank.number} of {self.spec}:\n{value}{log}")

    def _stacks(self) -> str:
        """Return the Python stacks of each rank, and its output."""
        stacks = self.stacks()
        parts = []
        for rank in self._ranks:
            state = "has ended" if rank.number not in stacks else "has answered" if rank.answer else "is at"
            text = stacks.get(rank.number, "")
            parts.append(f"\n--- rank {rank.number} {state}:\n{text}{rank.shown_log()}")
        return "".join(parts)


class Pools:
    """The pools of a session, a few at a time: each is as many processes as it has ranks."""

    def __init__(self, pools_max: int = 4) -> None:
        self._pools_max = pools_max
        self._pools: dict[PoolSpec, Pool] = {}  # the one used last at the end
        self._cannot_start: dict[PoolSpec, str] = {}

    def new(self, spec: PoolSpec) -> Pool:
        """Ranks of the caller's own, which closes them."""
        return Pool(spec)

    def get(self, spec: PoolSpec) -> Pool:
        """The pool of this spec; a new one when there is none, or the last one failed."""
        __tracebackhide__ = True
        if spec in self._cannot_start:
            raise RankFailure(self._cannot_start[spec])
        pool = self._pools.pop(spec, None)
        if pool is not None and not pool.is_alive():
            pool.kill()
            pool = None
        if pool is None:
            while len(self._pools) >= self._pools_max:
                self._pools.pop(next(iter(self._pools))).close()
            try:
                pool = self.new(spec)
            except RankFailure as failure:
                self._cannot_start[spec] = f"as in the first test of this pool: {failure}"
                raise
        self._pools[spec] = pool
        return pool

    def close(self) -> None:
        """End the pools that are left; RankFailure when a rank does not manage to."""
        try:
            while self._pools:
                self._pools.popitem()[1].close()
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """End all at once."""
        while self._pools:
            self._pools.popitem()[1].kill()
