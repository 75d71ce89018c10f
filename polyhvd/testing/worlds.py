"""The job that a test asks for, and which test of a file is meant: plain values, the same everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

__all__ = ["World", "key_of"]


@dataclass(frozen=True)
class World:
    """The job that a test runs in, as the fixture ``world`` gives it.

    Example::

        def test_sum(rank: int, world: World) -> None:
            assert rank < world.size
    """

    framework: str
    size: int
    env: tuple[tuple[str, str], ...] = ()
    fresh: bool = False
    rank: int = -1  # of the process that has the value; -1: it is none

    #: Where a rank's session has its own.
    KEY: ClassVar[pytest.StashKey[World]] = pytest.StashKey()

    @property
    def order(self) -> tuple[object, ...]:
        """Sorts tests so that those of the same processes follow each other."""
        return ("ranks", self.framework, self.size, self.env, self.fresh)


def key_of(item: pytest.Item) -> tuple[Any, ...]:
    """Which test of its file this is: the names of classes and function, and the places of its parameters."""
    names = [node.name for node in item.listchain() if isinstance(node, pytest.Class)]
    callspec = getattr(item, "callspec", None)
    places = tuple(sorted(callspec.indices.items())) if callspec is not None else ()
    return (*names, getattr(item, "originalname", None) or item.name, places)
