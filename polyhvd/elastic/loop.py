"""``run``: calls a training function again in the next world when the present one fails or changes."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from polyhvd.elastic import process
from polyhvd.elastic.limits import FINISHED
from polyhvd.elastic.state import State
from polyhvd.errors import HorovodInternalError, HostsUpdatedInterrupt, RankMismatchError
from polyhvd.runtime import current
from polyhvd.training.passes import drop_passes

__all__ = ["looped", "run", "run_fn"]

_LOG = logging.getLogger("polyhvd")
_within = threading.local()  # depth: how many such functions this thread is in
_numbers = itertools.count(1)  # of the calls of outermost ones in this process

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound=State)


def run(func: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Make a training function survive the loss of ranks, and let others join.

    The state is sent to all ranks, then the function is called. If a collective fails because a rank is lost,
    the state is restored from its last commit, while this process keeps running with all that it has in
    memory. Then the function is called again with the remaining and new ranks. If processes are waiting to
    join, the function is interrupted in a commit, and nothing is undone. Other exceptions of the function,
    and RankMismatchError, which would only recur, are raised to the caller.

    If one such function calls another, the world changes only in the outermost, which new ranks call as well:
    the inner state is restored from its last commit, and the error or interrupt is raised to the outer one.

    A program may call several such functions one after the other. If a process joins while the others are in
    a later one, its earlier calls return None at once.

    Jobs are elastic with ``polyhvdrun --min-np``. In others the first failure is raised to the caller.

    Args:
        func: takes the state first, then whatever the caller gives.

    Raises:
        HorovodInternalError: a rank was lost, and the job is not elastic.

    Example::

        @hvd.elastic.run
        def train(state):
            for state.epoch in range(state.epoch, 10):
                train_one_epoch()
                state.commit()

        train(state)
    """
    return looped(func)


def run_fn(func: Callable[Concatenate[S, P], T], reset: Callable[[], Any]) -> Callable[Concatenate[S, P], T]:
    """Wrap a function like :func:`run`, with your own function to enter the next world.

    Args:
        func: takes the state first.
        reset: enters the next world.

    Example::

        train = hvd.elastic.run_fn(train, reset)
    """

    return looped(func, reset)


def looped(
    func: Callable[Concatenate[S, P], T],
    reset: Callable[[], Any] | None = None,
    translate: Callable[[BaseException], BaseException] = lambda error: error,
) -> Callable[Concatenate[S, P], T]:
    """The result of :func:`run` and :func:`run_fn`.

    Args:
        func: takes the state first.
        reset: enters the next world; None: as ``init()`` has entered the first.
        translate: which of polyhvd's errors one of a framework's stands for.
    """

    @functools.wraps(func)
    def wrapper(state: S, *args: P.args, **kwargs: P.kwargs) -> T:
        depth = getattr(_within, "depth", 0)
        _within.depth = depth + 1
        try:
            return (inner if depth else outermost)(state, *args, **kwargs)
        finally:
            _within.depth = depth

    def inner(state: S, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            state.sync()
            state._is_commit = False
            return func(state, *args, **kwargs)
        except Exception as raised:
            error = translate(raised)
            if isinstance(error, HorovodInternalError) and not isinstance(error, RankMismatchError):
                state.restore()
            raise

    def outermost(state: S, *args: P.args, **kwargs: P.kwargs) -> T:
        must_reset = skip_sync = False
        number = next(_numbers)
        if (member := process.find()) is not None:
            if member.is_behind:
                state._end_background()  # or it would meet the others' operations
            member.begin_call(number)
        while True:
            try:
                if must_reset:
                    if (member := process.find()) is not None:
                        member.commits = state._commits
                    with state.waiting():
                        (reset or _rejoin)()
                    drop_passes()  # those of a commit between two updates, which new ranks do not have
                    state.on_reset()
                must_reset = False
                if not skip_sync:
                    if _is_skipped(number):
                        return cast(T, None)
                    state.sync()
                skip_sync = state._is_commit = False
                state._boundary = None
                result = func(state, *args, **kwargs)
                _end_together()
                return result
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            except Exception as raised:
                error = translate(raised)
                is_mine = not isinstance(error, HorovodInternalError) or isinstance(error, RankMismatchError)
                if is_mine or _has_left():  # then it is of a function of on_leave()
                    raise
                if reset is None and _member() is None:
                    _LOG.error(
                        "elastic: this job is not elastic, so that it ends with the loss of a rank; start it "
                        "with polyhvdrun --min-np N"
                    )
                    raise
                _LOG.info("elastic: %s", error)
                if (member := process.find()) is not None:
                    member.fail(str(error))
                if not must_reset:  # else the state is restored already
                    _leave()
                    drop_passes()
                    state.restore()
                    state._boundary = None
                skip_sync = False
                del error  # its traceback keeps the function's objects alive
            must_reset = True

    return cast(Callable[Concatenate[S, P], T], wrapper)


def _member() -> process.Process | None:
    """This process as a member of an elastic job that has been in a world; else None."""
    member = process.find()
    return member if member is not None and member.worlds else None


def _has_left() -> bool:
    """Return whether the launcher has dismissed this process, which gets no further place."""
    member = _member()
    return member is not None and member.launcher.reply.generation == 0


def _is_skipped(number: int) -> bool:
    """Return whether the other ranks are in a later call; otherwise all ranks are in this one."""
    member = process.find()
    if member is None or not member.is_behind:
        return False
    newest = member.launcher.reply.call
    _LOG.warning(
        "elastic: other ranks are in call %d of elastic functions: call %d is skipped; what it has "
        "made counts as far as the state of call %d keeps it",
        *(newest, number, newest),
    )
    return True


def _end_together() -> None:
    """Wait for all ranks: one that ended its program would fail operations of the others in this call."""
    if (member := process.find()) is not None:
        with suppress(HorovodInternalError):  # this rank is done, even if another one is lost meanwhile
            member.meet("elastic.end")
        member.report(FINISHED)


def _leave() -> None:
    """Leave the world, which fails pending operations: none may write to the restored state."""
    with current.lock:
        if (member := process.find()) is not None:
            member.leave()


def _rejoin() -> None:
    member = _member()
    if member is None:
        raise HorovodInternalError("elastic: the world cannot change: this job is not elastic")
    member.rejoin()
