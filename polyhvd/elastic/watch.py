"""A thread that receives messages from the launcher of an elastic job while the program is busy.

It has a separate connection, since the program's threads use the one for place requests.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
import weakref
from collections import deque

from polyhvd.elastic.pace import SlowRank
from polyhvd.elastic.places import LauncherConnection, lost_scope, slow_scope
from polyhvd.rendezvous import network
from polyhvd.rendezvous.client import ConnectedStore
from polyhvd.rendezvous.store import StoreError
from polyhvd.runtime.world import World

__all__ = ["LauncherWatch"]

#: Of one request to the store: longer than any world lives.
_WAIT_S = 1e9
_LOG = logging.getLogger("polyhvd")
_NO_REQUEST = -1  # which no request has as its number
_SLOW_REQUESTS_MAX = 8
_MOMENT_S = 1.0


class LauncherWatch:
    """See the module. The world fails when the launcher reports a lost member, even if no rank has noticed.

    It also fails when the launcher is gone, since no next world can be formed. Its processes end.

    A forked child has none.

    Args:
        store: a connection that this object now owns.
        launcher: of this process, with a separate connection. The launcher is gone when both have lost it.
        silence_s: the launcher is given up after so many seconds of silence.
    """

    def __init__(self, store: ConnectedStore, launcher: LauncherConnection, silence_s: float = 0.0) -> None:
        self._store = store
        self._launcher, self._silence_s = launcher, silence_s
        self._member = launcher.member
        self._wake, self._alarm = os.pipe()
        os.set_blocking(self._alarm, False)
        os.set_blocking(self._wake, False)
        #: Work for the thread. Appending and popping are atomic, so signal handlers may append.
        self._worlds: deque[weakref.ref[World]] = deque()
        self._outbox: deque[tuple[str, bytes, bool]] = deque()
        self._requests: dict[int, weakref.ref[World]] = {}  # for lost members of that world
        #: The generation of a world and its slow ranks. Other threads read the one reference.
        self.slow: tuple[int, tuple[SlowRank, ...]] = (0, ())
        #: Requests for slow ranks. The last one is for the world that is followed. Replies to earlier ones
        #: may still arrive and have to be taken.
        self._slow_requests: deque[int] = deque()
        self._slow_number = 0
        #: Why the launcher counts as gone; empty: it does not. Written once, before the world fails.
        self.fault = ""
        self._world: weakref.ref[World] | None = None  # the last that is followed
        self._thread = threading.Thread(target=self._run, name="polyhvd-watch", daemon=True)
        _watches.add(self)
        self._thread.start()

    def follow(self, world: World) -> None:
        """Watch this world from now on, without keeping it alive."""
        self._worlds.append(weakref.ref(world))
        self._ring()

    def send(self, scope: str, value: bytes, *, again: bool = False) -> None:
        """Send a value to the launcher. Never waits; may be called from any thread and from signal handlers.

        Args:
            scope: of the store.
            value: what to send.
            again: whether the launcher receives every value sent in this scope, and not only the first.
        """
        self._outbox.append((scope, value, again))
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._alarm, b"+")

    def _run(self) -> None:
        try:
            while True:
                network.await_ready([self._store.fileno(), self._wake], None)
                self._turn()
        except (StoreError, OSError, ValueError) as error:
            self._store.close()
            if not self._is_launcher_gone():
                _LOG.warning("elastic: no more messages from polyhvdrun reach this process: %s", error)
                return
            self.fault = str(error)
            self._launcher.hang_up()
            if (world := self._present()) is not None:
                world.engine.abort(str(error))

    def _turn(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)
        while self._outbox:
            scope, value, again = self._outbox.popleft()
            self._store.put(scope, self._member, value)
            if again:
                self._store.forget(scope, self._member)
        while self._worlds:
            follower = self._worlds.popleft()
            for request in [number for number, ref in self._requests.items() if ref() is None]:
                del self._requests[request]
                self._store.abandon(request)
            if (world := follower()) is not None:
                request = self._store.post_gather(lost_scope(world.placement.generation), 1, _WAIT_S)
                self._requests[request] = follower
                self._world, self._slow_number = follower, 0
                self._request_slow_ranks(world)
        for request in list(self._slow_requests):
            if (values := self._store.take(request)) is not None:
                is_last = request == self._slow_requests[-1]
                self._slow_requests.remove(request)
                if is_last:
                    self._receive_slow_ranks(values[0])
        # Last, since a reply that arrives while another one is taken is not announced again.
        for request, follower in list(self._requests.items()):
            if (values := self._store.take(request)) is not None:
                del self._requests[request]
                if (world := follower()) is not None:
                    world.engine.abort(values[0].decode("utf-8", "replace"))
        if not self._requests and not self._slow_requests:
            # Only reading shows that the launcher closed the connection. Until then select returns at once.
            self._store.take(_NO_REQUEST)

    def _is_launcher_gone(self) -> bool:
        """Return whether the other connection has lost the launcher, too, which may take a moment to show."""
        until = time.monotonic() + _MOMENT_S
        while not (is_silent := self._launcher.is_silent(self._silence_s)) and time.monotonic() < until:
            time.sleep(_MOMENT_S / 20)
        return is_silent

    def _present(self) -> World | None:
        return None if self._world is None else self._world()

    def _request_slow_ranks(self, world: World) -> None:
        self._slow_number += 1
        scope = slow_scope(world.placement.generation, self._slow_number)
        if len(self._slow_requests) == _SLOW_REQUESTS_MAX:
            self._store.abandon(self._slow_requests.popleft())
        self._slow_requests.append(self._store.post_gather(scope, 1, _WAIT_S))

    def _receive_slow_ranks(self, data: bytes) -> None:
        if (world := self._present()) is None:
            return
        ranks = tuple(SlowRank(**item) for item in json.loads(data))
        self.slow = (world.placement.generation, ranks)
        world.is_slow = any(item.rank == world.placement.rank for item in ranks)
        world.remark("\n".join(map(str, ranks)))
        self._request_slow_ranks(world)

    def _forget(self) -> None:
        self._store.close()
        os.close(self._wake)
        os.close(self._alarm)


_watches: weakref.WeakSet[LauncherWatch] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked process is not a member and must not keep its parent's connection open."""
    for watch in list(_watches):
        watch._forget()
    _watches.clear()


os.register_at_fork(after_in_child=_forget_in_child)
