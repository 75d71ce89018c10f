"""Interface of the store through which the ranks of a job exchange values.

Values are bytes under (scope, index), written once: the first writer wins. A *gather* waits for indices
0 .. count-1 of a scope. gloo's ``rendezvous/store.h`` has the same idea.
"""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Sequence
from typing import TypeVar

from polyhvd.rendezvous import network

__all__ = [
    "COUNT_MAX",
    "VALUE_BYTES_MAX",
    "GatherTimeoutError",
    "Store",
    "StoreError",
    "check_count",
    "check_value",
    "job_name",
]

#: Most values that one gather asks for. Their sizes, or the missing ones' indices, fit a header of a frame.
COUNT_MAX = 1 << 16
#: Longest value.
VALUE_BYTES_MAX = 1 << 28

_PAUSE_S_MAX = 60.0

_AnyStore = TypeVar("_AnyStore", bound="Store")


class StoreError(OSError):
    """The store cannot be reached, has gone away, was closed, or does not accept this rank."""


class GatherTimeoutError(StoreError):
    """Some values were not written in time; ``missing`` are their indices."""

    def __init__(self, missing: list[int]) -> None:
        super().__init__(f"still missing: {missing}")
        self.missing = missing


class Store(abc.ABC):
    """One rank's access to the values of its job. Not thread-safe. Usable as a context manager.

    ``post_gather`` and ``take`` let an event loop wait for values beside other things; ``gather`` blocks.
    Every method but ``close`` and ``fileno`` raises StoreError when the store is gone or closed, and
    ValueError for a value or a count beyond the bounds above.

    Example::

        with FolderStore("/shared/job-17", secret, rank) as store:
            cards = store.gather("hello", size, wait_s=60.0, own=(rank, card))
    """

    #: The job's secret, by which ranks prove to each other that they belong to it.
    secret: bytes
    #: Identifies this job among others on the same machines. No secret.
    job: str
    #: Address of this host as those of the other ranks reach it; empty: not known.
    address: str = ""
    #: Others of this host, where not every rank may reach that one.
    further_addresses: Sequence[str] = ()

    def __enter__(self: _AnyStore) -> _AnyStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of the store, and remove this rank's *own* values; idempotent, and never raises."""

    @abc.abstractmethod
    def fileno(self) -> int:
        """A descriptor that is readable when :meth:`take` may have something; -1: there is none.

        Whoever waits for several requests takes each of them when it becomes readable.
        """

    @property
    def poll_s(self) -> float:
        """Seconds after which :meth:`take` is worth another call though no descriptor is readable.

        Infinite if the descriptor signals every event, timeouts included.
        """
        return 0.01

    @abc.abstractmethod
    def put(self, scope: str, index: int, value: bytes, *, own: bool = False) -> None:
        """Write a value, unless there is one already. An *own* one goes when this rank closes the store.

        Where the store notices that a rank has died, its own values go, too. Elsewhere they stay until
        a later process of the same rank writes its own in their place.
        """

    @abc.abstractmethod
    def forget(self, scope: str, index: int) -> None:
        """Remove a value that this rank wrote, perhaps as an earlier process in its place."""

    @abc.abstractmethod
    def post_gather(
        self, scope: str, count: int, wait_s: float, *, own: tuple[int, bytes] | None = None
    ) -> int:
        """Ask for values 0 .. count-1, after writing an own one; returns the request's number.

        Args:
            scope: what the values are about; any text.
            count: how many there will be, from 1 to ``COUNT_MAX``.
            wait_s: when to give up, in seconds from now.
            own: index and value to write first, as :meth:`put` does with ``own=True``.
        """

    @abc.abstractmethod
    def take(self, request: int) -> list[bytes] | None:
        """The values of a request, or None while they are not there; never blocks.

        A request ends with its values or with its error. None, too, for one that has ended.

        Raises:
            GatherTimeoutError: a value was not written within the request's time.
            StoreError: the store is gone.
        """

    def gather(
        self, scope: str, count: int, wait_s: float, *, own: tuple[int, bytes] | None = None
    ) -> list[bytes]:
        """Values 0 .. count-1 of a scope, waiting for them: :meth:`post_gather` and :meth:`take` in one."""
        request = self.post_gather(scope, count, wait_s, own=own)
        while (values := self.take(request)) is None:
            self.pause()
        return values

    def pause(self) -> None:
        """Return when :meth:`take` is worth another call."""
        descriptor = self.fileno()
        network.await_ready([descriptor] if descriptor >= 0 else [], min(self.poll_s, _PAUSE_S_MAX))


def job_name(place: str, secret: bytes) -> str:
    """The value of :attr:`Store.job`: a digest of the job's place and secret, which reveals neither."""
    return f"job-{hashlib.sha256(f'{place} {secret.hex()}'.encode()).hexdigest()[:16]}"


def check_count(count: int) -> None:
    """Raise ValueError for a number of values outside of the allowed range."""
    if not 0 < count <= COUNT_MAX:
        raise ValueError(f"a gather of {count} values: from 1 to {COUNT_MAX} can be asked for")


def check_value(value: bytes) -> None:
    """Raise ValueError for a value that is too long."""
    if len(value) > VALUE_BYTES_MAX:
        raise ValueError(f"a value of {len(value)} bytes is too large for a store: {VALUE_BYTES_MAX} at most")
