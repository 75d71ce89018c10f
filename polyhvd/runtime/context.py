"""The engine of this process: the only global of the project."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from polyhvd import _core, log
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.config import Config, ConfigError, foreign_launch, shares_gpus
from polyhvd.errors import InvalidArgumentError, NotInitializedError
from polyhvd.observe import tracing
from polyhvd.observe.autotune import Autotuner
from polyhvd.runtime import bootstrap, gpu, mpi
from polyhvd.runtime.mailbox_thread import Attendant

__all__ = [
    "config",
    "engine",
    "init",
    "is_homogeneous",
    "is_initialized",
    "mpi_runtime",
    "on_engine_change",
    "on_shutdown",
    "ranks_by_mpi",
    "register",
    "registered",
    "registered_as",
    "shutdown",
    "unregister",
]

_LOG = logging.getLogger("polyhvd")
_lock = threading.RLock()
_engine: _core.Engine | None = None
_attendant: Attendant | None = None
_config: Config | None = None
_generation = 0  # of engines of this process; equal on all ranks, as init() is called on all
_homogeneous = True
_mpi: _core.MpiRuntime | None = None  # of the process, for as long as it lives
_mpi_job: mpi.MpiJob | None = None  # of the running engine, or of the init() that failed last
_members: tuple[object, list[int] | None] = (None, None)  # what init(comm=...) was given
_registered: list[ProcessSet] = []
_listeners: list[Callable[[int], None]] = []
_leavers: list[Callable[[], None]] = []
_abandoned: list[_core.Engine] = []  # of a forked parent; never destroyed in the child


def engine() -> _core.Engine:
    """The running engine; raises :class:`NotInitializedError` before ``init()``."""
    current = _engine
    if current is None:
        raise NotInitializedError()
    return current


def config() -> Config:
    """The configuration of the running engine; raises before ``init()``."""
    current = _config
    if current is None:
        raise NotInitializedError()
    return current


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks; raises before ``init()``."""
    engine()
    return _homogeneous


def init(
    comm: object = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
    *,
    reproducible: bool | None = None,
) -> None:
    """Connect this process to the other ranks of the job; does nothing when that is done already.

    Without a launcher this is a world of one rank. A process that another launcher (torchrun, srun, ...)
    has started as one of several raises, unless ``POLYHVD_ALONE=1`` says that this is meant. After
    ``shutdown()`` it may be called again, on every rank.

    Args:
        comm: the ranks that form the world: a communicator of mpi4py, or a list of ranks of the
            launcher's world, which all of them call with the same list; None: all ranks.
        process_sets: groups of ranks to register, the same on every rank; those made of communicators of
            mpi4py may be another one on each. ``"dynamic"``, Horovod's, means none for now.
        reproducible: whether sums must not depend on how ranks are spread over hosts either; None: as
            ``POLYHVD_REPRODUCIBLE`` says.

    Raises:
        ConfigError: an environment variable cannot be used, or MPI, which is needed, cannot; or another
            launcher has started this process, and its job cannot be joined.
        InvalidArgumentError: a process set names a rank that does not exist, or the ranks of another one, or
            ``comm`` cannot be used.
        OSError: the file that TIMELINE names cannot be written.
        PeerLostError: some ranks did not come within ``START_TIMEOUT`` seconds; they are named.
    """
    global _mpi_job
    if isinstance(comm, (list, tuple)) and comm and all(isinstance(item, ProcessSet) for item in comm):
        comm, process_sets = None, comm
    listed = [] if process_sets == "dynamic" else list(process_sets or ())
    sets = [item for item in listed if isinstance(item, ProcessSet)]
    if len(sets) < len(listed):
        raise InvalidArgumentError(f"init(process_sets={process_sets!r}): expected a list of ProcessSet")
    with _lock:
        if _engine is not None:
            return
        settings = Config.from_environment()
        if reproducible is not None:
            settings = replace(settings, reproducible=bool(reproducible))
        log.configure(settings)
        if _mpi_job is not None:
            _mpi_job.close()  # of an init() that failed: the others had to hear of it
        _mpi_job = job = _join_mpi(settings, comm)
        if comm is None:
            _refuse_to_be_alone(settings if job is None else job.settings, met_by_mpi=job is not None)
        _start(settings if job is None else job.settings, sets, job)


def _refuse_to_be_alone(settings: Config, *, met_by_mpi: bool) -> None:
    """Raise ConfigError in a world of one whose process another launcher has started as one of several."""
    if settings.size > 1 or settings.rendezvous or settings.alone:
        return
    foreign = foreign_launch(met_by_mpi=met_by_mpi)
    if foreign is None:
        return
    said = f"init(): {foreign}"
    if not foreign.certain:
        _LOG.warning("%s; it goes on as a world of one. If there are others, %s", said, foreign.cure)
        return
    raise ConfigError(
        f"{said}, and polyhvd cannot join the others: it would train alone. Instead, {foreign.cure}. "
        "For a world of one rank on purpose set POLYHVD_ALONE=1"
    )


def _join_mpi(settings: Config, comm: object) -> mpi.MpiJob | None:
    """Meet the other ranks through MPI, where that is the way."""
    global _mpi, _members
    ranks = None if comm is None or mpi.is_communicator(comm) else mpi.checked_ranks(comm)
    if not mpi.is_asked_for(settings, comm):
        if ranks is not None:
            raise InvalidArgumentError(
                f"init(comm={comm!r}): a list of ranks needs a job that MPI has started; use a ProcessSet"
            )
        return None
    if _mpi is None:
        _mpi = mpi.open_library(settings)
    mpi.start(_mpi, settings)
    job = mpi.MpiJob.join(_mpi, settings, comm if ranks is None else None, ranks)
    _members = (comm, ranks)
    log.configure(job.settings)
    return job


def _settle(job: mpi.MpiJob | None, sets: list[ProcessSet]) -> tuple[list[list[int]], list[int]]:
    """The ranks of all process sets that there will be, and for each of ``sets`` its number."""
    named: list[list[list[int]]] = [[] for _ in sets]
    mine = [None if item.members is None else ranks_by_mpi(item.members) for item in sets]
    if job is not None:
        named = job.resolve(mine)
    for item, ranks in zip(sets, mine, strict=True):
        item.ranks = item.ranks if ranks is None else ranks
    lists: list[list[int]] = []
    numbers = []
    for item, choices in zip(sets, named, strict=True):
        ranks = item.ranks or next(iter(choices), None)  # another's, where this rank is no member
        if not ranks:
            raise InvalidArgumentError(f"{item} has no members")
        item.ranks = ranks
        choices = choices if ranks in choices else [ranks]
        numbers.append(1 + len(lists) + choices.index(ranks))
        lists += choices
    return lists, numbers


def _check_distinct(lists: list[list[int]]) -> None:
    """Raise for ranks that are named as two process sets: the second one could not be told from the first."""
    twice = [ranks for i, ranks in enumerate(lists) if ranks in lists[:i]]
    if twice:
        raise InvalidArgumentError(
            f"init(process_sets=[...]): ranks {twice[0]} are given as two process sets; use one for both"
        )


def _start(settings: Config, sets: list[ProcessSet], job: mpi.MpiJob | None) -> None:
    """Connect to the other ranks and run an engine."""
    global _engine, _attendant, _config, _generation, _homogeneous
    if settings.rank == 0 and _generation == 0:
        log.report_unknown()
    for item in sets:
        bad = [r for r in item.ranks or [] if not 0 <= r < settings.size]
        if item is global_process_set or bad:
            raise InvalidArgumentError(f"{item}: ranks are 0 to {settings.size - 1}; found {bad or 'all'}")
    lists, numbers = _settle(job, sets)
    _check_distinct(lists)
    _generation += 1
    # A job of MPI has a rendezvous of its own each time, where nobody has met before.
    wiring = bootstrap.connect(settings, _generation if job is None else 1, lists)
    if job is not None and settings.moves_by_mpi:
        wiring.mpi = job.session
    if settings.may_use_nccl:
        wiring.nccl_libraries = gpu.nccl_libraries(settings)
        wiring.shares_gpus = shares_gpus()
        wiring.hierarchical = settings.hierarchical_allreduce
    attendant = Attendant()
    try:
        starting = _core.Engine(wiring, settings, _generation, attendant.mailbox)
    except BaseException:
        attendant.close()
        raise
    try:
        tracing.begin(starting, settings, wiring.hosts)
        if settings.steps_per_sample > 0:
            attendant.on_sample = Autotuner(settings, wiring.hosts, starting.tune).observe
    except BaseException:
        starting.shutdown()
        attendant.close()
        raise
    _engine, _config, _attendant = starting, settings, attendant
    _homogeneous = len(set(Counter(wiring.hosts).values())) == 1
    for number, item in zip(numbers, sets, strict=True):
        item.process_set_id = number
    _registered[:] = sets
    for listener in _listeners:
        listener(_engine.native_api())


def shutdown() -> None:
    """Leave the job in good order. Operations that are pending fail; ``init()`` may follow."""
    global _engine, _attendant, _config, _mpi_job, _members
    with _lock:
        if _engine is None:
            return
        for leaver in _leavers:
            leaver()
        leaving, _engine, _config = _engine, None, None
        leaving.shutdown()
        if _attendant is not None:
            _attendant.close()
            _attendant = None
        if _mpi_job is not None:
            _mpi_job.close()
        _mpi_job, _members = None, (None, None)
        for listener in _listeners:
            listener(0)
        for item in _registered:
            item.process_set_id = None
        _registered.clear()


def mpi_runtime() -> _core.MpiRuntime | None:
    """MPI in this process, if a job of it has been joined through MPI."""
    return _mpi if _engine is not None and _mpi_job is not None else None


def ranks_by_mpi(members: object) -> list[int]:
    """World ranks of a communicator, or group, of mpi4py."""
    if _mpi_job is None:
        raise InvalidArgumentError(
            f"{members!r}: the ranks of this job have not met through MPI, so it says nothing about them"
        )
    return mpi.ranks_of(members, *_members)


def _end_process() -> None:
    """Leave, and finalise MPI if that is ours to do; not after an error, when the others may be elsewhere."""
    _core.begin_end_of_program()
    shutdown()
    if _mpi is not None and not hasattr(sys, "last_value"):
        _mpi.finish()


def register(process_set: ProcessSet, number: int) -> None:
    """Remember a process set that was added, until it is removed or the engine ends."""
    with _lock:
        process_set.process_set_id = number
        _registered.append(process_set)


def unregister(process_set: ProcessSet) -> None:
    """Forget a process set that was removed."""
    with _lock:
        process_set.process_set_id = None
        _registered[:] = [item for item in _registered if item is not process_set]


def registered_as(number: int) -> ProcessSet:
    """The engine's process set of this number; registered now if this rank has not heard of it."""
    if number == 0:
        return global_process_set
    with _lock:
        for item in _registered:
            if item.process_set_id == number:
                return item
        found = ProcessSet(engine().process_sets()[number])
        register(found, number)
        return found


def registered() -> dict[int, list[int]]:
    """Ranks of every process set, by its number."""
    with _lock:
        sets = {item.process_set_id: list(item.ranks or ()) for item in _registered}
        return {0: list(range(config().size)), **{k: v for k, v in sets.items() if k is not None}}


def is_initialized() -> bool:
    """Whether ``init()`` has been called, and ``shutdown()`` not since."""
    return _engine is not None


def on_engine_change(listener: Callable[[int], None]) -> None:
    """Call ``listener`` with the address of each new engine's C table, and with 0 after its end."""
    with _lock:
        _listeners.append(listener)
        if _engine is not None:
            listener(_engine.native_api())


def on_shutdown(leaver: Callable[[], None]) -> None:
    """Call ``leaver`` before an engine ends, to let what a framework still holds reach it."""
    _leavers.append(leaver)


def _forget_in_child() -> None:
    """A forked process (a DataLoader's worker) is not a rank: close what it has inherited."""
    global _engine, _attendant, _config, _lock, _mpi, _mpi_job
    _lock = threading.RLock()
    if _mpi is not None:
        _mpi.give_up()
    if _engine is not None:
        _engine.abandon()
        _abandoned.append(_engine)
    _engine = _attendant = _config = _mpi = _mpi_job = None


atexit.register(_end_process)
os.register_at_fork(after_in_child=_forget_in_child)
