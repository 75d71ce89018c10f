"""Reading row groups in parallel, in the order in which they are needed."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from polyhvd.data.waiting import wait_for

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ReadAhead"]

T = TypeVar("T")

_LAST_READ_S = 5.0  # how long the end waits for reads that are under way


class _Read(Generic[T]):
    """A read that was asked for, and its result."""

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self.is_done = False
        self.result: T | None = None
        self.error: BaseException | None = None


class ReadAhead(Generic[T]):
    """Reads in several threads what an iterator announces, and returns the results in order.

    Reads are begun in order, and are ahead by a bounded number of bytes. A read that no thread has begun when
    its result is wanted is done by the thread that wants it. Threads start when there is something to read
    ahead, and end at :meth:`close`.

    Args:
        numbers: of what is read, in the order of :meth:`next`. It is advanced by the thread that calls this
            class. None: nothing more is announced for the moment.
        size: the bytes of a number.
        read: reads a number; in several threads at the same time.
        bytes_max: of reads that were begun and not returned; one read is always allowed.
        threads: how many reads at the same time.

    Example::

        with ReadAhead(iter([3, 1, 2]), size=lambda n: 1, read=load, bytes_max=2, threads=2) as ahead:
            third, first, second = ahead.next(), ahead.next(), ahead.next()
    """

    def __init__(
        self,
        numbers: Iterator[int | None],
        *,
        size: Callable[[int], int],
        read: Callable[[int], T],
        bytes_max: int,
        threads: int,
    ) -> None:
        self._numbers = numbers
        self._size = size
        self._read = read
        self._bytes_max = bytes_max
        self._threads_max = threads
        self._changed = threading.Condition()
        self._announced: _Read[T] | None = None  # the next one, for which there was no room
        self._begun: deque[_Read[T]] = deque()  # in order, those that were not returned
        self._waiting: deque[_Read[T]] = deque()  # of these, those that no thread has taken
        self._bytes = 0
        self._threads: list[threading.Thread] = []
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def next(self) -> T:
        """The result of the next read.

        Raises:
            RuntimeError: none is announced.
            BaseException: what the read has raised.
        """
        self.begin()
        if not self._begun:
            raise RuntimeError("no read is announced")
        first = self._begun.popleft()
        with self._changed:
            is_mine = bool(self._waiting) and self._waiting[0] is first
            if is_mine:
                self._waiting.popleft()
        if is_mine:
            self._do(first)
        with self._changed:
            wait_for(self._changed, lambda: first.is_done)
            self._bytes -= first.size
        if first.error is not None:
            raise first.error
        self.begin()  # what there is room for now is read while this result is used
        return first.result  # type: ignore[return-value]

    def close(self) -> None:
        """End the threads; reads that are under way are waited for during five seconds."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        deadline = time.monotonic() + _LAST_READ_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def begin(self) -> None:
        """Hand reads to the threads, as far as there is room. :meth:`next` does it, too."""
        while len(self._begun) < 1 + 4 * self._threads_max:
            if self._announced is None:
                number = next(self._numbers, None)
                if number is None:
                    return
                self._announced = _Read(number, self._size(number))
            read = self._announced
            if self._begun and self._bytes + read.size > self._bytes_max:
                return
            self._announced = None
            self._begun.append(read)
            self._bytes += read.size
            with self._changed:
                self._waiting.append(read)
                self._changed.notify_all()
            while len(self._begun) > 1 and len(self._threads) < min(self._threads_max, len(self._begun)):
                thread = threading.Thread(target=self._run, name="polyhvd-data-read", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                read = self._waiting.popleft()
            self._do(read)

    def _do(self, read: _Read[T]) -> None:
        try:
            read.result = self._read(read.number)
        except BaseException as error:
            read.error = error
        with self._changed:
            read.is_done = True
            self._changed.notify_all()
