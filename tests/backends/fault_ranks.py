"""The ranks of the fault test: processes forked from one that has everything imported.

Started as ``python -c "import fault_ranks; fault_ranks.serve(FD, UID)"``. The server has no thread and no
engine, so that a fork of it is as good as a fresh process.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import faulthandler
import gc
import os
import pickle
import queue
import random
import select
import signal
import socket
import threading
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import polyhvd.numpy as hvd
from fault_cases import TO_A_RANK, Case

__all__ = ["Report", "serve"]

Array = np.ndarray[Any, Any]

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_DTYPES = ("int32", "int64", "uint8", "uint16", "uint64", "float16", "float32", "float64")
#: Small enough that sums of all ranks are exact in every type.
_VALUES_MAX = 20
_STEPS_AFTER = 4
_SETTLE_S = 30.0


@dataclass
class Report:
    """How one life of an engine has ended on a rank."""

    status: str  # right, failed: by an error that a program can catch, or broken
    kind: str = ""
    message: str = ""
    leaks: list[str] = field(default_factory=list)


class WrongResultError(AssertionError):
    """A collective has returned what NumPy does not."""


# The server ------------------------------------------------------------------------------------


def serve(descriptor: int, user: int) -> None:
    """Fork a rank for each request, and tell of the ends of ranks, until the other side closes."""
    if user != os.geteuid():
        _become_user(user)
    _die_with_parent()
    control = socket.socket(fileno=descriptor)
    running: dict[int, int] = {}  # pidfd -> pid
    while True:
        poller = select.poll()
        for ready in (control.fileno(), *running):
            poller.register(ready, select.POLLIN)
        for ready, _ in poller.poll():
            if ready in running:
                pid, status = os.waitpid(running.pop(ready), 0)
                os.close(ready)
                control.send(pickle.dumps(("exit", pid, os.waitstatus_to_exitcode(status))))
                continue
            message, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 1)
            if not message:
                return
            pid = os.fork()
            if pid == 0:
                _become_rank(control, running, descriptors[0], *pickle.loads(message))
            os.close(descriptors[0])
            running[os.pidfd_open(pid)] = pid
            control.send(pickle.dumps(("pid", pid, 0)))


def _become_user(user: int) -> None:
    """What is imported stays so, wherever it lies; the rest is as in a program that this user has started."""
    for encoding in ("ascii", "idna"):  # which sockets look up when they need them
        codecs.lookup(encoding)
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _become_rank(
    control: socket.socket,
    running: dict[int, int],
    descriptor: int,
    case: Case,
    env: dict[str, str],
    log: str,
) -> None:
    status = 1
    try:
        _die_with_parent()
        os.setsid()
        control.close()
        for other in running:
            os.close(other)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        os.environ["TMPDIR"] = env["TMPDIR"]
        _begin_and_end_alone()
        os.environ.update(env)
        _Rank(Connection(descriptor), case, int(env["POLYHVD_RANK"])).live()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _begin_and_end_alone() -> None:
    """What is made once in a process is there before anything is counted."""
    hvd.init()
    hvd.shutdown()


# A rank ----------------------------------------------------------------------------------------


class _Rank:
    """Runs the job's program, and does to itself what the test asks for."""

    def __init__(self, connection: Connection, case: Case, rank: int) -> None:
        self._connection = connection
        self._case = case
        self._rank = rank
        self._told: queue.Queue[str] = queue.Queue()
        #: Steps that the test wants to hear of.
        self._awaited = {
            fault.step
            for fault in case.faults
            if fault.victim == rank and (fault.step >= 0 or fault.kind in TO_A_RANK)
        }
        threading.Thread(target=self._listen, daemon=True).start()

    def live(self) -> None:
        """One job after the other, until the test lets the process end."""
        lives = 0
        while lives == 0 or self._told.get() == "again":
            before = _in_use()
            report = self._run(lives)
            report.leaks = _leaks(before)
            self._connection.send(report)
            lives += 1

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                word, pick = self._connection.recv()
                if word == "shut":
                    self._shut_a_socket(pick)
                else:
                    self._told.put(word)

    def _shut_a_socket(self, pick: int) -> None:
        """Cut one of the connections of this rank, as a router that forgets it would."""
        found = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    found.append(int(name))
        found = sorted(set(found) - {self._connection.fileno()})
        if found:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(found[pick % len(found)])) as cut:
                cut.shutdown(socket.SHUT_RDWR)

    def _run(self, life: int) -> Report:
        try:
            sets = [hvd.ProcessSet(ranks) for ranks in self._case.sets]
            if life == 0 and -1 in self._awaited:
                self._connection.send(-1)
            hvd.init(process_sets=sets)
            steps = self._case.steps if life == 0 else 0
            for step in range(steps + _STEPS_AFTER):
                if life == 0 and step in self._awaited:
                    self._connection.send(step)
                _Step(self._case.seed, step + 1000 * life, sets).run()
            hvd.barrier()
            if self._case.checksums and hvd.counters()["tcp_bytes_received"] > 0:
                assert hvd.counters()["tcp_bytes_checked"] == hvd.counters()["tcp_bytes_received"]
            return Report("right")
        except hvd.HorovodInternalError as error:
            return Report("failed", type(error).__name__, str(error))
        except BaseException as error:
            return Report("broken", type(error).__name__, traceback.format_exc())
        finally:
            hvd.shutdown()


def _in_use() -> tuple[list[str], int]:
    gc.collect()
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{name}").partition(":")[0])
    return sorted(found), len(os.listdir("/proc/self/task"))


def _leaks(before: tuple[list[str], int]) -> list[str]:
    """What an engine has left behind; a thread that was joined may take a moment to vanish."""
    deadline = time.monotonic() + _SETTLE_S
    while (after := _in_use()) != before:
        if time.monotonic() > deadline:
            return [f"in use before: {before}", f"in use after: {after}"]
        time.sleep(0.002)
    return []


# The program -----------------------------------------------------------------------------------


class _Step:
    """One operation of the program, or some in flight together: the same choice on every rank."""

    def __init__(self, seed: int, number: int, sets: list[Any]) -> None:
        self._seed = seed
        self._number = number
        self._chance = random.Random(f"{seed} {number}")
        self._set = self._chance.choice([hvd.global_process_set, hvd.global_process_set, *sets])
        self._ranks = list(range(hvd.size())) if self._set is hvd.global_process_set else self._set.ranks
        self._given = [item.ranks for item in sets]
        self._tensors = 0

    def run(self) -> None:
        """Do it, and compare with NumPy."""
        kinds = [
            *(self._allreduce, self._allreduce, self._grouped_allreduce, self._in_flight),
            *(self._allgather, self._broadcast, self._alltoall, self._reducescatter),
            *(self._new_set, self._in_flight),
        ]
        kind = self._chance.choice(kinds)
        if kind == self._new_set or hvd.rank() in self._ranks:
            kind()

    def _name(self) -> str:
        return f"{self._number}.{self._tensors}"

    def _shape(self, rows: int | None = None) -> tuple[int, ...]:
        if rows is not None:
            return rows, int(10 ** self._chance.uniform(0, 3))
        return (int(10 ** self._chance.uniform(0, 5.3)),)

    def _contributions(self, shapes: list[tuple[int, ...]]) -> list[Array]:
        """What each member gives, by position in the process set."""
        dtype = self._chance.choice(_DTYPES)
        self._tensors += 1
        keys = [(self._seed, self._number, self._tensors, rank) for rank in self._ranks]
        return [
            np.random.default_rng(key).integers(0, _VALUES_MAX, shape).astype(dtype)
            for key, shape in zip(keys, shapes, strict=True)
        ]

    def _alike(self, shape: tuple[int, ...]) -> list[Array]:
        return self._contributions([shape] * len(self._ranks))

    @property
    def _mine(self) -> int:
        return self._ranks.index(hvd.rank())

    def _check(self, what: str, found: Any, expected: Array) -> None:
        same = found.dtype == expected.dtype and np.array_equal(found, expected)
        if not same:
            different = np.flatnonzero(found != expected) if found.shape == expected.shape else "its shape"
            raise WrongResultError(
                f"{what} of step {self._number} on ranks {self._ranks}: {found.dtype} {found.shape} where "
                f"{expected.dtype} {expected.shape} was expected; differs in {different}"
            )

    def _reduction(self) -> tuple[Array, Array, dict[str, Any]]:
        """A tensor, what its allreduce gives, and the arguments."""
        terms = self._alike(self._shape())
        op, combine = self._chance.choice([(hvd.Sum, np.add), (hvd.Max, np.maximum), (hvd.Min, np.minimum)])
        expected = combine.reduce(terms).astype(terms[0].dtype)
        arguments = {"name": self._name(), "op": op, "process_set": self._set}
        return terms[self._mine].copy(), expected, arguments

    def _allreduce(self) -> None:
        tensor, expected, arguments = self._reduction()
        allreduce = self._chance.choice([hvd.allreduce, hvd.allreduce_])
        self._check("allreduce", allreduce(tensor, **arguments), expected)

    def _in_flight(self) -> None:
        """Several at once, begun and waited for in another order on each rank."""
        order = random.Random(f"{self._seed} {self._number} {hvd.rank()}")
        wanted = [self._reduction() for _ in range(self._chance.randint(2, 8))]
        order.shuffle(wanted)
        handles = [
            (hvd.allreduce_async(tensor, **arguments), expected) for tensor, expected, arguments in wanted
        ]
        order.shuffle(handles)
        first: hvd.HorovodInternalError | None = None
        for handle, expected in handles:
            try:
                self._check("allreduce", hvd.synchronize(handle), expected)
            except hvd.HorovodInternalError as error:
                first = first or error
        if first is not None:
            raise first

    def _grouped_allreduce(self) -> None:
        all_terms = [self._alike(self._shape()) for _ in range(self._chance.randint(2, 5))]
        results = hvd.grouped_allreduce(
            [terms[self._mine] for terms in all_terms], name=self._name(), op=hvd.Sum, process_set=self._set
        )
        for terms, result in zip(all_terms, results, strict=True):
            self._check("grouped_allreduce", result, np.add.reduce(terms).astype(terms[0].dtype))

    def _allgather(self) -> None:
        _, columns = self._shape(rows=0)
        terms = self._contributions([(self._chance.randint(0, 6), columns) for _ in self._ranks])
        result = hvd.allgather(terms[self._mine], name=self._name(), process_set=self._set)
        self._check("allgather", result, np.concatenate(terms))

    def _broadcast(self) -> None:
        terms = self._alike(self._shape())
        root = self._chance.choice(self._ranks)
        result = hvd.broadcast(terms[self._mine], root, name=self._name(), process_set=self._set)
        self._check("broadcast", result, terms[self._ranks.index(root)])

    def _alltoall(self) -> None:
        _, columns = self._shape(rows=0)
        splits = [[self._chance.randint(0, 4) for _ in self._ranks] for _ in self._ranks]
        terms = self._contributions([(sum(row), columns) for row in splits])
        parts = [np.split(term, np.cumsum(row)[:-1]) for term, row in zip(terms, splits, strict=True)]
        result, received = hvd.alltoall(
            terms[self._mine], splits[self._mine], name=self._name(), process_set=self._set
        )
        self._check("alltoall", result, np.concatenate([part[self._mine] for part in parts]))
        assert received.tolist() == [row[self._mine] for row in splits]

    def _reducescatter(self) -> None:
        terms = self._alike(self._shape(rows=self._chance.randint(1, 9)))
        result = hvd.reducescatter(terms[self._mine], name=self._name(), op=hvd.Sum, process_set=self._set)
        total = np.add.reduce(terms).astype(terms[0].dtype)
        self._check("reducescatter", result, np.array_split(total, len(self._ranks))[self._mine])

    def _new_set(self) -> None:
        ranks = sorted(self._chance.sample(range(hvd.size()), self._chance.randint(1, hvd.size())))
        if len(ranks) == hvd.size() or ranks in self._given:
            hvd.barrier()
            return
        self._set = hvd.add_process_set(ranks)
        self._ranks = ranks
        if hvd.rank() in ranks:
            self._allreduce()
        hvd.remove_process_set(self._set)
