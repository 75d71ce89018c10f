"""The values of a job on the side that serves them, and the requests that wait for them.

Pure: no socket, thread or clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from polyhvd.rendezvous.signed_stream import Header

__all__ = ["Values", "Waiter"]

Peer = TypeVar("Peer")


@dataclass(eq=False)
class Waiter(Generic[Peer]):
    """A request that waits: the peer as the server knows it, and the request's number."""

    peer: Peer
    request: int
    deadline: float


@dataclass(eq=False)
class _Gather(Generic[Peer]):
    missing: set[int]
    waiters: list[Waiter[Peer]] = field(default_factory=list)


class Values(Generic[Peer]):
    """The values under (scope, index), and the waiters for them."""

    def __init__(self) -> None:
        self.scopes: dict[str, dict[int, bytes]] = {}
        self._writers: dict[tuple[str, int], int] = {}
        self._gathers: dict[str, dict[int, _Gather[Peer]]] = {}  # scope -> count -> waiters

    def put(
        self, scope: str, index: int, value: bytes, rank: int
    ) -> list[tuple[list[Waiter[Peer]], bytes, Header]]:
        """Keep a value unless there is one; returns the waiters to answer, and their answers."""
        values = self.scopes.setdefault(scope, {})
        if index in values:
            return []
        values[index] = value
        self._writers[scope, index] = rank
        complete = []
        for count, gather in list(self._gathers.get(scope, {}).items()):
            gather.missing.discard(index)
            if not gather.missing:
                self._forget(scope, count)
                complete.append((gather.waiters, *self.collect(scope, count)))
        return complete

    def collect(self, scope: str, count: int) -> tuple[bytes, Header]:
        """The values 0 .. count-1, one after the other, and their sizes."""
        values = [self.scopes[scope][i] for i in range(count)]
        return b"".join(values), {"sizes": [len(value) for value in values]}

    def forget(self, scope: str, index: int, rank: int) -> None:
        """Remove a value if this rank wrote it."""
        if self._writers.get((scope, index)) == rank:
            self.remove(scope, index)

    def missing(self, scope: str, count: int) -> set[int]:
        """Indices below ``count`` that have no value yet."""
        return set(range(count)) - self.scopes.get(scope, {}).keys()

    def wait(self, scope: str, count: int, waiter: Waiter[Peer]) -> None:
        """Have the waiter answered by the :meth:`put` that completes the scope."""
        gathers = self._gathers.setdefault(scope, {})
        gathers.setdefault(count, _Gather(self.missing(scope, count))).waiters.append(waiter)

    def remove(self, scope: str, index: int) -> None:
        """Forget a value. Requests that wait for it, and for more, still wait."""
        del self.scopes[scope][index], self._writers[scope, index]
        if not self.scopes[scope]:
            del self.scopes[scope]
        for count, gather in self._gathers.get(scope, {}).items():
            if 0 <= index < count:
                gather.missing.add(index)

    def drop(self, prefix: str, *, waiters: bool = False) -> None:
        """Forget all values of the scopes that begin so; with ``waiters``, the waiters there, too."""
        for scope in [scope for scope in self._gathers if waiters and scope.startswith(prefix)]:
            del self._gathers[scope]
        for scope in [scope for scope in self.scopes if scope.startswith(prefix)]:
            for index in list(self.scopes[scope]):
                self.remove(scope, index)

    def expired(self, now: float) -> list[tuple[Waiter[Peer], list[int]]]:
        """Remove the waiters whose time is over, each with what it still misses."""
        late = []
        for scope, gathers in list(self._gathers.items()):
            for count, gather in list(gathers.items()):
                missing = sorted(gather.missing)
                late += [(waiter, missing) for waiter in gather.waiters if waiter.deadline <= now]
                self._keep(scope, count, [w for w in gather.waiters if w.deadline > now])
        return late

    def remove_peer(self, peer: Peer) -> None:
        """Forget the waiters of a connection that is gone."""
        for scope, gathers in list(self._gathers.items()):
            for count, gather in list(gathers.items()):
                self._keep(scope, count, [w for w in gather.waiters if w.peer is not peer])

    def next_deadline(self) -> float | None:
        """Return when :meth:`expired` has something to do."""
        waiters = (w for g in self._gathers.values() for gather in g.values() for w in gather.waiters)
        return min((waiter.deadline for waiter in waiters), default=None)

    def _keep(self, scope: str, count: int, waiters: list[Waiter[Peer]]) -> None:
        self._gathers[scope][count].waiters = waiters
        if not waiters:
            self._forget(scope, count)

    def _forget(self, scope: str, count: int) -> None:
        del self._gathers[scope][count]
        if not self._gathers[scope]:
            del self._gathers[scope]
