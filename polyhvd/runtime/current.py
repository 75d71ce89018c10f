"""The world that the verbs of the frameworks use: that of the process, if it is in one.

It is the only world that a module keeps. Everything else is handed its :class:`World`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from polyhvd.errors import NotInitializedError, PeerLostError

if TYPE_CHECKING:
    from polyhvd import _core
    from polyhvd.runtime.placement import Placement
    from polyhvd.runtime.world import World

__all__ = [
    "child_of",
    "enter",
    "find",
    "forget_in_child",
    "inherit",
    "leave",
    "lock",
    "of_generation",
    "on_change",
    "on_leave",
    "on_wait",
    "placement",
    "prepare",
    "world",
]

#: Held while the current world changes, by init() and shutdown() as a whole. Outermost of all locks.
lock = threading.RLock()
_world: World | None = None  # written under `lock`; reads are of one reference, and need none
_listeners: list[Callable[[_core.Engine | None], None]] = []  # under `lock`
_leavers: list[Callable[[World], None]] = []  # likewise
_preparers: list[Callable[[], None]] = []  # likewise
#: In a child of a rank that is not a rank itself: the rank's place and process.
_parent: tuple[Placement, int] | None = None


def world() -> World:
    """The current world.

    Raises:
        NotInitializedError: there is none: before ``init()``, after ``shutdown()``, in a rank's forked child.
    """
    found = _world
    if found is not None:
        return found
    child = child_of()
    raise NotInitializedError(f"{child}: only the rank can communicate") if child else NotInitializedError()


def placement() -> Placement:
    """This process's place in the current world; in a forked child of a rank that of the rank at the fork.

    Raises:
        NotInitializedError: there is no world, and was none at the fork.
    """
    found = _world
    if found is not None:
        return found.placement
    return world().placement if _parent is None else _parent[0]


def child_of() -> str:
    """Which rank this process is a forked child of, as errors begin; empty if it is none."""
    if _parent is None or _world is not None:
        return ""
    place, process = _parent
    return f"this is a forked child of rank {place.rank} (process {process})"


def find() -> World | None:
    """The current world, or None."""
    return _world


def of_generation(generation: int, about: str) -> World:
    """The current world, for what was begun in a generation of it.

    Args:
        generation: that of the world in which it was begun.
        about: what was begun, for messages: "the gradient of allreduce 'x'".

    Raises:
        PeerLostError: that world has ended, whatever has followed it.
    """
    found = _world
    if found is not None and found.placement.generation == generation:
        return found
    now = "there is none now" if found is None else f"this is generation {found.placement.generation}"
    raise PeerLostError(
        f"{about} belongs to generation {generation} of the world, which has ended; {now}. Repeat the step"
    )


def enter(entered: World) -> None:
    """Make a world the current one; ``lock`` is held, and there is none.

    Raises:
        HorovodVersionMismatchError: the native library of an adapter cannot work with this core. The
            world is closed then.
    """
    global _world
    _world = entered
    try:
        for listener in _listeners:
            listener(entered.engine)
    except BaseException:
        leave()
        raise


def leave(words: str = "") -> None:
    """Close the current world, if there is one; ``lock`` is held. ``words``: see :meth:`World.close`."""
    global _world
    if _world is None:
        return
    for leaver in _leavers:
        leaver(_world)
    closing, _world = _world, None
    closing.close(words)
    for listener in _listeners:
        listener(None)


def on_change(listener: Callable[[_core.Engine | None], None]) -> None:
    """Call ``listener`` with the engine of each new current world, and with None after its end."""
    with lock:
        _listeners.append(listener)
        if _world is not None:
            listener(_world.engine)


def on_leave(leaver: Callable[[World], None]) -> None:
    """Call ``leaver`` before the current world ends, to let what a framework still holds reach it."""
    with lock:
        _leavers.append(leaver)


def on_wait(preparer: Callable[[], None]) -> None:
    """Call ``preparer`` once in a process that waits for a place in a world of others.

    It does work that the program will need in any case, so that the other ranks, which wait for this process
    once it has its place, do not wait for that work.
    """
    with lock:
        _preparers.append(preparer)


def prepare() -> None:
    """Call what :func:`on_wait` was given; ``lock`` is held. What fails is for the program to run into."""
    while _preparers:
        with contextlib.suppress(Exception):
            _preparers.pop(0)()


def forget_in_child() -> None:
    """In a forked process, which is not a rank: there is no world. The caller keeps the parent's alive."""
    global _world, _parent, lock
    lock = threading.RLock()
    if _world is not None:
        _parent = (_world.placement, os.getppid())
    _world = None


def inherit(place: Placement | None) -> None:
    """Have :func:`placement` return that of a rank, in a process that the rank has started to work for it.

    Args:
        place: the rank's; None: it is in no world.
    """
    global _parent
    _parent = None if place is None else (place, os.getppid())
