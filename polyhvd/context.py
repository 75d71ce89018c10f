"""The engine of this process: the only global of the project."""

from __future__ import annotations

import atexit
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from polyhvd import _core, bootstrap, log, tracing
from polyhvd.attendant import Attendant
from polyhvd.autotune import Autotuner
from polyhvd.config import Config
from polyhvd.errors import InvalidArgumentError, NotInitializedError
from polyhvd.process_sets import ProcessSet

__all__ = [
    "config",
    "engine",
    "init",
    "is_homogeneous",
    "is_initialized",
    "on_engine_change",
    "register",
    "registered",
    "shutdown",
    "unregister",
]

_lock = threading.RLock()
_engine: _core.Engine | None = None
_attendant: Attendant | None = None
_config: Config | None = None
_generation = 0  # of engines of this process; equal on all ranks, as init() is called on all
_homogeneous = True
_registered: list[ProcessSet] = []
_listeners: list[Callable[[int], None]] = []
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
    process_sets: Sequence[ProcessSet] | None = None,
    *,
    reproducible: bool | None = None,
) -> None:
    """Connect this process to the other ranks of the job; does nothing when that is done already.

    Without a launcher this is a world of one rank. After ``shutdown()`` it may be called again,
    on every rank.

    Args:
        comm: reserved for communicators of mpi4py; None.
        process_sets: groups of ranks to register, the same on every rank.
        reproducible: whether sums must not depend on how ranks are spread over hosts either; None: as
            ``POLYHVD_REPRODUCIBLE`` says.

    Raises:
        ConfigError: an environment variable cannot be used.
        InvalidArgumentError: a process set names a rank that does not exist.
        OSError: the file that TIMELINE names cannot be written.
        PeerLostError: some ranks did not come within ``START_TIMEOUT`` seconds; they are named.
    """
    global _engine, _attendant, _config, _generation, _homogeneous
    if isinstance(comm, (list, tuple)) and all(isinstance(item, ProcessSet) for item in comm):
        comm, process_sets = None, comm
    if comm is not None:
        raise InvalidArgumentError(
            f"init(comm={comm!r}): only the world of the launcher is supported; call init() without comm"
        )
    with _lock:
        if _engine is not None:
            return
        settings = Config.from_environment()
        if reproducible is not None:
            settings = replace(settings, reproducible=bool(reproducible))
        log.configure(settings)
        if settings.rank == 0 and _generation == 0:
            log.report_unknown()
        sets = list(process_sets or [])
        for item in sets:
            bad = [r for r in item.ranks or [] if not 0 <= r < settings.size]
            if item.ranks is None or bad:
                raise InvalidArgumentError(
                    f"{item}: ranks are 0 to {settings.size - 1}; found {bad or 'all'}"
                )
        _generation += 1
        wiring = bootstrap.connect(settings, _generation, [item.ranks or [] for item in sets])
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
        for number, item in enumerate(sets, start=1):
            item.process_set_id = number
        _registered[:] = sets
        for listener in _listeners:
            listener(_engine.native_api())


def shutdown() -> None:
    """Leave the job in good order. Operations that are pending fail; ``init()`` may follow."""
    global _engine, _attendant, _config
    with _lock:
        if _engine is None:
            return
        leaving, _engine, _config = _engine, None, None
        leaving.shutdown()
        if _attendant is not None:
            _attendant.close()
            _attendant = None
        for listener in _listeners:
            listener(0)
        for item in _registered:
            item.process_set_id = None
        _registered.clear()


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


def _forget_in_child() -> None:
    """A forked process (a DataLoader's worker) is not a rank: close what it has inherited."""
    global _engine, _attendant, _config, _lock
    _lock = threading.RLock()
    if _engine is not None:
        _engine.abandon()
        _abandoned.append(_engine)
    _engine = _attendant = _config = None


atexit.register(shutdown)
os.register_at_fork(after_in_child=_forget_in_child)
