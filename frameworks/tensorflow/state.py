"""Variables and values from one rank to all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf
from polyhvd.tensorflow import ops
from polyhvd.tensorflow.gradients import grouped_by_dtype
from polyhvd.tensorflow.names import do_not_convert

from polyhvd.process_sets import ProcessSet, global_process_set
from polyhvd.state_sync import broadcast_object

__all__ = ["broadcast_", "broadcast_object_fn", "broadcast_variables"]


@do_not_convert
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Overwrite variables with the root's, and return them; in a graph, the assigned values.

    Args:
        variables: of TensorFlow or Keras, with equal shapes and dtypes on every rank.
        root_rank: world rank of the sender.
        name: matches the calls of the ranks.
        process_set: the ranks that take part.
    """
    variables = list(variables)
    values = [tf.convert_to_tensor(variable) for variable in variables]
    results: list[Any] = list(variables)
    for dtype, positions in grouped_by_dtype(values).items():
        received = ops.broadcast(
            [values[i] for i in positions],
            root_rank,
            name=f"{name or 'broadcast_variables'}.{dtype}",
            process_set=process_set,
        )
        for i, value in zip(positions, received, strict=True):
            assigned = variables[i].assign(value)
            if not tf.executing_eagerly():
                results[i] = assigned
    return results


@do_not_convert
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Overwrite variables with the root's; all of one dtype in one operation.

    Args:
        variables: as ``model.variables`` and ``optimizer.variables``, in the same order on every rank.
        root_rank: world rank of the sender.
        process_set: the ranks that take part.
        inplace: accepted for Horovod's sake; variables are always overwritten.

    Returns:
        In a graph of tf.compat.v1 the operation to run; else nothing of interest.
    """
    assigned = broadcast_(list(variables), root_rank, process_set=process_set)
    return None if tf.executing_eagerly() else tf.group(*assigned)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """A function that returns the root's object on every rank; see :func:`broadcast_object`."""
    return lambda obj: broadcast_object(obj, root_rank, name=name, process_set=process_set)
