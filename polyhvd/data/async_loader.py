"""Horovod's base classes for data loaders that users write, of which one reads ahead in a thread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from polyhvd.data.counting import waiting
from polyhvd.data.order import at_least
from polyhvd.data.prefetch import Prefetch

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]

_END = object()


class BaseDataLoader(ABC):
    """A data loader that a subclass defines by its length and :meth:`_iterate`.

    Example::

        class Numbers(BaseDataLoader):
            def __len__(self):
                return 3

            def _iterate(self):
                yield from range(3)
    """

    @abstractmethod
    def __len__(self) -> int:
        """The number of batches."""

    @abstractmethod
    def _iterate(self) -> Iterator[Any]:
        """The batches of one pass."""

    def __iter__(self) -> Iterator[Any]:
        """The batches of one pass, each as :meth:`_process_batch` returns it."""
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """The batch as the program gets it; a subclass may change it, in the program's thread."""
        return batch


if TYPE_CHECKING:
    _NextBase = BaseDataLoader
else:
    _NextBase = object  # it may be any class that has the methods


class AsyncDataLoaderMixin(_NextBase):
    """Has a thread iterate over the batches of a :class:`BaseDataLoader`, ahead of the program.

    It is the first base of a class, and that loader the next. An exception of the thread is raised where the
    batch is asked for. The thread of a pass ends with it, with :meth:`close_async_loader`, or with the
    program.

    Args:
        async_loader_queue_size: how many batches the thread is ahead at most; 0: there is no thread.
        *args: of the next base.
        **kwargs: of the next base.

    Raises:
        ValueError: the number is not an integer of at least 0.

    Example::

        class AsyncNumbers(AsyncDataLoaderMixin, Numbers):
            pass

        loader = AsyncNumbers(async_loader_queue_size=8)
    """

    def __init__(self, async_loader_queue_size: int = 64, *args: Any, **kwargs: Any) -> None:
        self.async_loader_queue_size = at_least(0, "async_loader_queue_size", async_loader_queue_size)
        self._ahead: Prefetch[Any] | None = None
        super().__init__(*args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        """The batches of one pass. Another pass ends the thread of the one before."""
        if self.async_loader_queue_size == 0:
            yield from super().__iter__()
            return
        self.close_async_loader()
        ahead = self._ahead = Prefetch(self._async_worker(), self.async_loader_queue_size)
        try:
            while True:
                with waiting():
                    batch = ahead.next()
                if batch is _END:
                    return
                yield self._process_batch(batch)
        finally:
            ahead.close()

    def close_async_loader(self) -> None:
        """End the thread, when it has finished the batch that it is working on, and drop what is ahead."""
        if self._ahead is not None:
            self._ahead.close(wait=True)
            self._ahead = None

    def _async_worker(self) -> Iterator[tuple[int, Any]]:
        """In the thread: the batches of a pass and its end, each counted as one."""
        for batch in self._iterate():
            yield 1, batch
        yield 0, _END
