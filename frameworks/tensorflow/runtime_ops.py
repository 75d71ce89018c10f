"""Ranks and sizes as tensors, of the time when a graph runs and not when it was traced."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf
from polyhvd.tensorflow.errors import invalid
from polyhvd.tensorflow.names import do_not_convert

from polyhvd.runtime import current

__all__ = ["local_rank_op", "local_size_op", "process_set_included_op", "rank_op", "size_op"]


def _scalar(read: Callable[[], int], name: str | None) -> tf.Tensor:
    if tf.executing_eagerly():
        return tf.constant(read(), tf.int32)
    value = tf.numpy_function(lambda: np.int32(read()), [], tf.int32, name=name)
    value.set_shape([])
    return value


def _of_set(read: Callable[[list[int]], int], process_set_id: int, name: str | None) -> tf.Tensor:
    """A number that is read from the members of a set, which is to be there when a graph is made, too."""
    if not tf.executing_eagerly() and current.find() is not None:
        _members(process_set_id)
    return _scalar(lambda: read(_members(process_set_id)), name)


def _members(process_set_id: int) -> list[int]:
    ranks = current.world().process_sets().get(process_set_id)
    if ranks is None:
        raise invalid(f"process_set_id={process_set_id}: there is no such process set; see add_process_set()")
    return ranks


@do_not_convert
def rank_op(name: str | None = None) -> tf.Tensor:
    """World rank of this process.

    Args:
        name: of the operation in a graph.

    Returns:
        A scalar of int32, eager or in a graph, where it is read when the graph runs.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.

    Example::

        is_root = tf.equal(hvd.rank_op(), 0)
    """
    return _scalar(lambda: current.world().placement.rank, name)


@do_not_convert
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Rank among the processes of this host.

    Args:
        name: of the operation in a graph.

    Returns:
        A scalar of int32, eager or in a graph, where it is read when the graph runs.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.

    Example::

        number = hvd.local_rank_op()
    """
    return _scalar(lambda: current.world().placement.local_rank, name)


@do_not_convert
def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Number of ranks in the job, or in a process set.

    Args:
        process_set_id: number of a process set; 0 is that of all ranks.
        name: of the operation in a graph.

    Returns:
        A scalar of int32, eager or in a graph, where it is read when the graph runs.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        tf.errors.InvalidArgumentError: there is no such process set.

    Example::

        mean = total / tf.cast(hvd.size_op(), total.dtype)
    """
    return _of_set(len, process_set_id, name)


@do_not_convert
def local_size_op(name: str | None = None) -> tf.Tensor:
    """Number of ranks on this host.

    Args:
        name: of the operation in a graph.

    Returns:
        A scalar of int32, eager or in a graph, where it is read when the graph runs.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.

    Example::

        number = hvd.local_size_op()
    """
    return _scalar(lambda: current.world().placement.local_size, name)


@do_not_convert
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """1 if this rank is in the process set, else 0.

    Args:
        process_set_id: number of a process set; 0 is that of all ranks.
        name: of the operation in a graph.

    Returns:
        A scalar of int32, eager or in a graph, where it is read when the graph runs.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        tf.errors.InvalidArgumentError: there is no such process set.

    Example::

        is_member = tf.equal(hvd.process_set_included_op(even.process_set_id), 1)
    """
    return _of_set(lambda ranks: int(current.world().placement.rank in ranks), process_set_id, name)
