"""Lines for calls without a name: who stands in them, and for how long they last."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from polyhvd.config import Settings
from polyhvd.runtime.world import World


@pytest.fixture
def world() -> Iterator[World]:
    with World(Settings()) as world:
        yield world


def test_one_is_in_a_line_and_others_are_in_others(world: World) -> None:
    with world.line("call", 0), World(Settings()) as another_world:
        assert not world.line("call", 0).acquire(blocking=False)
        for other in (world.line("call", 1), world.line("another call", 0), another_world.line("call", 0)):
            assert other.acquire(blocking=False)


def test_nothing_is_left_of_a_line(world: World) -> None:
    for number in range(1000):
        with world.line("call", number):
            assert (number, "call") in world._lines
    assert not world._lines


def test_a_forked_child_has_no_line_to_stand_in(world: World) -> None:
    with world.line("call", 0):
        child = os.fork()
        if child == 0:
            from polyhvd.runtime import current

            os._exit(0 if current.find() is None else 1)
    assert os.waitpid(child, 0)[1] == 0
