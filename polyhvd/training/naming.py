"""Checks that all ranks use the same names, and gathers values that ranks pair by name."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyhvd.collectives.objects import gather_objects
from polyhvd.collectives.operation import process_set_id
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.errors import InvalidArgumentError, RankMismatchError
from polyhvd.runtime import current
from polyhvd.runtime.world import World

__all__ = [
    "NUMBER_ADVICE",
    "ORDER_ADVICE",
    "digest",
    "gather_by_name",
    "numbered",
    "refuse_other_names",
    "require_same_names",
    "require_same_order",
]

#: What to do about :func:`require_same_order`'s error.
NUMBER_ADVICE = "build the model and the optimizer on every rank before"
ORDER_ADVICE = "pass them in the same order on every rank, such as that of model.variables"

_NAMES_SHOWN, _GROUPS_SHOWN, _RANKS_SHOWN = 5, 4, 8


def numbered(names: Iterable[str]) -> list[str]:
    """The names, with ``(2)``, ``(3)`` and so on appended to repeated ones."""
    seen: Counter[str] = Counter()
    result = []
    for name in names:
        seen[name] += 1
        result.append(f"{name} ({seen[name]})" if seen[name] > 1 else name)
    return result


def digest(names: Iterable[str]) -> bytes:
    """Sixteen bytes that differ if the names do; their order does not matter."""
    return hashlib.blake2b("\0".join(sorted(names)).encode(), digest_size=16).digest()


def require_same_names(
    world: World, number: int, call: str, names: Iterable[str], advice: str = "", label: str = ""
) -> None:
    """Return if all ranks have passed the same names, in any order.

    Each rank sends a digest; only ranks whose digests differ send their names.

    Args:
        world: in which the ranks are.
        number: of the process set that takes part.
        call: the function that the user has called: the beginning of the error.
        names: of this rank.
        advice: the end of the error: what to do.
        label: the beginning of the operations' names; ``call`` if empty.

    Raises:
        RankMismatchError: the names differ; on every rank, with the names that not all ranks have.
    """
    if world.engine.behind:
        return  # no other rank makes this call
    own, label = numbered(names), label or call
    if len(set(gather_objects(world, number, digest(own), f"{label}.digests"))) > 1:
        refuse_other_names(world, number, call, own, advice, label)


def refuse_other_names(
    world: World, number: int, call: str, names: Iterable[str], advice: str = "", label: str = ""
) -> None:
    """Raise the error of :func:`require_same_names`; all ranks have found that their names differ."""
    own = (world.placement.rank, list(names))
    by_rank = dict(gather_objects(world, number, own, f"{label or call}.names"))
    raise RankMismatchError(f"{call}: {_difference(by_rank)}{advice and '; '}{advice}")


def require_same_order(
    world: World,
    number: int,
    call: str,
    names: Iterable[str],
    advice: str = "",
    label: str = "",
    *,
    advice_on_number: str = "",
) -> None:
    """Return unless ranks have passed the same names in different orders.

    For values that are paired by position because their names may differ: Keras, for example, numbers layers
    in the order in which a process makes them. So ranks with other names pass.

    Args:
        world: as of :func:`require_same_names`, like all others.
        number: likewise.
        call: likewise.
        names: of this rank.
        advice: as of :func:`require_same_names`.
        label: likewise.
        advice_on_number: what to do if ranks have passed other numbers of names, which is an error then;
            empty: it is not.

    Raises:
        RankMismatchError: the orders differ, or the numbers; on every rank, with the first position.
    """
    if world.engine.behind:
        return  # no other rank makes this call
    own, label = numbered(names), label or call
    in_order = digest(f"{position:09} {name}" for position, name in enumerate(own))
    mine = (in_order, digest(own), (len(own), world.placement.rank))
    orders, sets, counts = zip(*gather_objects(world, number, mine, f"{label}.digests"), strict=True)
    if advice_on_number and len(dict(counts)) > 1:
        ranks_of: dict[int, list[int]] = {}
        for count, rank in counts:
            ranks_of.setdefault(count, []).append(rank)
        numbers = [f"{_having(ranks)} {count}" for count, ranks in list(ranks_of.items())[:_GROUPS_SHOWN]]
        raise RankMismatchError(
            f"{call}: the ranks have different numbers of variables: {'; '.join(numbers)}; {advice_on_number}"
        )
    if len(set(orders)) == 1 or len(set(sets)) > 1:
        return
    by_rank = dict(gather_objects(world, number, (world.placement.rank, own), f"{label}.names"))
    position, found = next(
        (i, found) for i, found in enumerate(zip(*by_rank.values(), strict=True)) if len(set(found)) > 1
    )
    ranks_with: dict[str, list[int]] = {}
    for rank, name in zip(by_rank, found, strict=True):
        ranks_with.setdefault(name, []).append(rank)
    groups = [_group(ranks, (name,)) for name, ranks in list(ranks_with.items())[:_GROUPS_SHOWN]]
    raise RankMismatchError(
        f"{call}: the ranks have the same names in different orders: at position {position}, "
        f"{'; '.join(groups)}{advice and '; '}{advice}"
    )


def gather_by_name(
    call: str,
    values: Mapping[str, Any],
    process_set: ProcessSet = global_process_set,
    advice: str = "",
) -> dict[str, NDArray[np.float64]]:
    """Every rank's value of each name: ``[ranks, ...]``, in order of rank.

    Calls with one ``call`` follow each other, whatever their threads.

    Args:
        call: as of :func:`require_same_names`.
        values: numbers or arrays of numbers by their names.
        process_set: the ranks that take part.
        advice: as of :func:`require_same_names`.

    Raises:
        RankMismatchError: names or shapes differ between ranks; on every rank.
        InvalidArgumentError: a value is not a number; on every rank.
    """
    world, number = process_set.world or current.world(), process_set_id(process_set)
    own = (world.placement.rank, {name: _numbers(value) for name, value in values.items()})
    with world.line(call, number):
        by_rank = dict(gather_objects(world, number, own, call))
    if len({frozenset(other) for other in by_rank.values()}) > 1:
        raise RankMismatchError(f"{call}: {_difference(by_rank)}{advice and '; '}{advice}")
    return {
        name: _rows(call, name, {rank: other[name] for rank, other in by_rank.items()}) for name in values
    }


def _rows(call: str, name: str, by_rank: Mapping[int, NDArray[np.float64] | str]) -> NDArray[np.float64]:
    arrays = []
    for rank, value in by_rank.items():
        if isinstance(value, str):
            raise InvalidArgumentError(f"{call}: {name!r} is not a number: rank {rank} has {value}")
        arrays.append(value)
    if len({array.shape for array in arrays}) > 1:
        shapes = zip(by_rank, (array.shape for array in arrays), strict=True)
        found = ", ".join(f"{shape} on rank {rank}" for rank, shape in list(shapes)[:_RANKS_SHOWN])
        raise RankMismatchError(f"{call}: the shape of {name!r} differs between ranks: {found}")
    return np.stack(arrays)


def _numbers(value: Any) -> NDArray[np.float64] | str:
    """A value as an array; or as a text that describes it."""
    try:
        return np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        return f"{type(value).__name__}: {value!r:.60}"


def _difference(by_rank: Mapping[int, Iterable[str]]) -> str:
    """The names that not all ranks have: ``rank 0 has 'a'; ranks 1, 2 have 'b', 'c'``."""
    sets = {rank: set(names) for rank, names in by_rank.items()}
    common = set.intersection(*sets.values())
    ranks_with: dict[tuple[str, ...], list[int]] = {}
    for rank, names in sets.items():
        ranks_with.setdefault(tuple(sorted(names - common)), []).append(rank)
    groups = [_group(ranks, names) for names, ranks in list(ranks_with.items())[:_GROUPS_SHOWN]]
    more = [f"and {len(ranks_with) - _GROUPS_SHOWN} more"] if len(ranks_with) > _GROUPS_SHOWN else []
    besides = f"besides {len(common)} in common " if common else ""
    return f"the ranks have different names: {besides}{'; '.join(groups + more)}"


def _group(ranks: list[int], names: tuple[str, ...]) -> str:
    if not names:
        return f"{_having(ranks)} no others"
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"{_having(ranks)} {', '.join(map(repr, names[:_NAMES_SHOWN]))}{more}"


def _having(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_RANKS_SHOWN]))
    return f"rank {shown} has" if len(ranks) == 1 else f"ranks {shown} have"
