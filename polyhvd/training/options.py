"""The options of all optimizers and gradient tapes: what each means and what is refused, in one place.

Knows no framework: what depends on the parameters of a model is checked in gradient_groups.py.
"""

from __future__ import annotations

import math
import numbers
import operator
import reprlib
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, fields
from typing import Any

from polyhvd.collectives.adapter import ReduceOp
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.errors import InvalidArgumentError
from polyhvd.training.compression import NO_COMPRESSION, AnyCompressor
from polyhvd.training.mapping import checked_mapping

__all__ = ["GRADIENT_OPS", "Options", "passes_per_step"]

#: What most optimizers reduce gradients with.
GRADIENT_OPS = (ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum)


@dataclass(frozen=True, eq=False, kw_only=True)
class Options:
    """The validated options of a distributed optimizer, trainer or tape.

    The fields are documented, for users, in polyhvd/collectives/table/options.py. An optimizer takes those
    that its framework has, and leaves the others at their defaults.

    Args:
        ops: the reductions that the optimizer can do. No option of users.

    Raises:
        InvalidArgumentError: a value cannot be used, or two exclude each other.

    Example::

        options = Options(op=ReduceOp.Average, gradient_predivide_factor=2.0)
        assert (options.prescale_factor, options.postscale_factor) == (0.5, 2.0)
    """

    op: int = ReduceOp.Average
    compression: AnyCompressor = NO_COMPRESSION
    backward_passes_per_step: int = 1
    average_aggregated_gradients: bool = False
    gradient_predivide_factor: float = 1.0
    num_groups: int = 0
    groups: Any = None
    sparse_as_dense: bool = False
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True
    mapping: Any = None
    ops: InitVar[Sequence[ReduceOp]] = GRADIENT_OPS

    def __post_init__(self, ops: Sequence[ReduceOp]) -> None:
        op = _reduction(self.op, ops)
        checked = {
            "op": op,
            "compression": _compressor(self.compression),
            "backward_passes_per_step": passes_per_step(self.backward_passes_per_step),
            "gradient_predivide_factor": _factor(self.gradient_predivide_factor, op),
            "num_groups": _count("num_groups", self.num_groups, 0),
            "groups": _groups(self.groups),
            "process_set": _process_set(self.process_set),
        }
        excluded = {
            "num_groups": checked["num_groups"],
            "groups": checked["groups"],
            "op=Adasum": op == ReduceOp.Adasum,
        }
        checked["mapping"] = checked_mapping(self.mapping, excluded)
        if checked["groups"] is not None and checked["num_groups"]:
            raise InvalidArgumentError(
                f"num_groups={self.num_groups} and groups exclude each other; pass only groups"
            )
        for name, value in checked.items():
            object.__setattr__(self, name, value)  # frozen after this

    def changed(self) -> dict[str, Any]:
        """Return the options that differ from their defaults: arguments that make the same options again."""
        changed = {}
        for field in fields(self):
            value, default = getattr(self, field.name), field.default
            # Others are compared by identity: tensors in lists are not to be compared by value.
            if value is not default and not (isinstance(default, (int, float)) and value == default):
                changed[field.name] = value
        return changed

    @property
    def prescale_factor(self) -> float:
        """The factor of gradients before the sum."""
        return 1.0 / self.gradient_predivide_factor

    @property
    def postscale_factor(self) -> float:
        """The factor of the sum, besides the division of an average."""
        return self.gradient_predivide_factor

    @property
    def passes_factor(self) -> float:
        """The factor of the sum of several passes."""
        return 1.0 / self.backward_passes_per_step if self.average_aggregated_gradients else 1.0

    @property
    def grouping(self) -> int | Sequence[Sequence[Any]]:
        """``groups`` or ``num_groups``, whichever was given: lists, or a number, which is 0 for no groups."""
        grouping: int | Sequence[Sequence[Any]] = self.num_groups if self.groups is None else self.groups
        return grouping


def passes_per_step(value: Any) -> int:
    """``backward_passes_per_step``, if it can be counted to: also for those that change it later.

    Args:
        value: an integer of 1 or more, of Python's or NumPy's.

    Raises:
        InvalidArgumentError: it is something else, such as True, or 2.0.
    """
    return _count("backward_passes_per_step", value, 1)


def _integer(value: Any) -> int | None:
    """An integer of Python's or NumPy's; None for others: True is no 1, and 1.0 neither."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _count(name: str, value: Any, least: int, otherwise: str = "") -> int:
    number = _integer(value)
    expected = f"expected an integer of {least} or more{otherwise}"
    if number is None:
        raise InvalidArgumentError(f"{name}={reprlib.repr(value)}: {expected}, found {type(value).__name__}")
    if number < least:
        raise InvalidArgumentError(f"{name}={number}: {expected}")
    return number


def _groups(value: Any) -> Any:
    """None, a number above 0, or a list of lists."""
    if value is None:
        return None
    if not isinstance(value, (list, tuple)):
        return _count("groups", value, 0, ", or a list of lists of parameters") or None
    for i, group in enumerate(value):
        if not isinstance(group, (list, tuple)):
            raise InvalidArgumentError(
                f"groups[{i}]: expected a list of parameters, found {type(group).__name__}"
            )
    return value


def _reduction(op: Any, ops: Sequence[ReduceOp]) -> ReduceOp:
    number = ReduceOp.Average if op is None else _integer(op)
    if number not in frozenset(ReduceOp):
        raise InvalidArgumentError(
            f"op={reprlib.repr(op)}: expected Average, Sum, Adasum, Min, Max or Product"
        )
    chosen = ReduceOp(number)
    if chosen not in ops:
        *first, last = (known.name for known in ops)
        raise InvalidArgumentError(
            f"op={chosen.name}: gradients are reduced with {', '.join(first)} or {last}"
        )
    return chosen


def _compressor(compression: Any) -> AnyCompressor:
    if compression is None:
        return NO_COMPRESSION
    for name in ("compress", "decompress"):
        if not callable(getattr(compression, name, None)):
            raise InvalidArgumentError(
                f"compression={reprlib.repr(compression)}: expected an object with compress() and "
                f"decompress(), such as Compression.fp16; it has no {name}()"
            )
    checked: AnyCompressor = compression
    return checked


def _factor(value: Any, op: ReduceOp) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidArgumentError(
            f"gradient_predivide_factor={reprlib.repr(value)}: expected a positive number, "
            f"found {type(value).__name__}"
        )
    factor = float(value)
    if factor == 1.0:
        return factor
    if op != ReduceOp.Average:
        raise InvalidArgumentError(
            f"gradient_predivide_factor={factor} needs op=Average, and op is {op.name}"
        )
    if not (factor > 0 and math.isfinite(factor)):
        raise InvalidArgumentError(f"gradient_predivide_factor={factor}: expected a positive number, finite")
    return factor


def _process_set(value: Any) -> ProcessSet:
    if not isinstance(value, ProcessSet):
        raise InvalidArgumentError(
            f"process_set={reprlib.repr(value)}: expected a ProcessSet, found {type(value).__name__}; make "
            "one with add_process_set(ranks)"
        )
    return value
