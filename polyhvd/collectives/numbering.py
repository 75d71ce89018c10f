"""Numbers for things that ranks make in the same order, such as layers: for names on the wire."""

from __future__ import annotations

import gc
import threading
from typing import Any
from weakref import WeakKeyDictionary

from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.runtime import current

__all__ = ["ObjectNumbers"]


class ObjectNumbers:
    """Numbers objects in the order in which they first ask; each process set counts for itself.

    A new engine may include new processes, which have made nothing yet. Objects then keep their numbers,
    since compiled graphs contain them, but numbers of objects that are gone are free again: a process that
    was in the world before and makes its model again numbers it as a process that has just been started.
    """

    def __init__(self) -> None:
        self._sets: dict[tuple[int, ...], WeakKeyDictionary[Any, int]] = {}
        self._next: dict[tuple[int, ...], int] = {}
        self._lock = threading.Lock()  # of what `of` reads and writes
        current.on_change(self._free_numbers)

    def of(self, item: Any, process_set: ProcessSet) -> int:
        """The number of an object, by identity; it is held weakly."""
        # Not the set's number, which may be another one with the next engine.
        members = () if process_set is global_process_set else tuple(process_set.ranks or ())
        with self._lock:
            known = self._sets.setdefault(members, WeakKeyDictionary())
            number = known.get(item)
            if number is None:
                number = known[item] = self._next.get(members, 0)
                self._next[members] = number + 1
            return number

    def name(self, base: str, item: Any, process_set: ProcessSet) -> str:
        """The name of an object: that of the first one is ``base``, to others their number is added."""
        number = self.of(item, process_set)
        return f"{base}.{number}" if number else base

    def _free_numbers(self, _: object) -> None:
        if not self._sets:
            return
        gc.collect()  # what is left in cycles would count
        self._next = {members: max(known.values(), default=-1) + 1 for members, known in self._sets.items()}
