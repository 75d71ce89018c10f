"""The thread that goes ahead of its consumer."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from polyhvd.data import prefetch
from polyhvd.data.prefetch import Prefetch


class Items:
    """Numbers of a given size, whose making the test can see."""

    def __init__(self, size: int, count: int = 10**6) -> None:
        self._size, self._count = size, count
        self.made = 0
        self.changed = threading.Condition()

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for number in range(self._count):
            with self.changed:
                self.made += 1
                self.changed.notify_all()
            yield self._size, number

    def wait_for(self, made: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.made >= made, timeout=60)


def test_items_come_in_order_and_end() -> None:
    ahead = Prefetch(iter(Items(1, count=100)), bytes_max=7)
    assert [ahead.next() for _ in range(100)] == list(range(100))
    with pytest.raises(RuntimeError, match="no further item"):
        ahead.next()
    ahead.close()


@pytest.mark.parametrize(("size", "ahead"), [(10, 5), (25, 2), (26, 1), (1000, 1)])
def test_thread_is_ahead_by_the_given_bytes_and_at_least_one_item(size: int, ahead: int) -> None:
    items = Items(size)
    prefetch = Prefetch(iter(items), bytes_max=50)
    for taken in range(3):
        items.wait_for(taken + ahead + 1)  # the last one waits for room
        assert items.made == taken + ahead + 1
        with prefetch._changed:
            assert (len(prefetch._ready), prefetch._bytes) == (ahead, ahead * size)
        assert prefetch.next() == taken
    prefetch.close()


def test_an_exception_in_the_thread_is_raised_after_the_items_before_it() -> None:
    def items() -> Iterator[tuple[int, str]]:
        yield 1, "first"
        raise LookupError("the second is missing")

    ahead = Prefetch(items(), bytes_max=100)
    assert ahead.next() == "first"
    with pytest.raises(LookupError, match="the second is missing") as raised:
        ahead.next()
    assert raised.traceback[-1].name == "items"
    ahead.close()


def test_close_ends_a_thread_that_waits_for_room() -> None:
    items = Items(1)
    ahead = Prefetch(iter(items), bytes_max=2)
    items.wait_for(3)
    ahead.close()
    assert not ahead._thread.is_alive()
    with pytest.raises(RuntimeError, match="no further item"):
        ahead.next()
    ahead.close()


def test_close_waits_a_limited_time_for_an_item_unless_it_is_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_LAST_ITEM_S", 0.01)
    begun, ended = threading.Event(), threading.Event()

    def items() -> Iterator[tuple[int, int]]:
        begun.set()
        ended.wait()
        yield 1, 1

    ahead = Prefetch(items(), bytes_max=1)
    begun.wait()
    assert not ahead.close()
    assert not ahead.is_usable
    threading.Timer(0.1, ended.set).start()
    assert ahead.close(wait=True)


#: The item is made when the end of the program already waits longer for it than the end of a loop does.
ENDING = """
import logging, threading
from polyhvd.data import prefetch

prefetch._LAST_ITEM_S = 0.01
begun, warned = threading.Event(), threading.Event()

class Warned(logging.Handler):
    def emit(self, record):
        print(record.getMessage())
        warned.set()

logging.getLogger("polyhvd").addHandler(Warned())

def items():
    begun.set()
    warned.wait()
    print("made")
    yield 1, 1

ahead = prefetch.Prefetch(items(), 1)
begun.wait()
"""


def test_program_does_not_end_under_a_thread_that_makes_an_item() -> None:
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    warning, *_, last = done.stdout.splitlines()
    assert warning.startswith("data: the program ends; it waits up to 25 s for the thread that makes batches")
    assert ", in items" in done.stdout
    assert last == "made"


def test_forked_child_knows_that_it_has_no_thread() -> None:
    items = Items(1)
    ahead = Prefetch(iter(items), bytes_max=2)
    items.wait_for(3)
    child = os.fork()
    if child == 0:
        usable = ahead.is_usable
        ahead.close()
        os._exit(int(usable))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ahead.is_usable
    assert ahead.next() == 0
    ahead.close()
