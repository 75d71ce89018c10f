"""Variables and values from one rank to all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import tensorflow as tf
from polyhvd.tensorflow import ops
from polyhvd.tensorflow.errors import as_tensorflow
from polyhvd.tensorflow.gradients import accept_device
from polyhvd.tensorflow.names import do_not_convert

from polyhvd.collectives import objects
from polyhvd.collectives.operation import process_set_id
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.runtime import current
from polyhvd.training.naming import NUMBER_ADVICE, ORDER_ADVICE, require_same_order

__all__ = [
    "BroadcastGlobalVariablesHook",
    "allgather_object",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
]


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
        name: matches the calls of the ranks; without one, those of several threads follow each other.
        process_set: the ranks that take part.

    Raises:
        tf.errors.FailedPreconditionError: number, shapes or dtypes differ between ranks, or, in eager mode,
            the order of equal names.
        tf.errors.AbortedError: a rank was lost.

    Example::

        hvd.broadcast_(model.variables, root_rank=0)
    """
    variables = list(variables)
    is_compared = tf.executing_eagerly() and process_set.process_set_id is not None
    if not variables and not (is_compared and current.find() is not None and process_set.included()):
        return []
    sent = [tf.convert_to_tensor(variable) for variable in variables]
    label = name or "broadcast_variables"
    with nullcontext() if name else current.world().line(label, process_set.process_set_id or 0):
        if is_compared:  # also of a rank that has no variables, as others may have some
            _require_same_order(variables, label, process_set)
        if not variables:
            return []
        received = ops.broadcast(sent, root_rank, name=label, process_set=process_set)
    assigned = [variable.assign(value) for variable, value in zip(variables, received, strict=True)]
    return variables if tf.executing_eagerly() else assigned


def _require_same_order(variables: Sequence[Any], label: str, process_set: ProcessSet) -> None:
    names = [str(getattr(variable, "path", None) or variable.name) for variable in variables]
    world, number = process_set.world or current.world(), process_set_id(process_set)
    with as_tensorflow():
        require_same_order(
            world,
            number,
            "broadcast_variables",
            names,
            ORDER_ADVICE,
            label,
            advice_on_number=NUMBER_ADVICE,
        )


@do_not_convert
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Overwrite variables with the root's; all in one operation.

    Args:
        variables: as ``model.variables`` and ``optimizer.variables``, in the same order on every rank.
        root_rank: world rank of the sender.
        process_set: the ranks that take part.
        inplace: accepted for compatibility with Horovod; variables are always overwritten.

    Returns:
        In a graph of tf.compat.v1 the operation to run; else nothing of interest.

    Raises:
        tf.errors.FailedPreconditionError: as of :func:`broadcast_`.
        tf.errors.AbortedError: a rank was lost.

    Example::

        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables, root_rank=0)
    """
    assigned = broadcast_(list(variables), root_rank, process_set=process_set)
    return None if tf.executing_eagerly() else tf.group(*assigned)


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's object on every rank; see :func:`polyhvd.broadcast_object`.

    Args:
        obj: anything that can be pickled; only the root's matters.
        root_rank: world rank of the sender.
        session: accepted for compatibility with Horovod; no graph is run.
        name: matches the calls of the ranks.
        process_set: the ranks that take part.

    Raises:
        tf.errors.InvalidArgumentError: the root is not in the process set.
        tf.errors.AbortedError: a rank was lost.

    Example::

        epoch = hvd.broadcast_object(epoch, root_rank=0)
    """
    with as_tensorflow():
        return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """A function that returns the root's object on every rank.

    Args:
        root_rank: as of :func:`broadcast_object`.
        session: likewise.
        name: likewise.
        process_set: likewise.

    Raises:
        Nothing by itself; the function raises what :func:`broadcast_object` does.

    Example::

        share = hvd.broadcast_object_fn(root_rank=0)
        epoch = share(epoch)
    """
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return all ranks' objects on every rank; see :func:`polyhvd.allgather_object`.

    Args:
        obj: anything that can be pickled.
        session: accepted for compatibility with Horovod; no graph is run.
        name: matches the calls of the ranks.
        process_set: the ranks that take part.

    Raises:
        tf.errors.AbortedError: a rank was lost.

    Example::

        losses = hvd.allgather_object(float(loss))
    """
    with as_tensorflow():
        return objects.allgather_object(obj, name, process_set)


def broadcast_global_variables(root_rank: int) -> Any:
    """The operation that overwrites all global variables of a tf.compat.v1 graph with the root's.

    Args:
        root_rank: world rank of the sender.

    Raises:
        RuntimeError: in eager mode, which has no global variables.

    Example::

        session.run(tf.compat.v1.global_variables_initializer())
        session.run(hvd.broadcast_global_variables(0))
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "broadcast_global_variables() needs a graph of tf.compat.v1; use "
            "broadcast_variables(model.variables, root_rank), or BroadcastGlobalVariablesCallback"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Starts all ranks with the root's variables, for ``tf.compat.v1.train.MonitoredTrainingSession``.

    Args:
        root_rank: world rank of the sender.
        device: accepted for compatibility with Horovod.

    Raises:
        tf.errors.InvalidArgumentError: ``device`` is not the host.
        tf.errors.FailedPreconditionError: when the session is made, the ranks' variables differ.

    Example::

        hooks = [hvd.BroadcastGlobalVariablesHook(0)]
        with tf.compat.v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            session.run(train_step)
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        accept_device(type(self).__name__, device=device)
        self.root_rank = root_rank
        self._send: Any = None

    def begin(self) -> None:
        """Add the operation to the graph, once."""
        if self._send is None or self._send.graph is not tf.compat.v1.get_default_graph():
            self._send = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run it, when variables are initialised or restored."""
        session.run(self._send)
