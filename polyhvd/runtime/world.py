"""One world of ranks, as a value: its connections, its engine and its process sets.

A process is in one world after the other, each of another generation, and :mod:`polyhvd.runtime.current`
keeps the one that the verbs of the frameworks use. Several may be there at once.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

from polyhvd import _core
from polyhvd.config import Settings
from polyhvd.errors import InvalidArgumentError
from polyhvd.rendezvous.store import Store
from polyhvd.runtime import bootstrap, current, gpu, mpi
from polyhvd.runtime.mailbox_thread import MailboxThread
from polyhvd.runtime.placement import ONE_RANK, Placement
from polyhvd.runtime.prologue import Prologue

__all__ = ["DATA_COUNTERS", "Member", "World"]

#: What loaders count: batches and rows that the program was given, row groups and bytes that were read, and
#: what was left out since it cannot be read.
DATA_COUNTERS = (
    *("data_batches", "data_rows", "data_groups", "data_groups_cached", "data_bytes"),
    *("data_rows_skipped", "data_files_skipped"),
)

S = TypeVar("S", bound="Member")

#: Those of this process whose engine runs, for a fork.
_worlds: weakref.WeakSet[World] = weakref.WeakSet()
_abandoned: list[World] = []  # of a forked parent: never destroyed in the child


class Member(Protocol):
    """The world's records of the objects that stand for its process sets."""

    ranks: list[int] | None
    process_set_id: int | None  # by which it is registered
    world: World | None  # where


class World:
    """Connections, engine, process sets and settings of one generation: an engine that runs with other ranks.

    Thread-safe. Usable as a context manager, which closes it.

    Args:
        settings: those that must agree are compared with the other ranks'.
        placement: this rank's place, with the generation, which distinguishes this bootstrap from others.
        store: where all ranks of the placement's generation meet; None: a world of one. It stays the
            caller's, and is not needed any more when the world is there.
        process_sets: ranks of the process sets 1, 2, ..., the same on every rank.
        objects: that stand for process sets, each with its number; None: that process set is lost.
        met_by_mpi: how MPI knows these ranks, if they have met through it.
        member: the number of this process in its elastic job; None: the job is not elastic.
        counted: what this process has counted in former worlds of that job.
        prologue: of that job.

    Raises:
        ConfigError: the settings cannot work.
        PeerLostError: other ranks did not come within ``settings.start_timeout_s``; they are named.
        RankMismatchError: ranks disagree on the process sets, the size or settings.
        HorovodInternalError: another rank failed meanwhile, or the store is gone.

    Example::

        with World(Settings(), placement, store) as world:
            world.numpy.allreduce(np.ones(3))
    """

    def __init__(
        self,
        settings: Settings,
        placement: Placement = ONE_RANK,
        store: Store | None = None,
        process_sets: Sequence[Sequence[int]] = (),
        objects: Iterable[tuple[int | None, Member]] = (),
        *,
        met_by_mpi: mpi.MpiJob | None = None,
        member: int | None = None,
        counted: Mapping[str, int] | None = None,
        prologue: Prologue | None = None,
    ) -> None:
        settings.engine_core(placement.local_rank, placement.local_size)  # may raise
        listed = [list(ranks) for ranks in process_sets]
        connections = bootstrap.connect(settings, placement, store, listed)
        self.settings = settings
        self.placement = placement
        #: Identifies the job, the same on all ranks.
        self.job = f"process-{os.getpid()}" if store is None else store.job
        #: The host of each rank, as launchers call it.
        self.hosts: list[str] = connections.hosts
        self.met_by_mpi = met_by_mpi
        #: The number of this process in its elastic job, in which it keeps it over all worlds.
        self.member = member
        #: What its timeline was started with, if one runs; and whether that was in a former world. Written
        #: by the caller that starts and stops it; the engine allows one at a time.
        self.timeline = ""
        self.timeline_is_carried = False
        #: What this process has counted in former worlds of its elastic job.
        self.counted = dict(counted or {})
        #: When this world began, by ``time.monotonic()``.
        self.began = time.monotonic()
        #: Whether this rank is slow, as the launcher of an elastic job has last reported; None: another job.
        self.is_slow: bool | None = None if member is None else False
        #: Process sets that are there for one exchange, and are not for the next world. Written and read by
        #: the thread that enters and leaves worlds.
        self.passing_sets: set[int] = set()
        #: Of a process of an elastic job.
        self.prologue = prologue
        #: Whether this rank has called join(): others may take steps that it does not.
        self.has_joined = False
        #: Known only to the ranks of this world, if they had a secret; empty in a world of one.
        self.key: bytes = connections.world_key
        self._domains = connections.domains
        self._closing = threading.Lock()  # held by the thread that closes it; taken before no other
        self._lock = threading.Lock()  # of what follows
        self._sets: list[Member] = []  # those that are registered, as objects; without that of all ranks
        self._lines: weakref.WeakValueDictionary[tuple[int, str], threading.Lock] = (
            weakref.WeakValueDictionary()
        )
        self._data_counted = dict.fromkeys(DATA_COUNTERS, 0)
        self._data_wait_ns = 0
        self._mailbox_thread = MailboxThread()
        connections.watches_deaths = member is not None
        try:
            mpi_job = met_by_mpi if settings.moves_by_mpi else None
            self.engine = _core.Engine(
                connections,
                settings,
                placement,
                self._mailbox_thread.mailbox,
                job=self.job,
                nccl_libraries=gpu.nccl_libraries(settings) if settings.may_use_nccl else (),
                mpi=None if mpi_job is None else mpi_job.communicator,
            )
        except BaseException:
            self._mailbox_thread.close()
            raise
        _worlds.add(self)
        for number, item in objects:
            item.ranks = listed[number - 1] if number else []
            if number:
                self.register(item, number)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, words: str = "") -> None:
        """Leave in good order. Operations that are pending fail; idempotent.

        Args:
            words: how this rank's program ends, if it has failed. Ranks that still need this one receive it,
                or the error of a rank that has failed before.
        """
        self.engine.shutdown("" if self.engine.has_lost_results else words)
        with self._closing:
            if self not in _worlds:
                return
            _worlds.discard(self)
            self._mailbox_thread.close()
            if self.met_by_mpi is not None:
                self.met_by_mpi.close()
        with self._lock:
            for item in self._sets:
                item.world = item.process_set_id = None
            self._sets.clear()

    def counters(self) -> dict[str, int]:
        """The counters of this process, former worlds included; see :func:`polyhvd.counters`."""
        found = self.engine.counters()
        with self._lock:
            found.update(self._data_counted, data_wait_us=self._data_wait_ns // 1000, world_changes=0)
        for name, value in self.counted.items():
            found[name] = found.get(name, 0) + value
        return found

    def count(self, **numbers: int) -> None:
        """Add to counters of data.

        Args:
            numbers: what is added, by the names of :data:`DATA_COUNTERS`.
        """
        with self._lock:
            for name, number in numbers.items():
                self._data_counted[name] += number

    def count_data_wait(self, begin_ns: int, end_ns: int) -> None:
        """A step has waited for its data, between two times of ``time.monotonic_ns()``."""
        with self._lock:
            self._data_wait_ns += end_ns - begin_ns
        self.engine.add_data_wait(begin_ns, end_ns)

    @property
    def data_wait_s(self) -> float:
        """The seconds for which steps of this world have waited for data on this rank."""
        return self._data_wait_ns / 1e9

    def on_sample(self, observe: Any) -> None:
        """Pass samples of the speed to ``observe``, on a separate thread."""
        self._mailbox_thread.on_sample = observe

    def remark(self, text: str) -> None:
        """Append this text to the stall reports of this rank; empty: nothing."""
        self._mailbox_thread.mailbox.remark(text)

    @property
    def is_homogeneous(self) -> bool:
        """Whether every host has the same number of ranks."""
        return len(set(Counter(self.hosts).values())) == 1

    def spans_hosts(self, process_set: int) -> bool:
        """Return whether what the ranks of a process set send each other leaves the memory of a host.

        The same on all ranks. Ranks of a host that share no memory count as several hosts. A process set
        that is not there spans nothing.
        """
        members = set(self.engine.process_sets().get(process_set, ()))
        return sum(not members.isdisjoint(domain) for domain in self._domains) > 1

    @property
    def numpy(self) -> Any:
        """The functions of polyhvd.numpy, in this world whichever is the current one."""
        return importlib.import_module("polyhvd.numpy.functions").NumpyFunctions(self)

    # Process sets

    def register(self, process_set: Member, number: int) -> None:
        """Remember the object of a process set, until it is removed or the world ends."""
        with self._lock:
            process_set.world, process_set.process_set_id = self, number
            self._sets.append(process_set)

    def unregister(self, process_set: Member) -> None:
        """Forget a process set that was removed."""
        with self._lock:
            process_set.world = process_set.process_set_id = None
            self._sets[:] = [item for item in self._sets if item is not process_set]

    def registered_as(self, number: int, otherwise: S) -> S:
        """The object of the process set of this number; if there is none, ``otherwise``, a new one, is it."""
        with self._lock:
            for item in self._sets:
                if item.process_set_id == number:
                    return cast(S, item)
            otherwise.world, otherwise.process_set_id = self, number
            self._sets.append(otherwise)
            return otherwise

    def objects(self) -> list[tuple[Member, int]]:
        """The objects of process sets that are registered, each with its number."""
        with self._lock:
            return [(item, item.process_set_id) for item in self._sets if item.process_set_id is not None]

    def process_sets(self) -> dict[int, list[int]]:
        """Ranks of every process set that this process has an object of, by its number."""
        with self._lock:
            sets = {item.process_set_id: list(item.ranks or ()) for item in self._sets}
        whole = {0: list(range(self.placement.size))}
        return whole | {number: ranks for number, ranks in sets.items() if number is not None}

    def ranks_of(self, members: object) -> list[int]:
        """World ranks of a communicator, or group, of mpi4py.

        Raises:
            InvalidArgumentError: the ranks have not met through MPI, or one of them is not in the world.
        """
        if self.met_by_mpi is None:
            raise InvalidArgumentError(
                f"{members!r}: the ranks of this job have not met through MPI, so no communicator describes "
                "them"
            )
        return self.met_by_mpi.ranks_of(members)

    # Calls that the program gives no name, but which run operations under names of ours

    def line(self, name: str, process_set: int) -> threading.Lock:
        """Held by the one thread that runs the operations of a call that has no name, on a process set.

        Names that recur are known to the response cache. So that several threads may make such calls at
        once, each process lets them follow one another: the n-th call of a rank meets the n-th of the
        others, as calls without a name do. They are not counted, and a rank that has joined does
        not catch up.
        It adds no deadlock: what it makes a call wait for are earlier ones, which no rank can pass over
        either. The program's own code, which may communicate, is not to run inside.

        Example::

            with world.line("broadcast_parameters", set_id):
                ...
        """
        with self._lock:  # each line lasts as long as a call waits in it
            return self._lines.setdefault((process_set, name), threading.Lock())

    def abandon(self) -> None:
        """In a forked process: close what was inherited, and leave the rest as it is for ever."""
        self.engine.abandon()
        for item in self._sets:  # no lock: its holder was a thread of the parent process
            item.world = item.process_set_id = None
        _abandoned.append(self)


def _forget_in_child() -> None:
    """A forked process (a DataLoader's worker) is not a rank: close what it has inherited."""
    inherited = list(_worlds)  # kept alive from here on: their end would be that of the parent's engines
    current.forget_in_child()
    for world in inherited:
        world.abandon()
    _worlds.clear()


os.register_at_fork(after_in_child=_forget_in_child)
