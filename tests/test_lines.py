"""Lines for calls without a name: who stands in them, and for how long they last."""

from __future__ import annotations

import os

from polyhvd.collectives import lines
from polyhvd.collectives.lines import in_line


def test_one_is_in_a_line_and_others_are_in_others() -> None:
    with in_line("call", 0):
        assert not in_line("call", 0).acquire(blocking=False)
        for other in (in_line("call", 1), in_line("another call", 0)):
            assert other.acquire(blocking=False)


def test_nothing_is_left_of_a_line() -> None:
    for number in range(1000):
        with in_line("call", number):
            assert (number, "call") in lines._lines
    assert not lines._lines


def test_a_forked_child_finds_nobody_in_line() -> None:
    with in_line("call", 0):
        child = os.fork()
        if child == 0:
            os._exit(0 if in_line("call", 0).acquire(blocking=False) else 1)
    assert os.waitpid(child, 0)[1] == 0
