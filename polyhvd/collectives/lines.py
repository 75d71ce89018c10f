"""Lines for calls that the program gives no name, but which run operations under names of ours.

Names that recur are known to the response cache. So that several threads may make such calls at once, each
process lets them follow one another: the n-th call of a rank meets the n-th of the others, as calls without a
name do. Nobody counts them, and a rank that has joined need not catch up.
"""

from __future__ import annotations

import os
import threading
from weakref import WeakValueDictionary

__all__ = ["in_line"]

_guard = threading.Lock()
#: Each lasts as long as somebody stands in it.
_lines: WeakValueDictionary[tuple[int, str], threading.Lock] = WeakValueDictionary()


def in_line(name: str, set_id: int) -> threading.Lock:
    """Held by the one thread that runs the operations of such a call on a process set.

    It adds no deadlock: what it makes a call wait for are earlier ones, which no rank can pass over either.
    The program's own code, which may communicate, is not to run inside.

    Example::

        with in_line("broadcast_parameters", set_id):
            ...
    """
    with _guard:
        return _lines.setdefault((set_id, name), threading.Lock())


def _forget_in_child() -> None:
    """Who stands in line is another process's thread."""
    global _guard
    _guard = threading.Lock()
    _lines.clear()


os.register_at_fork(after_in_child=_forget_in_child)
