"""A thread that goes ahead of its consumer, by a bounded number of bytes."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Generic, TypeVar

from polyhvd.data.waiting import LOOK_S, wait_for

__all__ = ["Prefetch"]

T = TypeVar("T")

_LOG = logging.getLogger("polyhvd")
_LAST_ITEM_S = 5.0  # how long the end of a loop waits for the item that is being made
#: How much longer the end of the program waits for a function of the program. While Python is finalized, it
#: ends threads that return to it, which aborts the process if they come from C++ code such as PyTorch's.
_EXIT_S = 25.0
_FRAMES = 6  # of the thread, in reports


class Prefetch(Generic[T]):
    """Runs an iterator in a separate thread, and returns its items in order.

    The thread ends with the iterator, at :meth:`close`, or when the program ends, whichever comes first. The
    end of the program waits a few seconds for the item that it is working on, and for the program's functions
    up to half a minute.

    Args:
        items: yields the number of bytes of each item, and the item. Only the thread uses it.
        bytes_max: the thread waits while so many bytes of items have not been taken.
        items_min: so many items may always be ahead, however large they are.
        items_max: and so many at most, however small.
        is_in_program: returns whether the thread may be within a function of the program.

    Example::

        ahead = Prefetch(((len(text), text) for text in texts), bytes_max=1 << 20)
        first = ahead.next()
        ahead.close()
    """

    def __init__(
        self,
        items: Iterator[tuple[int, T]],
        bytes_max: int,
        *,
        items_min: int = 1,
        items_max: int = sys.maxsize,
        is_in_program: Callable[[], bool] = lambda: True,
    ) -> None:
        self._items = items
        self._bytes_max = bytes_max
        self._items_min, self._items_max = items_min, items_max
        self._is_in_program = is_in_program
        self._changed = threading.Condition()
        self._ready: deque[tuple[int, T]] = deque()
        self._bytes = 0
        self._error: BaseException | None = None
        self._ended = False  # the thread adds no more items
        self._closed = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="polyhvd-data", daemon=True)
        # A daemon thread does not delay the end of the program, but the interpreter must not be finalized
        # under it.
        atexit.register(self._end_with_program)
        self._thread.start()

    @property
    def is_usable(self) -> bool:
        """Whether this process has the thread, which a forked child does not, and it was not closed."""
        return self._process == os.getpid() and not self._closed

    def next(self, look: Callable[[float], None] = lambda _: None) -> T:
        """The next item, when there is one.

        Args:
            look: as of :func:`polyhvd.data.waiting.wait_for`; what it raises ends the wait.

        Raises:
            RuntimeError: there are no more items, or :meth:`close` was called.
            Exception: the one that the iterator raised in the thread, after the items before it.
        """
        with self._changed:
            wait_for(self._changed, lambda: self._ready or self._ended or self._closed, look)
            if self._closed or not self._ready:
                error, self._error = self._error, None
                raise error or RuntimeError("there is no further item")
            size, item = self._ready.popleft()
            self._bytes -= size
            self._changed.notify_all()
        return item

    def where(self) -> str:
        """The innermost lines that the thread is at, as in a traceback."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame)[-_FRAMES:]).rstrip()

    def close(self, *, wait: bool = False) -> bool:
        """End the thread, when it has finished the item that it is working on, and drop what is ahead.

        Args:
            wait: for that item as long as it takes, and not only a few seconds.

        Returns:
            Whether the thread has ended, or is that of another process or the one that calls.
        """
        if self._process != os.getpid():  # the lock may have been taken when the process was forked
            return True
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        return self.ends_within(None if wait else _LAST_ITEM_S)

    def ends_within(self, limit_s: float | None) -> bool:
        """The result of :meth:`close` after another wait, in seconds; None: as long as it takes."""
        if self._process != os.getpid():
            return True
        if self._thread is not threading.current_thread():
            deadline = time.monotonic() + (float("inf") if limit_s is None else limit_s)
            while self._thread.is_alive():
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                self._thread.join(min(left_s, LOOK_S))
        atexit.unregister(self._end_with_program)
        return True

    def _end_with_program(self) -> None:
        if self.close() or not self._is_in_program():
            return
        _LOG.warning(
            "data: the program ends; it waits up to %g s for the thread that makes batches, which is at:\n%s",
            _EXIT_S,
            self.where(),
        )
        self.ends_within(_EXIT_S)

    def _run(self) -> None:
        try:
            for size, item in self._items:
                if not self._add(size, item):
                    break
        except BaseException as error:
            self._error = error
        finally:
            if isinstance(self._items, Generator):
                self._items.close()
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _add(self, size: int, item: T) -> bool:
        """Hand over an item when there is room for it; False: none is wanted any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_room(size))
            if self._closed:
                return False
            self._ready.append((size, item))
            self._bytes += size
            self._changed.notify_all()
        return True

    def _has_room(self, size: int) -> bool:
        ahead = len(self._ready)
        if ahead < self._items_min:
            return True
        return ahead < self._items_max and self._bytes + size <= self._bytes_max
