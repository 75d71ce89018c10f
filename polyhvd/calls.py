"""What a collective is called with: its name, its operation, its process set, its rows."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from polyhvd import context
from polyhvd.adapter import OpKind, ReduceOp
from polyhvd.errors import InvalidArgumentError
from polyhvd.process_sets import ProcessSet

__all__ = [
    "Call",
    "Slots",
    "Ticket",
    "forget_names",
    "is_number",
    "names_of",
    "process_set_id",
    "resolve_op",
    "splits_of",
]

_REDUCTIONS = frozenset(ReduceOp)
_SUM: int = ReduceOp.Sum  # looking a member up costs as much as the call
_AVERAGE: int = ReduceOp.Average


def resolve_op(op: int | None, average: bool | None = None) -> int:
    """The reduction that Horovod's ``op`` and older ``average`` arguments mean; Average by default."""
    if op is None:
        return _SUM if average is False else _AVERAGE
    if average is not None:
        raise InvalidArgumentError("op and average exclude each other; pass op alone")
    if op not in _REDUCTIONS:
        raise InvalidArgumentError(f"op={op!r}: expected Average, Sum, Adasum, Min, Max or Product")
    return op


def process_set_id(process_set: ProcessSet) -> int:
    """Number of a registered process set."""
    number = process_set.process_set_id
    if number is None:
        raise InvalidArgumentError(
            f"{process_set} is not registered; pass it to init(process_sets=[...]) or add_process_set()"
        )
    return number


def is_number(value: Any) -> bool:
    """Whether a value is a number of Python's or NumPy's: verbs take it for a tensor without dimensions."""
    return isinstance(value, (bool, int, float, np.bool_, np.number))


def splits_of(splits: Any) -> list[int] | None:
    """Rows for each rank, from a list, an array or a tensor of integers; None for equal parts."""
    if splits is None:
        return None
    values = splits.tolist() if hasattr(splits, "tolist") else splits
    if not isinstance(values, Iterable):
        values = [values]
    rows = list(values)
    if not rows or not all(isinstance(row, int) and not isinstance(row, bool) for row in rows):
        raise InvalidArgumentError(
            f"splits={splits!r}: expected one whole number of rows for each rank, in one dimension"
        )
    return rows


class Call:
    """One collective, for the adapter; see :class:`polyhvd.adapter.Operation`."""

    __slots__ = (
        "blocking",
        "exact_gradient",
        "kind",
        "name",
        "numbers",
        "op",
        "postscale",
        "prescale",
        "priority",
        "process_set",
        "root",
    )

    def __init__(
        self,
        kind: int,
        name: str,
        op: int = ReduceOp.Sum,
        root: int = -1,
        prescale: float = 1.0,
        postscale: float = 1.0,
        process_set: int = 0,
        priority: int = 0,
        blocking: bool = False,
        numbers: Sequence[int] = (),
        exact_gradient: bool | None = None,
    ) -> None:
        self.kind = kind
        self.name = name
        self.op = op
        self.root = root
        self.prescale = prescale
        self.postscale = postscale
        self.process_set = process_set
        self.priority = priority
        self.blocking = blocking
        self.numbers = numbers
        self.exact_gradient = exact_gradient


class Slots:
    """Names for calls without one, such as ``allreduce.noname.0``.

    A name is free again once its handle was synchronized. Programs that make the same calls in the
    same order get the same names on every rank, and the same ones in every step, so that the
    response cache knows them. A handle that is dropped keeps its name for good.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._lock = threading.Lock()
        self._free: list[tuple[int, str]] = []  # a heap: the lowest, in whatever order they came back
        self._used = 0

    def take(self) -> str:
        """Lend a name."""
        with self._lock:
            if self._free:
                return heapq.heappop(self._free)[1]
            self._used += 1
            return f"{self._kind}.noname.{self._used - 1}"

    def give_back(self, name: str) -> None:
        """Take a name back that was lent."""
        with self._lock:
            heapq.heappush(self._free, (int(name.rpartition(".")[2]), name))


# By kind and process set: members of a set agree on its names whatever they do in others.
_slots: dict[tuple[OpKind, int], Slots] = {}


def names_of(kind: OpKind, process_set: int) -> Slots:
    """Names for calls without one, of a kind and on a process set."""
    slots = _slots.get((kind, process_set))
    if slots is None:
        slots = _slots.setdefault((kind, process_set), Slots(kind.name.lower()))
    return slots


# Handles that were never synchronized may have kept other names on each rank.
context.on_engine_change(lambda _: _slots.clear())


class Ticket:
    """What the API remembers in a handle: the name it lent, and what the caller gets of the outputs."""

    __slots__ = ("lent", "slots", "unpack")

    def __init__(self, slots: Slots | None, lent: str, unpack: Callable[[Any], Any]) -> None:
        self.slots = slots  # None: the caller gave the name
        self.lent = lent
        self.unpack = unpack


def forget_names(process_set: int) -> None:
    """A process set has gone, and its names with it."""
    for key in [key for key in _slots if key[1] == process_set]:
        _slots.pop(key, None)
