"""Batch normalization over the batches of all ranks, for whichever Keras."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from polyhvd.tensorflow.errors import invalid
from polyhvd.tensorflow.moments import moments

from polyhvd.training.keras.normalization import SynchronizedNormalization

__all__ = ["sync_batch_normalization"]


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
