"""Where the ranks of a job leave each other word, as an interface.

Values are bytes under (scope, index), written once: the first writer wins. A *gather* waits for indices
0 .. count-1 of a scope. gloo's ``rendezvous/store.h`` has the same idea.
"""

from __future__ import annotations

import abc
import select

__all__ = ["GatherTimeoutError", "Store", "StoreError"]


class StoreError(OSError):
    """The store cannot be reached, has gone away, or does not accept this rank."""


class GatherTimeoutError(StoreError):
    """Not everybody came in time; ``missing`` are the absent indices."""

    def __init__(self, missing: list[int]) -> None:
        super().__init__(f"still missing: {missing}")
        self.missing = missing


class Store(abc.ABC):
    """One rank's way to the values of its job. Not thread-safe.

    ``post_gather`` and ``take`` let an event loop wait for values beside other things; ``gather`` blocks.
    Every method raises StoreError when the store is gone.
    """

    #: The job's secret, by which ranks prove to each other that they belong to it.
    secret: bytes
    #: Tells this job from others on the same machines. No secret.
    job: str
    #: Address of this host as those of the other ranks reach it; empty: not known.
    address: str = ""

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of the store, and remove this rank's *own* values; idempotent."""

    @abc.abstractmethod
    def fileno(self) -> int:
        """A descriptor that is readable when :meth:`take` may have something; -1: ask every ``poll_s``."""

    #: Seconds after which :meth:`take` is worth another call, where there is no descriptor.
    poll_s: float = 0.01

    @abc.abstractmethod
    def put(self, scope: str, index: int, value: bytes, *, own: bool = False) -> None:
        """Write a value, unless there is one already. An *own* one goes when this rank closes the store."""

    @abc.abstractmethod
    def forget(self, scope: str, index: int) -> None:
        """Remove a value that this rank wrote, perhaps as an earlier process in its place."""

    @abc.abstractmethod
    def post_gather(
        self, scope: str, count: int, wait_s: float, *, own: tuple[int, bytes] | None = None
    ) -> int:
        """Ask for values 0 .. count-1, after writing an own one; returns the request's number."""

    @abc.abstractmethod
    def take(self, request: int) -> list[bytes] | None:
        """The values of a request, or None while they are not there; never blocks.

        Raises GatherTimeoutError when somebody did not come within the request's time.
        """

    def gather(
        self, scope: str, count: int, wait_s: float, *, own: tuple[int, bytes] | None = None
    ) -> list[bytes]:
        """Values 0 .. count-1 of a scope, waiting for them; raises GatherTimeoutError."""
        request = self.post_gather(scope, count, wait_s, own=own)
        while (values := self.take(request)) is None:
            self.pause()
        return values

    def pause(self) -> None:
        """Return when :meth:`take` is worth another call."""
        descriptor = self.fileno()
        select.select(
            [descriptor] if descriptor >= 0 else [], [], [], None if descriptor >= 0 else self.poll_s
        )
