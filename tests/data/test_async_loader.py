"""Horovod's base classes for data loaders."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from polyhvd.data import AsyncDataLoaderMixin, BaseDataLoader


class Numbers(BaseDataLoader):
    def __init__(self, count: int, fails_at: int = -1) -> None:
        self.count, self.fails_at = count, fails_at
        self.threads: set[threading.Thread] = set()
        self.made = threading.Semaphore(0)

    def __len__(self) -> int:
        return self.count

    def _iterate(self) -> Iterator[int]:
        self.threads.add(threading.current_thread())
        for number in range(self.count):
            if number == self.fails_at:
                raise LookupError("no such number")
            self.made.release()
            yield number

    def _process_batch(self, batch: Any) -> Any:
        return threading.current_thread(), batch


class AsyncNumbers(AsyncDataLoaderMixin, Numbers):
    pass


def values_of(loader: Any) -> list[int]:
    assert all(thread is threading.current_thread() for thread, _ in loader)
    return [batch for _, batch in loader]


@pytest.mark.parametrize("size", [0, 1, 3, 64])
def test_each_pass_has_all_batches_and_the_program_s_thread_processes_them(size: int) -> None:
    loader = AsyncNumbers(size, 10)
    assert values_of(loader) == values_of(Numbers(10)) == list(range(10))
    assert len(loader) == 10
    assert (threading.current_thread() in loader.threads) == (size == 0)


def test_thread_is_ahead_by_the_size_of_the_queue() -> None:
    loader = AsyncNumbers(async_loader_queue_size=2, count=100)
    batches = iter(loader)
    next(batches)
    for _ in range(4):  # one was taken, two wait in the queue, and one for room
        assert loader.made.acquire(timeout=60)
    assert not loader.made.acquire(blocking=False)
    loader.close_async_loader()
    assert not any(thread.is_alive() for thread in loader.threads - {threading.current_thread()})
    with pytest.raises(RuntimeError, match="no further item"):
        next(batches)


def test_pass_that_is_broken_off_leaves_no_thread_and_another_one_begins_at_the_first_batch() -> None:
    loader = AsyncNumbers(2, 100)
    for _ in loader:
        break
    assert [batch for _, batch in loader] == list(range(100))
    assert not any(thread.is_alive() for thread in loader.threads)


def test_exception_is_raised_after_the_batches_before_it() -> None:
    batches = iter(AsyncNumbers(8, 10, fails_at=3))
    assert [next(batches)[1] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(LookupError, match="no such number") as raised:
        next(batches)
    assert raised.traceback[-1].name == "_iterate"


def test_size_of_the_queue_has_to_be_a_number() -> None:
    with pytest.raises(ValueError, match="async_loader_queue_size is -1"):
        AsyncNumbers(-1, 10)


def test_base_can_be_any_class_with_the_methods() -> None:
    class Letters:
        def _iterate(self) -> Iterator[str]:
            yield from "abc"

        def _process_batch(self, batch: str) -> str:
            return batch.upper()

    class AsyncLetters(AsyncDataLoaderMixin, Letters):  # type: ignore[misc]
        pass

    assert list(AsyncLetters()) == ["A", "B", "C"]
