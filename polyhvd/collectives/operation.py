"""The arguments of a collective: its name, its operation, its process set, its rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from polyhvd.collectives.adapter import OpKind, ReduceOp
from polyhvd.collectives.process_sets import ProcessSet
from polyhvd.errors import InvalidArgumentError

if TYPE_CHECKING:
    from polyhvd import _core
    from polyhvd.runtime.world import World

__all__ = ["Call", "Number", "is_number", "process_set_id", "resolve_op", "splits_of"]

#: What verbs take for a tensor without dimensions; see :func:`is_number`.
Number = bool | int | float | np.bool_ | np.number[Any]

_REDUCTIONS = frozenset(ReduceOp)
_SUM: int = ReduceOp.Sum  # looking a member up costs as much as the call
_AVERAGE: int = ReduceOp.Average


def resolve_op(op: int | None, average: bool | None = None) -> int:
    """The reduction that Horovod's ``op`` and older ``average`` arguments mean; Average by default."""
    if op is None:
        return _SUM if average is False else _AVERAGE
    if average is not None:
        raise InvalidArgumentError("op and average exclude each other; pass only op")
    if op not in _REDUCTIONS:
        raise InvalidArgumentError(f"op={op!r}: expected Average, Sum, Adasum, Min, Max or Product")
    return op


def process_set_id(process_set: ProcessSet, world: World | None = None) -> int:
    """Number of a registered process set.

    Args:
        process_set: of ``world``, or of all ranks of whichever.
        world: in which it is used; None: not to be checked.

    Raises:
        TypeError: it is not a process set.
        InvalidArgumentError: it is not registered, or is one of another world.
    """
    if not isinstance(process_set, ProcessSet):
        raise TypeError(
            f"process_set={process_set!r}: expected a ProcessSet, such as global_process_set or one of "
            "add_process_set()"
        )
    number = process_set.process_set_id
    if number is None or (world is not None and process_set.world not in (None, world)):
        raise InvalidArgumentError(
            f"{process_set} is not registered; pass it to init(process_sets=[...]) or add_process_set()"
        )
    return number


def is_number(value: Any) -> bool:
    """Return whether a value is a number of Python or NumPy, which verbs use as a scalar tensor."""
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
    """One collective, for the adapter; see :class:`polyhvd.collectives.adapter.Operation`."""

    __slots__ = (
        "blocking",
        "exact_gradient",
        "generation",
        "kind",
        "name",
        "numbers",
        "op",
        "postscale",
        "prescale",
        "priority",
        "process_set",
        "root",
        "world",
    )

    def __init__(
        self,
        world: World,
        kind: int,
        name: str | None,
        op: int = ReduceOp.Sum,
        root: int = -1,
        prescale: float = 1.0,
        postscale: float = 1.0,
        process_set: int = 0,
        priority: int = 0,
        blocking: bool = False,
        numbers: Sequence[int] = (),
        exact_gradient: bool | None = None,
        generation: int = 0,
    ) -> None:
        self.world = world
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
        self.generation = generation

    @property
    def label(self) -> str:
        """Its name in messages."""
        return self.name or f"{OpKind(self.kind).name.lower()}.noname"

    def submit(self, inputs: Sequence[Any], outputs: Sequence[Any] | None) -> _core.Handle:
        """Submit it to its world's engine."""
        return self.world.engine.submit(
            self.kind,
            self.name,
            inputs,
            outputs,
            self.op,
            self.root,
            self.prescale,
            self.postscale,
            self.process_set,
            self.priority,
            self.blocking,
            self.numbers,
        )
