"""``init()`` and ``shutdown()``: how this process gets into a world, and out of it."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401, whose callback at the end of the main thread is to follow ours
import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace

from polyhvd import _core
from polyhvd.collectives.process_sets import ProcessSet
from polyhvd.config import Settings
from polyhvd.errors import InvalidArgumentError
from polyhvd.launch.entry import enter
from polyhvd.launch.uncaught import (
    has_failed,
    last_words,
    shorten,
    watch_child,
    watch_ends,
    words_of_failure,
    words_of_threads,
)
from polyhvd.runtime import current, mpi

__all__ = ["init", "is_initialized", "leave_after", "shutdown"]


def init(
    comm: object = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
    *,
    reproducible: bool | None = None,
) -> None:
    """Connect this process to the other ranks of the job; does nothing when that is done already.

    Ranks that polyhvdrun, torchrun, srun, MPI's launchers or a cluster's manager has started meet by
    themselves; without a launcher this is a world of one rank, and with ``POLYHVD_ALONE=1``. After
    ``shutdown()`` it may be called again, on every rank.

    Args:
        comm: the ranks that form the world: a communicator of mpi4py, or a list of ranks of the
            launcher's world, which all of them call with the same list; None: all ranks.
        process_sets: groups of ranks to register, the same on every rank; those made of communicators of
            mpi4py may be another one on each. ``"dynamic"``, Horovod's, means none for now.
        reproducible: whether sums must not depend on how ranks are spread over hosts either; None: as
            ``POLYHVD_REPRODUCIBLE`` says.

    Raises:
        ConfigError: an environment variable cannot be used, or MPI, which is needed, cannot; or the variables
            of several launchers contradict each other, or the job of one cannot be joined.
        InvalidArgumentError: a process set names a rank that does not exist, or ``comm`` cannot be used; or
            two process sets have the same ranks, and then the world exists, with the first of them.
        OSError: the file that TIMELINE names cannot be written.
        UnsupportedError: this is a child of a rank, forked or started by it.
        PeerLostError: some ranks did not come within ``START_TIMEOUT`` seconds; they are named.

    One of these that ends the program is printed as one line, ``FILE:LINE: CLASS: MESSAGE`` with the place
    that called; with ``POLYHVD_LOG_LEVEL=debug``, and in ``python -i`` or ``-X dev``, with its traceback.

    Example::

        even = hvd.ProcessSet([0, 2])
        hvd.init(process_sets=[even])
        print(hvd.rank(), hvd.size())
    """
    try:
        _init(comm, process_sets, reproducible)
    except Exception as error:
        shorten(error, init.__code__)
        raise


def _init(comm: object, process_sets: Sequence[ProcessSet] | str | None, reproducible: bool | None) -> None:
    if isinstance(comm, (list, tuple)) and comm and all(isinstance(item, ProcessSet) for item in comm):
        comm, process_sets = None, comm
    listed = [] if process_sets == "dynamic" else list(process_sets or ())
    sets = [item for item in listed if isinstance(item, ProcessSet)]
    if len(sets) < len(listed):
        raise InvalidArgumentError(f"init(process_sets={process_sets!r}): expected a list of ProcessSet")
    with current.lock:
        if current.find() is not None:
            return
        _leave_on_failure()
        _report_signals()
        watch_child(_end_process)
        settings = Settings.from_environment()
        if reproducible is not None:
            settings = replace(settings, reproducible=bool(reproducible))
        if comm is not None and not mpi.is_communicator(comm):
            mpi.checked_ranks(comm)  # may raise
        enter(settings, comm, sets)


def shutdown() -> None:
    """Leave the job in good order. Operations that are pending fail; ``init()`` may follow.

    Example::

        hvd.init()
        train()
        hvd.shutdown()
    """
    _leave(words_of_threads())


def leave_after(error: BaseException) -> None:
    """Leave the job after an exception that has ended this rank's work; errors of other ranks quote it."""
    _leave(words_of_failure(error))


def _leave(words: str = "") -> None:
    with current.lock:
        current.leave(words)
        os.environ.pop("POLYHVD_PARENT", None)  # it is not a rank now, and its children may be


def is_initialized() -> bool:
    """Return whether ``init()`` has been called, and ``shutdown()`` not since.

    Example::

        if not hvd.is_initialized():
            hvd.init()
    """
    return current.find() is not None


@functools.cache
def _leave_on_failure() -> None:
    """Have this rank leave as soon as its main thread has failed.

    Python then waits for the other threads, which may wait for other ranks, before it calls what is
    registered with ``atexit``.
    """

    def leave() -> None:
        if has_failed():
            _leave(last_words())

    watch_ends()
    with contextlib.suppress(RuntimeError):  # the main thread has ended
        getattr(threading, "_register_atexit")(leave)  # noqa: B009, the stubs lack it


@functools.cache
def _report_signals() -> None:
    """Let the agent see which signals this rank has handled, so that it sends none twice, and none too few.

    Only where the program has no such descriptor itself. An event loop that replaces it later may receive a
    signal twice that all processes of the job get.
    """
    descriptor = Settings().signals_descriptor
    if descriptor < 0 or threading.current_thread() is not threading.main_thread():
        return
    former = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    if former != -1:
        signal.set_wakeup_fd(former, warn_on_full_buffer=False)
        return
    os.write(descriptor, b"\0")  # from here on

    def forget() -> None:
        if (former := signal.set_wakeup_fd(-1)) not in (-1, descriptor):
            signal.set_wakeup_fd(former, warn_on_full_buffer=False)

    os.register_at_fork(after_in_child=forget)


def _end_process() -> None:
    """Leave, and finalise MPI if that is ours to do; not after an error, when the others may be elsewhere."""
    _core.begin_end_of_program()
    _leave(last_words())
    if not hasattr(sys, "last_value"):
        mpi.finish()


atexit.register(_end_process)
