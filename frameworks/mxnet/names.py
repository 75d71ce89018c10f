"""Names of calls that were given none. A call's number counts from when the program makes it.

MXNet's engine runs operations as their arrays become ready, which may be in another order on each rank.
"""

from __future__ import annotations

import ctypes

from polyhvd.collectives.adapter import OpKind
from polyhvd.runtime import current

__all__ = ["Unnamed", "derived", "turn_of", "unnamed"]

#: Calls between two whose companions have the same name: one has its companions agreed on in the
#: second step, if a step makes so many calls or a number that divides it.
_PERIOD = 240

_NAMED = ctypes.c_uint64(0)


class Unnamed(str):
    """Such as ``allreduce.noname.17``: what a call without a name is called."""

    __slots__ = ("recurring", "turn")

    recurring: str
    turn: ctypes.c_uint64


def unnamed(kind: OpKind, process_set: int) -> Unnamed:
    """The name of the next call of this kind on the process set, if it has none."""
    turn = current.world().engine.take_turn(kind, process_set)
    stem = f"{kind.name.lower()}.noname."
    name = Unnamed(f"{stem}{turn - 1}")
    name.turn = ctypes.c_uint64(turn)
    name.recurring = f"{stem}{(turn - 1) % _PERIOD}"
    return name


def turn_of(name: str) -> ctypes.c_uint64:
    """For native.cc: 0 when the program has given the name."""
    return name.turn if type(name) is Unnamed else _NAMED


def derived(name: str, suffix: str) -> str:
    """The name of an operation that goes with another one. It recurs, so that the response cache knows it."""
    return f"{name.recurring if type(name) is Unnamed else name}.{suffix}"
