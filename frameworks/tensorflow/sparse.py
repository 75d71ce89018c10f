"""Reduction of tf.IndexedSlices, the gradients of embeddings, in time and bytes that follow their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from polyhvd.tensorflow import ops
from polyhvd.tensorflow.errors import invalid

from polyhvd.adapter import ReduceOp
from polyhvd.compression import Compressor
from polyhvd.process_sets import ProcessSet

__all__ = ["allreduce", "divided", "merged"]


def _scaled(values: tf.Tensor, factor: float) -> tf.Tensor:
    """Integers are multiplied as doubles and truncated, as in reductions of dense tensors."""
    if factor == 1.0:
        return values
    if values.dtype.is_floating:
        return values * tf.cast(factor, values.dtype)
    return tf.cast(tf.cast(values, tf.float64) * factor, values.dtype)


def allreduce(
    slices: Sequence[tf.IndexedSlices],
    *,
    name: str | None,
    op: int,
    compression: Compressor,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> list[tf.IndexedSlices]:
    """Gather the slices of all ranks, as one operation: an index then stands for the sum of its slices.

    Args:
        slices: of any number of rows, which may differ between ranks.
        name: matches the calls of the ranks.
        op: Average or Sum.
        compression: of the values on the wire.
        prescale_factor, postscale_factor: multiply the values.
        process_set: the ranks that take part.

    Raises:
        InvalidArgumentError: another ``op``.
    """
    if op not in (ReduceOp.Average, ReduceOp.Sum):
        raise invalid(
            f"op={ReduceOp(op).name}: tf.IndexedSlices are reduced with Average or Sum; for others convert "
            "them with tf.convert_to_tensor(), or pass sparse_as_dense=True to the optimizer or tape"
        )
    pairs = [compression.compress(each.values) for each in slices]
    sent = [*(values for values, _ in pairs), *(each.indices for each in slices)]
    gathered = ops.allgather(sent, name=name, process_set=process_set)
    factor = prescale_factor * postscale_factor
    if op == ReduceOp.Average:
        factor /= process_set.size()
    results = []
    for i, each in enumerate(slices):
        values: Any = compression.decompress(gathered[i], pairs[i][1])
        results.append(tf.IndexedSlices(_scaled(values, factor), gathered[len(slices) + i], each.dense_shape))
    return results


def divided(gradient: Any, divisor: float) -> Any:
    """A tensor or slices of floating-point numbers, divided."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / divisor, gradient.indices, gradient.dense_shape)
    return tf.convert_to_tensor(gradient) / divisor


def merged(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """The same tensor with every index once: what optimizers do to each slice is to be done once."""
    indices, places = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, places, tf.size(indices))
    return tf.IndexedSlices(values, indices, slices.dense_shape)
