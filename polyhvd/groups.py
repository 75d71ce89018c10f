"""Which parameters an optimizer reduces together, by ``num_groups`` and ``groups``. Knows no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyhvd.errors import InvalidArgumentError

__all__ = ["parameter_groups"]


def parameter_groups(
    parameters: Sequence[Any], trainable: Sequence[int], num_groups: int = 0, groups: Any = None
) -> list[list[int]]:
    """Positions of the parameters of each group, in ascending order.

    Args:
        parameters: all of the optimizer's; told apart by identity.
        trainable: positions of those that can be in a group.
        num_groups: how many groups of neighbours to make, of nearly the same number of parameters; 0: none.
        groups: a list of lists of parameters; or a number, which means ``num_groups``; or None. Parameters
            in no group are reduced by themselves.

    Raises:
        InvalidArgumentError: both are given, or one cannot be used.
    """
    if groups is not None and num_groups != 0:
        raise InvalidArgumentError(
            f"num_groups={num_groups} and groups exclude each other; pass groups alone"
        )
    if isinstance(groups, (list, tuple)):
        chosen = set(trainable)
        listed = _checked(parameters, groups)
        return [some for group in listed if (some := sorted(chosen.intersection(group)))]
    if groups is None:
        return _split(trainable, _count("num_groups", num_groups, 0))
    return _split(trainable, _count("groups", groups, 1))


def _count(name: str, value: Any, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        kinds = "a whole number" + (", or a list of lists of parameters" if name == "groups" else "")
        raise InvalidArgumentError(f"{name}={value!r}: expected {kinds}, of {least} or more")
    return value


def _split(positions: Sequence[int], count: int) -> list[list[int]]:
    """As equal parts as possible, the first ones one longer, none of them empty."""
    count = min(count, len(positions))
    parts: list[list[int]] = []
    begin = 0
    for i in range(count):
        end = begin + len(positions) // count + (i < len(positions) % count)
        parts.append(list(positions[begin:end]))
        begin = end
    return parts


def _checked(parameters: Sequence[Any], groups: Sequence[Any]) -> list[list[int]]:
    positions = {id(parameter): position for position, parameter in enumerate(parameters)}
    group_of: dict[int, int] = {}
    for i, group in enumerate(groups):
        if not isinstance(group, (list, tuple)):
            raise InvalidArgumentError(
                f"groups[{i}]: expected a list of parameters, found {type(group).__name__}"
            )
        for j, parameter in enumerate(group):
            position = positions.get(id(parameter))
            if position is None:
                raise InvalidArgumentError(
                    f"groups[{i}][{j}] ({type(parameter).__name__}) is no parameter of this optimizer; "
                    "leave it out"
                )
            if position in group_of:
                raise InvalidArgumentError(
                    f"groups[{i}][{j}] is in groups[{group_of[position]}] already; a parameter can be in one "
                    "group only"
                )
            group_of[position] = i
    return [[p for p, owner in group_of.items() if owner == i] for i in range(len(groups))]
