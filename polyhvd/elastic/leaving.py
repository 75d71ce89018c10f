"""Leaving an elastic job with notice: how a member handles SIGTERM, and what it does before it leaves."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from polyhvd.elastic.places import LEAVE_NOTICES
from polyhvd.elastic.watch import LauncherWatch

__all__ = ["Leave", "handle_sigterm", "leaving_with", "on_leave", "run_callbacks"]

#: A second SIGTERM within this time is ignored: the launcher and the scheduler may both have sent one.
_REPEAT_S = 1.0


@dataclass(frozen=True)
class Leave:
    """This process leaves its job, between two steps."""

    #: Of this process in the world that it has left, not counting ranks that were lost. If no rank stays,
    #: ranks with the newest commit come first, so that rank 0 has the newest one.
    rank: int
    size: int  #: of that world, not counting ranks that were lost
    everyone: bool  #: whether no rank of it stays, so that what is not saved now is lost


_callbacks: list[Callable[[Leave], object]] = []
_noticed_at: float | None = None


def on_leave(callback: Callable[[Leave], object]) -> Callable[[Leave], object]:
    """Have a function called when this process leaves its elastic job with notice, before it ends.

    A process is given notice by SIGTERM, to it, its host's agent or the whole job, or by ``polyhvd leave``.
    It continues until the next ``commit()`` or ``check_host_updates()``, where all ranks leave the world at
    the same step. The callback then runs, and the process ends with status 0. The callback cannot call
    collectives. If all ranks leave, write a checkpoint then, within ``--term-grace-s``.

    Args:
        callback: takes a value with ``rank`` and ``size`` in the world that was left, in which ranks that
            were lost do not count, so that one is always 0, and ``everyone``, which is False when other ranks
            go on with the state. If ``everyone`` is True, rank 0 has the newest commit. Called in the order
            of registration.

    Returns:
        The function, so that this serves as a decorator.

    Example::

        @hvd.elastic.on_leave
        def save(leave):
            if leave.everyone and leave.rank == 0:
                print("the last to have the state: time to write it to a disk")
    """
    _callbacks.append(callback)
    return callback


@contextlib.contextmanager
def leaving_with(callback: Callable[[Leave], object]) -> Iterator[None]:
    """Call a function before those of :func:`on_leave`, which may take longer than the grace."""
    _callbacks.insert(0, callback)
    try:
        yield
    finally:
        _callbacks.remove(callback)


def run_callbacks(leave: Leave) -> None:
    """Call the functions registered by :func:`on_leave`, then raise the first error, if any."""
    first_error: Exception | SystemExit | None = None
    for callback in list(_callbacks):
        try:
            callback(leave)
        except (Exception, SystemExit) as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error from None


def handle_sigterm(watch: LauncherWatch) -> None:
    """Make this process leave its job on SIGTERM, unless the program has its own handler."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return

    def on_sigterm(*_: object) -> None:
        global _noticed_at
        now = time.monotonic()
        if _noticed_at is None:
            _noticed_at = now
            watch.send(LEAVE_NOTICES, b"")  # if the launcher is gone, the next operation fails
        elif now > _noticed_at + _REPEAT_S:
            _die_of_it()

    signal.signal(signal.SIGTERM, on_sigterm)
    # SIGTERM ends a forked child, such as a data loader's worker, even directly after the fork.
    os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=lambda: _forget(on_sigterm))


def _die_of_it() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


_masks = threading.local()


def _block() -> None:
    _masks.former = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.former)


def _forget(handler: Callable[..., None]) -> None:
    with contextlib.suppress(ValueError):
        if signal.getsignal(signal.SIGTERM) is handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _unblock()
