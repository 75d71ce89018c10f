"""Which parameters an optimizer reduces together, by ``grouping`` of its options. Knows no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyhvd.errors import InvalidArgumentError

__all__ = ["KeyGroups", "parameter_groups"]


def parameter_groups(
    parameters: Sequence[Any], trainable: Sequence[int], grouping: int | Sequence[Sequence[Any]]
) -> list[list[int]]:
    """Positions of the parameters of each group, in ascending order.

    Args:
        parameters: all of the optimizer's; compared by identity.
        trainable: positions of those that can be in a group.
        grouping: of :class:`polyhvd.training.options.Options`: how many groups of neighbours to make, of
            nearly the same number of parameters; or lists of parameters. Those in none are reduced by
            themselves.

    Raises:
        InvalidArgumentError: a group has what is not a parameter, or what another one has.
    """
    if isinstance(grouping, int):
        return _split(trainable, grouping)
    chosen = set(trainable)
    listed = _checked(parameters, grouping)
    return [some for group in listed if (some := sorted(chosen.intersection(group)))]


class KeyGroups:
    """The same for an optimizer that gets its parameters, by keys, only with their gradients.

    Args:
        grouping: as of :func:`parameter_groups`: a number, of the gradients that come together; or lists of
            keys.

    Raises:
        InvalidArgumentError: a key is in two groups.
    """

    def __init__(self, grouping: int | Sequence[Sequence[Any]] = 0) -> None:
        self._count = grouping if isinstance(grouping, int) else 0
        self._group_of: dict[Any, int] = {}
        for i, group in enumerate([] if isinstance(grouping, int) else grouping):
            for j, key in enumerate(group):
                _put(self._group_of, key, i, j)

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self._count or self._group_of)

    @property
    def are_listed(self) -> bool:
        """Whether there are lists, not a number."""
        return bool(self._group_of)

    def numbered(
        self, keys: Sequence[Any], members: Sequence[Any] | None = None
    ) -> list[tuple[int | None, list[Any]]]:
        """The keys in groups, each with its number, in the order of each group's first.

        Args:
            keys: of the gradients.
            members: what the lists call these; None: the same.

        Returns:
            Each parameter without a group is listed by itself, with None.
        """
        if self._count:
            parts = _split(range(len(keys)), self._count)
            return [(number, [keys[i] for i in part]) for number, part in enumerate(parts)]
        divided: dict[int, list[Any]] = {}
        for position, (key, member) in enumerate(zip(keys, members or keys, strict=True)):
            divided.setdefault(self._group_of.get(member, -1 - position), []).append(key)
        return [(None if number < 0 else number, group) for number, group in divided.items()]


def _split(positions: Sequence[int], count: int) -> list[list[int]]:
    """Split positions into parts that are as equal as possible, the longer ones first, none of them empty."""
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
        for j, parameter in enumerate(group):
            position = positions.get(id(parameter))
            if position is None:
                raise InvalidArgumentError(
                    f"groups[{i}][{j}] ({type(parameter).__name__}) is not a parameter of this optimizer; "
                    "leave it out"
                )
            _put(group_of, position, i, j)
    return [[p for p, owner in group_of.items() if owner == i] for i in range(len(groups))]


def _put(group_of: dict[Any, int], key: Any, i: int, j: int) -> None:
    if key in group_of:
        raise InvalidArgumentError(
            f"groups[{i}][{j}] is in groups[{group_of[key]}] already; a parameter can be in one group only"
        )
    group_of[key] = i
