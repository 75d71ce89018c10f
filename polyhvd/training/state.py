"""Named tensors from one rank to all, in any framework, and states of nested containers that hold them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from polyhvd.collectives.objects import allgather_object
from polyhvd.collectives.operation import process_set_id
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.collectives.verbs import Collectives
from polyhvd.errors import InvalidArgumentError
from polyhvd.runtime import current
from polyhvd.training.naming import require_same_names

__all__ = ["MODEL_ADVICE", "broadcast_named", "by_rank", "changed", "put_tensors", "take_tensors"]

T = TypeVar("T")

#: What to do where ranks have passed different parameters.
MODEL_ADVICE = "build the same model on every rank, and pass the same parameters"


def broadcast_named(
    collectives: Collectives[T],
    named: list[tuple[str, T]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    prefix: str = "parameter",
    names: Iterable[str] | None = None,
) -> None:
    """Overwrite tensors with the root's, in place; names are the same on every rank.

    When one fails, the others are waited for all the same, and the first error is raised. Calls with one
    prefix follow each other, whatever their threads.

    Args:
        collectives: of the framework.
        named: the tensors with their names.
        root_rank: world rank of the sender.
        process_set: the ranks that take part.
        prefix: of the operations' names.
        names: what the user has passed to broadcast_parameters(): ranks compare it first.

    Raises:
        RankMismatchError: shapes, dtypes or ``names`` differ between ranks.
    """
    first_error: Exception | None = None
    number = process_set_id(process_set)
    with collectives.world.line(prefix, number):
        if names is not None:
            require_same_names(collectives.world, number, "broadcast_parameters", names, MODEL_ADVICE, prefix)
        handles = [
            collectives.broadcast_async(
                tensor, root_rank, name=f"{prefix}.{name}", process_set=process_set, in_place=True
            )
            for name, tensor in named
        ]
        for handle in handles:
            try:
                collectives.synchronize(handle)
            except Exception as error:
                first_error = first_error or error
    if first_error is not None:
        raise first_error


def by_rank(call: str, value: Any, name: str, root_rank: int, process_set: ProcessSet) -> dict[int, Any]:
    """Values of the ranks that take part in a call, by their ranks; those that have joined have none.

    Args:
        call: what it is, in messages.
        value: of this rank.
        name: of the operation.
        root_rank: world rank of the sender.
        process_set: the ranks that take part.

    Raises:
        InvalidArgumentError: the sender does not take part; on every rank.
    """
    found = dict(allgather_object((current.world().placement.rank, value), name, process_set))
    if root_rank not in found:
        raise InvalidArgumentError(
            f"{call}: root rank {root_rank} is not one of the ranks that take part, which are "
            f"{', '.join(map(str, found))}; pass one of them"
        )
    return found


class _Place:
    """Stands for a tensor in a state that is sent without them."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __deepcopy__(self, memo: object) -> _Place:
        return self  # it never changes, and a commit copies one for each tensor


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of nested dicts, lists and tuples in which ``change`` was applied to what they hold."""
    if type(value) is dict:
        return {key: changed(item, change) for key, item in value.items()}
    if type(value) is OrderedDict:  # PyTorch keeps versions of modules in an attribute of it
        copy = OrderedDict((key, changed(item, change)) for key, item in value.items())
        vars(copy).update(vars(value))
        return copy
    if type(value) in (list, tuple):
        return type(value)(changed(item, change) for item in value)
    return change(value)


def take_tensors(state: Any, is_tensor: Callable[[Any], bool]) -> tuple[Any, list[Any]]:
    """A copy of a state of nested dicts, lists and tuples without its tensors, and these in order."""
    tensors: list[Any] = []

    def take(value: Any) -> Any:
        if not is_tensor(value):
            return value
        tensors.append(value)
        return _Place(len(tensors) - 1)

    return changed(state, take), tensors


def put_tensors(state: Any, tensors: Sequence[Any]) -> Any:
    """The state that :func:`take_tensors` has taken apart, with these tensors in their places."""
    return changed(state, lambda value: tensors[value.number] if isinstance(value, _Place) else value)
