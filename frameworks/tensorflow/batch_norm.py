"""Batch normalization over the batches of all ranks: its moments, and the layer for whichever Keras."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from polyhvd.tensorflow import ops
from polyhvd.tensorflow.errors import invalid

from polyhvd.collectives.adapter import ReduceOp
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.training.batch_norm import BatchArrays, BatchNormProtocol
from polyhvd.training.keras.batch_norm import SynchronizedNormalization

__all__ = ["moments", "sync_batch_normalization"]

_protocol = BatchNormProtocol(
    BatchArrays(lambda x: tf.reduce_sum(x, axis=0), lambda x: tf.maximum(x, tf.constant(1.0, x.dtype)))
)


def moments(
    x: tf.Tensor,
    axes: Sequence[int],
    mask: tf.Tensor | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Mean and variance over some axes of all ranks' tensors together.

    Each rank takes the count, the mean and the sum of squared deviations of its own elements in the type of
    ``x``; these are gathered, as one operation, and combined as in :mod:`polyhvd.training.batch_norm`. The
    gradient is one operation more, a sum; it has no gradient itself.

    Args:
        x: float32 or float64; other axes than ``axes`` are equal on all ranks. It may have no elements.
        axes: which to reduce.
        mask: bool, of the shape of ``x``: what counts; None: everything.
        process_set: the ranks that take part.

    Returns:
        Mean and variance (divided by the count) of the shape of the remaining axes. Of no elements at all
        both are zero.
    """

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def of(values: tf.Tensor) -> Any:
        own = tf.stack([tf.cast(part, tf.float64) for part in _own_statistics(values, mask, axes)])
        (gathered,) = ops.allgather([own[None]], name=None, process_set=process_set)
        count, mean, _, variance = _protocol.joined(gathered)

        def gradient(of_mean: tf.Tensor, of_variance: tf.Tensor) -> tf.Tensor:
            """Every rank's loss depends on both, and every element takes part in both."""
            sent = tf.cast(tf.stack([of_mean, of_variance]), tf.float64)
            (summed,) = ops.allreduce([sent], name=None, op=ReduceOp.Sum, process_set=process_set)
            offset, slope = (
                _expanded(tf.cast(part, values.dtype), axes)
                for part in _protocol.by_values(summed[0], summed[1], count)
            )
            deviation = values - _expanded(tf.cast(mean, values.dtype), axes)
            return tf.raw_ops.PreventGradient(
                input=_counted(offset + slope * deviation, mask),
                message="the moments of all ranks' tensors have first derivatives only",
            )

        return (tf.cast(mean, values.dtype), tf.cast(variance, values.dtype)), gradient

    mean, variance = of(x)
    return mean, variance


def _own_statistics(
    values: tf.Tensor, mask: tf.Tensor | None, axes: Sequence[int]
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Count, mean and sum of squared deviations of this rank's elements."""
    total = tf.reduce_sum(_counted(values, mask), axis=axes)
    if mask is None:
        elements = tf.reduce_prod(tf.gather(tf.shape(values, out_type=tf.int64), axes))
        count = tf.fill(tf.shape(total), tf.cast(elements, tf.float64))
    else:
        count = tf.reduce_sum(tf.cast(mask, tf.float64), axis=axes)
    shift = tf.math.divide_no_nan(total, tf.cast(count, values.dtype))
    deviation = _counted(values - _expanded(shift, axes), mask)
    sums, squares = tf.reduce_sum(deviation, axis=axes), tf.reduce_sum(tf.square(deviation), axis=axes)
    wide = (tf.cast(part, tf.float64) for part in (shift, sums, squares))
    return count, *_protocol.corrected(count, *wide)


def _counted(values: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    """Zero where the mask is False, whatever stands there."""
    return values if mask is None else tf.where(mask, values, tf.zeros([], values.dtype))


def _expanded(reduced: tf.Tensor, axes: Sequence[int]) -> tf.Tensor:
    for axis in sorted(axes):
        reduced = tf.expand_dims(reduced, axis)
    return reduced


class _Synchronized(SynchronizedNormalization):
    _polyhvd_invalid = staticmethod(invalid)

    def _polyhvd_moments(self, inputs: Any, axes: Sequence[int], mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
        inputs = tf.convert_to_tensor(inputs)
        if mask is not None:
            mask = tf.broadcast_to(tf.cast(mask, tf.bool)[..., None], tf.shape(inputs))
        # Keras has made halves wider, but in its oldest versions not bfloat16.
        wide = tf.cast(inputs, tf.float32) if inputs.dtype.size < tf.float32.size else inputs
        mean, variance = moments(wide, axes, mask, self._polyhvd_members())
        return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)


class _Keras3(_Synchronized):
    _reduction_axes: Sequence[int]

    def _moments(self, inputs: Any, mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
        return self._polyhvd_moments(inputs, self._reduction_axes, mask)


class _Keras2(_Synchronized):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fused = False  # the fused kernel takes statistics by itself

    def _moments(
        self, inputs: Any, reduction_axes: Sequence[int], keep_dims: bool, mask: Any = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        mean, variance = self._polyhvd_moments(inputs, reduction_axes, mask)
        for axis in sorted(reduction_axes) if keep_dims else ():
            mean, variance = tf.expand_dims(mean, axis), tf.expand_dims(variance, axis)
        return mean, variance


def sync_batch_normalization(keras: Any) -> type:
    """``SyncBatchNormalization`` of a Keras module, ``keras`` or ``tf.keras``: one class for each Keras."""
    return _layer(keras.layers.BatchNormalization, keras.utils.register_keras_serializable)


@functools.cache
def _layer(base: type, register: Callable[..., Any]) -> type:
    parameters = inspect.signature(base._moments).parameters  # type: ignore[attr-defined]
    mixin = _Keras2 if "reduction_axes" in parameters else _Keras3
    names = {"__doc__": SynchronizedNormalization.__doc__, "__module__": __name__}
    layer: type = register(package="polyhvd")(type("SyncBatchNormalization", (mixin, base), names))
    return layer
