"""A process's thread that hears from the launcher of its elastic job while the program is busy.

It has a connection of its own: the one by which the process asks for places is used by the program's threads.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import threading
import time
import weakref
from collections import deque

from polyhvd.elastic.pace import SlowRank
from polyhvd.elastic.places import Seat, lost_scope, slow_scope
from polyhvd.rendezvous.client import ConnectedStore
from polyhvd.rendezvous.store import StoreError
from polyhvd.runtime.world import World

__all__ = ["Watch"]

#: Of one request to the store: as long as a world lives.
_WAIT_S = 1e6
_NO_REQUEST = -1  # which no request has as its number
_SLOW_REQUESTS_MAX = 8
_MOMENT_S = 1.0


class Watch:
    """See the module. A world whose member is lost fails, also where nothing of that is seen by itself.

    So does one whose launcher is gone: there is nobody to form the next one. Its processes end.

    A forked child has none.

    Args:
        store: a connection that this object now owns.
        seat: of this process, with a connection of its own. The launcher is gone when both have lost it.
        silence_s: after how long a silent launcher is given up.
    """

    def __init__(self, store: ConnectedStore, seat: Seat, silence_s: float = 0.0) -> None:
        self._store = store
        self._seat, self._silence_s = seat, silence_s
        self._member = seat.member
        self._wake, self._alarm = os.pipe()
        os.set_blocking(self._alarm, False)
        os.set_blocking(self._wake, False)
        #: What to do on the thread; appending and popping are atomic, so that a signal's handler may.
        self._worlds: deque[weakref.ref[World]] = deque()
        self._told: deque[tuple[str, bytes, bool]] = deque()
        self._requests: dict[int, weakref.ref[World]] = {}  # whether somebody in that world is lost
        #: Who is slow in a world, and in which generation; another thread reads the one reference.
        self.slow: tuple[int, tuple[SlowRank, ...]] = (0, ())
        #: Who is slow, the last one in the world that is followed. Answers to others may be on their way, and
        #: are to be taken, too.
        self._slow_requests: deque[int] = deque()
        self._slow_number = 0
        #: Why the launcher counts as gone; empty: it does not. Written once, before the world fails of it.
        self.fault = ""
        self._world: weakref.ref[World] | None = None  # the last that is followed
        self._thread = threading.Thread(target=self._run, name="polyhvd-watch", daemon=True)
        _watches.add(self)
        self._thread.start()

    def follow(self, world: World) -> None:
        """Watch over this world from now on; it is not kept alive."""
        self._worlds.append(weakref.ref(world))
        self._ring()

    def tell(self, scope: str, value: bytes, *, again: bool = False) -> None:
        """Have the launcher told something; from any thread, and from a signal's handler. Never waits.

        With ``again`` it is heard however often something is told in this scope, and else once.
        """
        self._told.append((scope, value, again))
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._alarm, b"+")

    def _run(self) -> None:
        try:
            while True:
                select.select([self._store.fileno(), self._wake], [], [])
                self._turn()
        except (StoreError, OSError, ValueError) as error:
            self._store.close()
            if not self._is_gone():
                return  # and this process does without a watch from now on
            self.fault = str(error)
            self._seat.hang_up()
            if (world := self._present()) is not None:
                world.engine.abort(str(error))

    def _turn(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)
        while self._told:
            scope, value, again = self._told.popleft()
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
                self._ask_who_is_slow(world)
        for request in list(self._slow_requests):
            if (said := self._store.take(request)) is not None:
                is_last = request == self._slow_requests[-1]
                self._slow_requests.remove(request)
                if is_last:
                    self._hear_who_is_slow(said[0])
        # The last, since what comes while another answer is looked for is not announced again.
        for request, follower in list(self._requests.items()):
            if (said := self._store.take(request)) is not None:
                del self._requests[request]
                if (world := follower()) is not None:
                    world.engine.abort(said[0].decode("utf-8", "replace"))
        if not self._requests and not self._slow_requests:
            # Only reading shows that the launcher closed the connection. Until then select returns at once.
            self._store.take(_NO_REQUEST)

    def _is_gone(self) -> bool:
        """Whether the launcher is, whose end may take a moment to be seen on the other connection, too."""
        until = time.monotonic() + _MOMENT_S
        while not (is_silent := self._seat.is_silent(self._silence_s)) and time.monotonic() < until:
            time.sleep(_MOMENT_S / 20)
        return is_silent

    def _present(self) -> World | None:
        return None if self._world is None else self._world()

    def _ask_who_is_slow(self, world: World) -> None:
        self._slow_number += 1
        scope = slow_scope(world.placement.generation, self._slow_number)
        if len(self._slow_requests) == _SLOW_REQUESTS_MAX:
            self._store.abandon(self._slow_requests.popleft())
        self._slow_requests.append(self._store.post_gather(scope, 1, _WAIT_S))

    def _hear_who_is_slow(self, data: bytes) -> None:
        if (world := self._present()) is None:
            return
        ranks = tuple(SlowRank(**item) for item in json.loads(data))
        self.slow = (world.placement.generation, ranks)
        world.remark("\n".join(map(str, ranks)))
        self._ask_who_is_slow(world)

    def _forget(self) -> None:
        self._store.close()
        os.close(self._wake)
        os.close(self._alarm)


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked process is no member, and must not keep the connection of its parent open."""
    for watch in list(_watches):
        watch._forget()
    _watches.clear()


os.register_at_fork(after_in_child=_forget_in_child)
