"""Which parameters an optimizer reduces together, by ``num_groups`` and ``groups``. Knows no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyhvd.errors import InvalidArgumentError

__all__ = ["KeyGroups", "parameter_groups"]


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
    _check_exclusive(num_groups, groups)
    if isinstance(groups, (list, tuple)):
        chosen = set(trainable)
        listed = _checked(parameters, groups)
        return [some for group in listed if (some := sorted(chosen.intersection(group)))]
    if groups is None:
        return _split(trainable, _count("num_groups", num_groups, 0))
    return _split(trainable, _count("groups", groups, 1))


class KeyGroups:
    """The same for an optimizer that hears of its parameters, by keys, only when gradients come.

    Args:
        num_groups: as of :func:`parameter_groups`, of the gradients that come together.
        groups: a list of lists of keys; or a number, which means ``num_groups``; or None.

    Raises:
        InvalidArgumentError: both are given, or one cannot be used.
    """

    def __init__(self, num_groups: int = 0, groups: Any = None) -> None:
        _check_exclusive(num_groups, groups)
        self._count = 0
        self._group_of: dict[Any, int] = {}
        if isinstance(groups, (list, tuple)):
            for i, group in enumerate(groups):
                for j, key in enumerate(_listed(i, group, "keys")):
                    _put(self._group_of, key, i, j)
        elif groups is None:
            self._count = _count("num_groups", num_groups, 0)
        else:
            self._count = _count("groups", groups, 1)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._count or self._group_of)

    def divide(self, keys: Sequence[Any]) -> list[list[Any]]:
        """The keys in groups, in the order of each group's first; those of no group are alone."""
        if self._count:
            return [[keys[i] for i in part] for part in _split(range(len(keys)), self._count)]
        divided: dict[Any, list[Any]] = {}
        for position, key in enumerate(keys):
            divided.setdefault(self._group_of.get(key, -1 - position), []).append(key)
        return list(divided.values())


def _check_exclusive(num_groups: int, groups: Any) -> None:
    if groups is not None and num_groups != 0:
        raise InvalidArgumentError(
            f"num_groups={num_groups} and groups exclude each other; pass groups alone"
        )


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
        for j, parameter in enumerate(_listed(i, group, "parameters")):
            position = positions.get(id(parameter))
            if position is None:
                raise InvalidArgumentError(
                    f"groups[{i}][{j}] ({type(parameter).__name__}) is no parameter of this optimizer; "
                    "leave it out"
                )
            _put(group_of, position, i, j)
    return [[p for p, owner in group_of.items() if owner == i] for i in range(len(groups))]


def _listed(i: int, group: Any, what: str) -> Sequence[Any]:
    if not isinstance(group, (list, tuple)):
        raise InvalidArgumentError(f"groups[{i}]: expected a list of {what}, found {type(group).__name__}")
    return group


def _put(group_of: dict[Any, int], key: Any, i: int, j: int) -> None:
    if key in group_of:
        raise InvalidArgumentError(
            f"groups[{i}][{j}] is in groups[{group_of[key]}] already; a parameter can be in one group only"
        )
    group_of[key] = i
