"""The threads that read row groups before they are needed."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from polyhvd.data import read_ahead
from polyhvd.data.read_ahead import ReadAhead


def ahead_of(numbers: Iterator[int | None], read: object, **options: int) -> ReadAhead[int]:
    options = {"bytes_max": 10**6, "threads": 4, **options}
    return ReadAhead(numbers, size=lambda number: 10, read=read, **options)  # type: ignore[arg-type]


class Slow:
    """Reads that end when the test says so."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.may_end = threading.Event()
        self.changed = threading.Condition()

    def __call__(self, number: int) -> int:
        with self.changed:
            self.begun.append(number)
            self.changed.notify_all()
        assert self.may_end.wait(60)
        return number

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.begun) >= count, timeout=60)


def test_results_come_in_order_though_reads_end_in_reverse_order() -> None:
    ended = [threading.Event() for _ in range(4)]
    ended[3].set()

    def read(number: int) -> int:
        assert ended[number].wait(60)
        if number:
            ended[number - 1].set()
        return number

    with ahead_of(iter(range(4)), read) as ahead:
        assert [ahead.next() for _ in range(4)] == list(range(4))


@pytest.mark.parametrize(("bytes_max", "threads", "begun"), [(40, 8, 4), (1000, 3, 3), (5, 8, 1), (0, 8, 1)])
def test_reads_ahead_are_bounded_by_bytes_and_threads(bytes_max: int, threads: int, begun: int) -> None:
    slow = Slow()
    with ahead_of(iter(range(100)), slow, bytes_max=bytes_max, threads=threads) as ahead:
        taker = threading.Thread(target=ahead.next, daemon=True)
        taker.start()
        slow.wait_for(begun)
        extra = 1 if bytes_max == 1000 else 0  # the thread that waits reads the first, besides the others
        assert len(slow.begun) <= begun + extra
        slow.may_end.set()
        taker.join(60)
        assert [ahead.next() for _ in range(99)] == list(range(1, 100))


def test_error_is_raised_in_its_place() -> None:
    def read(number: int) -> int:
        if number == 2:
            raise LookupError("the third is missing")
        return number

    with ahead_of(iter(range(4)), read) as ahead:
        assert [ahead.next(), ahead.next()] == [0, 1]
        with pytest.raises(LookupError, match="the third is missing"):
            ahead.next()


def test_nothing_is_announced_after_none_until_begin() -> None:
    numbers: list[int | None] = [0, None, 1]
    with ahead_of(iter(numbers), lambda number: number) as ahead:
        assert ahead.next() == 0
        ahead.begin()
        assert ahead.next() == 1
        with pytest.raises(RuntimeError, match="no read is announced"):
            ahead.next()


def test_close_ends_the_threads_and_waits_a_limited_time_for_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "_LAST_READ_S", 0.05)
    slow = Slow()
    ahead = ahead_of(iter(range(100)), slow, threads=2)
    ahead.begin()
    slow.wait_for(2)
    threads = ahead._threads
    ahead.close()
    assert all(thread.is_alive() for thread in threads)
    slow.may_end.set()
    for thread in threads:
        thread.join(60)
    assert sorted(slow.begun) == [0, 1], "what no thread had begun is not read"
