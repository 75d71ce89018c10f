"""Leaving an elastic job with notice: what SIGTERM means to a member, and what it does before it goes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from polyhvd.elastic.places import LEAVES
from polyhvd.elastic.watch import Watch

__all__ = ["Leave", "heed", "leaving_with", "on_leave", "take_leave"]

#: What comes again sooner is the same signal, sent by two who end the job.
_REPEAT_S = 1.0


@dataclass(frozen=True)
class Leave:
    """That this process leaves its job, between two steps."""

    #: Of this process in the world that it has left, not counting ranks that were lost. If no rank stays,
    #: ranks with the newest commit come first, so that rank 0 has the newest one.
    rank: int
    size: int  #: of that world, not counting ranks that were lost
    everyone: bool  #: whether no rank of it stays, so that what is not saved now is lost


_callbacks: list[Callable[[Leave], object]] = []
_told_at: float | None = None


def on_leave(callback: Callable[[Leave], object]) -> Callable[[Leave], object]:
    """Have a function called when this process leaves its elastic job with notice, before it ends.

    A process is given notice by SIGTERM, to it, its host's agent or the whole job, or by ``polyhvd leave``.
    It goes on until the next ``commit()`` or ``check_host_updates()``, where all ranks leave the world at the
    same step; this one is then called back, and ends with status 0. No collective can be called any more.
    Where all ranks were told, that is the time to write a checkpoint, as long as ``--term-grace-s`` allows.

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
    """Within, :func:`on_leave` holds for this function, too."""
    _callbacks.append(callback)
    try:
        yield
    finally:
        _callbacks.remove(callback)


def take_leave(leave: Leave) -> None:
    """Call what :func:`on_leave` was given; raises the first error when all have been called."""
    first_error: Exception | None = None
    for callback in list(_callbacks):
        try:
            callback(leave)
        except Exception as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error from None


def heed(watch: Watch) -> None:
    """Have SIGTERM mean that this process is to leave, unless the program has its own way with it."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return

    def told(*_: object) -> None:
        global _told_at
        now = time.monotonic()
        if _told_at is None:
            _told_at = now
            watch.tell(LEAVES, b"")  # where the launcher is gone the next operation ends the process
        elif now > _told_at + _REPEAT_S:
            _die_of_it()

    signal.signal(signal.SIGTERM, told)
    # A child is no member: SIGTERM ends it, as it ends those of data loaders, also if it comes at once.
    os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=lambda: _forget(told))


def _die_of_it() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


_masks = threading.local()


def _hold() -> None:
    _masks.former = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


def _let_go() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.former)


def _forget(handler: Callable[..., None]) -> None:
    with contextlib.suppress(ValueError):
        if signal.getsignal(signal.SIGTERM) is handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _let_go()
