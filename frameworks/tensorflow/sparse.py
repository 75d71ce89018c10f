"""Reduction of tf.IndexedSlices, the gradients of embeddings, in time and bytes that follow their rows.

They are sent as described in polyhvd.collectives.sparse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf
from polyhvd.tensorflow import ops
from polyhvd.tensorflow.errors import UnsupportedError
from polyhvd.tensorflow.runtime_ops import size_op

from polyhvd.collectives.adapter import ReduceOp
from polyhvd.collectives.process_sets import ProcessSet
from polyhvd.training.compression import Compressor

__all__ = ["allreduce", "divided", "merged", "size_of"]


def size_of(process_set: ProcessSet) -> Any:
    """The number of ranks when a graph runs: a function is not traced again when an elastic world changes.

    A tensor of int32 in a graph, else an int.
    """
    if tf.executing_eagerly() or not tf.compat.v1.executing_eagerly_outside_functions():
        return process_set.size()
    process_set.size()  # raises an error if the set does not exist
    return size_op(process_set.process_set_id or 0)


def _scaled(values: tf.Tensor, factor: Any) -> tf.Tensor:
    """Integers are multiplied as doubles and truncated, as in reductions of dense tensors."""
    if isinstance(factor, float) and factor == 1.0:
        return values
    if values.dtype.is_floating and tf.is_tensor(factor):
        return values * tf.cast(factor, values.dtype)
    if values.dtype.is_floating:
        return values * tf.constant(factor, values.dtype)  # tf.cast would round it to float32 first
    return tf.cast(tf.cast(values, tf.float64) * factor, values.dtype)


def _divided(values: tf.Tensor, divisor: Any, factor: float) -> tf.Tensor:
    """Integers, as floating-point numbers."""
    return tf.truediv(values, tf.cast(divisor, values.dtype)) * factor


def allreduce(
    slices: Sequence[tf.IndexedSlices],
    *,
    name: str | None,
    op: int,
    compression: Compressor,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    mark: int = 0,
) -> list[tf.IndexedSlices]:
    """Gather the slices of all ranks, as one operation: an index then stands for the sum of its slices.

    Scaled integers come back with each index once, as they are to be added up before they are truncated. An
    average of integers is of floating-point numbers, as Horovod's is.

    Args:
        slices: of any number of rows, which may differ between ranks.
        name: matches the calls of the ranks.
        op: Average or Sum.
        compression: of the values on the wire.
        prescale_factor, postscale_factor: multiply the values.
        process_set: the ranks that take part.
        mark: if it is not 0, ranks with different ones get an error instead of results.

    Raises:
        UnsupportedError: another ``op``.
    """
    if op not in (ReduceOp.Average, ReduceOp.Sum):
        raise UnsupportedError(
            None,
            None,
            f"op={ReduceOp(op).name}: tf.IndexedSlices are reduced with Average or Sum; for others convert "
            "them with tf.convert_to_tensor(), or pass sparse_as_dense=True to the optimizer or tape",
        )
    size = size_of(process_set) if op == ReduceOp.Average else 1
    post = postscale_factor / tf.cast(size, tf.float64) if tf.is_tensor(size) else postscale_factor / size
    is_scaled = op == ReduceOp.Average or (prescale_factor, postscale_factor) != (1.0, 1.0)
    exact = [is_scaled and not each.dtype.is_floating for each in slices]
    parts = [
        _with_values(merged(each), lambda values: _scaled(values, prescale_factor)) if is_exact else each
        for each, is_exact in zip(slices, exact, strict=True)
    ]
    pairs = [compression.compress(each.values) for each in parts]
    sent = []
    for each, (sent_values, _) in zip(parts, pairs, strict=True):
        sent += [tf.cast(each.indices, tf.int64)[:, None], sent_values, _shape(each)]
    if mark:
        sent.append(tf.zeros([0, mark], tf.int64))
    # A reduction, whose gradient is never scaled like an allgather's.
    gathered = ops.allgather(sent, name=name, process_set=process_set, exact_gradient=True)
    results = []
    for i, each in enumerate(slices):
        indices, numbers, shapes = gathered[3 * i : 3 * i + 3]
        with tf.control_dependencies([_same_shapes(shapes, name)]):
            values: Any = tf.identity(compression.decompress(numbers, pairs[i][1]))
        result = tf.IndexedSlices(values, tf.cast(indices[:, 0], each.indices.dtype), each.dense_shape)
        if not exact[i]:
            change = partial(_scaled, factor=prescale_factor * post)
        elif op == ReduceOp.Average:
            change = partial(_divided, divisor=size, factor=postscale_factor)
        else:
            change = partial(_scaled, factor=post)
        results.append(_with_values(merged(result) if exact[i] else result, change))
    return results


def _shape(slices: tf.IndexedSlices) -> tf.Tensor:
    """The shape to send: the number of sparse dimensions (one), then all sizes; -1 for an unknown one."""
    if slices.dense_shape is not None:
        shape = tf.cast(slices.dense_shape, tf.int64)
    else:
        shape = tf.concat([[-1], tf.shape(slices.values, out_type=tf.int64)[1:]], axis=0)
    return tf.concat([[1], shape], axis=0)[None]


def _same_shapes(shapes: tf.Tensor, name: str | None) -> tf.Operation:
    """An assertion that the ranks' slices belong to tensors of the same shape."""
    most = tf.reduce_max(shapes, axis=0)
    # In graphs of version 1 `==` compares Python's objects.
    agree = tf.reduce_all(tf.equal(shapes, most) | (shapes < 0))
    text = (
        f"Mismatched sparse_allreduce tensor shapes: {name!r} is, in order of rank, as follows, with the "
        "number of sparse dimensions before each; reduce tensors of one shape"
    )
    return tf.debugging.Assert(agree, [text, shapes], summarize=64)


def _with_values(slices: tf.IndexedSlices, change: Callable[[tf.Tensor], tf.Tensor]) -> tf.IndexedSlices:
    return tf.IndexedSlices(change(slices.values), slices.indices, slices.dense_shape)


def divided(gradient: Any, divisor: Any) -> Any:
    """A tensor or slices of floating-point numbers, divided."""
    if tf.is_tensor(divisor):
        divisor = tf.cast(divisor, gradient.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / divisor, gradient.indices, gradient.dense_shape)
    return tf.convert_to_tensor(gradient) / divisor


def merged(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """The same tensor with every index once: what optimizers do to each slice is to be done once."""
    indices, places = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, slices.dense_shape)
