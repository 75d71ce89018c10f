"""A store for ranks that are threads of one process: for tests."""

from __future__ import annotations

import os
import secrets
import threading
from contextlib import suppress

from polyhvd.rendezvous.keyed import KeyedStore
from polyhvd.rendezvous.store import StoreError, job_name

__all__ = ["Memory", "MemoryStore"]


class Memory:
    """The data that the stores of one job share. Thread-safe.

    Args:
        secret: the job's; one is made where none is given.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self.secret = secrets.token_bytes(32) if secret is None else secret
        self.job = job_name(f"memory {secrets.token_hex(16)}", self.secret)
        self._lock = threading.Lock()
        self._values: dict[str, bytes] | None = {}
        self._wakers: set[int] = set()  # event descriptors of the stores

    def close(self) -> None:
        """Lose everything: whoever waits gets a StoreError. Idempotent."""
        with self._lock:
            self._values = None
            self._wake()

    def join(self) -> int:
        """An event descriptor that is readable after each change; the caller owns it, and gives it back."""
        waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        with self._lock:
            self._wakers.add(waker)
        return waker

    def leave(self, waker: int) -> None:
        """Close a descriptor of :meth:`join`."""
        with self._lock:
            self._wakers.discard(waker)
        os.close(waker)

    def create(self, key: str, data: bytes) -> bool:
        """Keep ``data`` under a key that is free; whether it was."""
        with self._lock:
            values = self._all()
            if key in values:
                return False
            values[key] = data
            self._wake()
            return True

    def replace(self, key: str, data: bytes) -> None:
        """Keep ``data`` under a key, whatever is there."""
        with self._lock:
            self._all()[key] = data
            self._wake()

    def read(self, key: str) -> bytes | None:
        """The value of a key."""
        with self._lock:
            return self._all().get(key)

    def remove(self, key: str) -> None:
        """Forget a key."""
        with self._lock:
            self._all().pop(key, None)

    def _all(self) -> dict[str, bytes]:
        if self._values is None:
            raise StoreError("the memory that the ranks share is closed")
        return self._values

    def _wake(self) -> None:
        for waker in self._wakers:
            os.eventfd_write(waker, 1)


class MemoryStore(KeyedStore):
    """One rank's access to a :class:`Memory`.

    Example::

        memory = Memory()
        stores = [MemoryStore(memory, rank) for rank in range(2)]  # one for each thread
    """

    def __init__(self, memory: Memory, rank: int, *, address: str = "127.0.0.1") -> None:
        super().__init__(
            memory.secret, rank, job=memory.job, address=address, look_first_s=0.0, look_last_s=0.0
        )
        self._memory = memory
        self._waker = memory.join()

    def fileno(self) -> int:
        """An event descriptor; -1 once the store is closed."""
        return self._waker

    def _create(self, key: str, data: bytes) -> bool:
        return self._memory.create(key, data)

    def _replace(self, key: str, data: bytes) -> None:
        self._memory.replace(key, data)

    def _read(self, key: str) -> bytes | None:
        return self._memory.read(key)

    def _remove(self, key: str) -> None:
        self._memory.remove(key)

    def _refresh(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._waker)  # before the look, so that a change after it wakes again

    def _release(self) -> None:
        self._memory.leave(self._waker)
        self._waker = -1
