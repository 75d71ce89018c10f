"""Names of calls that were given none, and numbers of parameters: the same on every rank.

A call's number counts from when the program makes it. MXNet's engine runs operations as their arrays become
ready, which may be in another order on each rank.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence

from polyhvd.collectives.adapter import OpKind
from polyhvd.runtime import current

__all__ = ["Unnamed", "derived", "places_of", "turn_of", "unnamed"]

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
    """Return the turn of a name for native.cc; 0: the program has set the name."""
    return name.turn if type(name) is Unnamed else _NAMED


def derived(name: str, suffix: str) -> str:
    """The name of an operation that goes with another one. It recurs, so that the response cache knows it."""
    return f"{name.recurring if type(name) is Unnamed else name}.{suffix}"


def places_of(names: Sequence[str]) -> dict[int, int]:
    """Return the number that each parameter of a Gluon trainer has on every rank, by its index.

    A trainer sorts a dict by names, which have counters of the process: "dense10" comes before "dense9".
    Other orders are the program's, and stay.
    """
    if list(names) != sorted(names):
        return {}
    in_order = sorted(range(len(names)), key=lambda index: _parts(names[index]))
    return {index: place for place, index in enumerate(in_order)}


def _parts(name: str) -> list[str | int]:
    """The numbers in a name, as numbers, and what is between them."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"([0-9]+)", name))]
