"""Batch normalization over the batches of all ranks, for whichever Keras."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf
from polyhvd.tensorflow.errors import invalid
from polyhvd.tensorflow.moments import moments

from polyhvd import context
from polyhvd.process_sets import ProcessSet, global_process_set

__all__ = ["sync_batch_normalization"]


class _Synchronized:
    """``BatchNormalization`` whose statistics in training are those of all ranks' batches together.

    It is what ``BatchNormalization`` would be in one process on the joined batch: outputs, moving statistics
    and, once they are averaged, gradients. Ranks may have batches of different sizes; one may have none.
    Every rank has to call it equally often in training. Inference is local, and needs no ``init()``.
    Statistics are taken in float32 or more, of what a mask leaves. A step costs one operation forward and one
    backward, of a few numbers per channel.

    Args:
        axis, momentum, epsilon, center, scale and others: as of ``BatchNormalization``.
        fused: accepted for Horovod's sake; False.
        process_set: the ranks that share statistics, a ProcessSet or a list of their numbers.

    Raises:
        InvalidArgumentError: ``renorm``, ``virtual_batch_size``, ``fused`` or ``synchronized``, which are
            other ways to take statistics.

    Example::

        model = keras.Sequential([keras.layers.Conv2D(8, 3), hvd.SyncBatchNormalization()])
    """

    def __init__(
        self,
        *args: Any,
        fused: bool = False,
        process_set: ProcessSet | Iterable[int] = global_process_set,
        **kwargs: Any,
    ) -> None:
        options = {"fused": fused, **kwargs}
        for option in ("fused", "renorm", "synchronized", "virtual_batch_size"):
            if options.get(option):
                raise invalid(f"SyncBatchNormalization({option}={options[option]!r}): leave it out")
        super().__init__(*args, **kwargs)
        self._polyhvd_process_set = process_set

    def _polyhvd_moments(self, inputs: Any, axes: Sequence[int], mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
        inputs = tf.convert_to_tensor(inputs)
        if mask is not None:
            mask = tf.broadcast_to(tf.cast(mask, tf.bool)[..., None], tf.shape(inputs))
        # Keras has made halves wider, but in its oldest versions not bfloat16.
        wide = tf.cast(inputs, tf.float32) if inputs.dtype.size < tf.float32.size else inputs
        mean, variance = moments(wide, axes, mask, self._polyhvd_members())
        return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)

    def _polyhvd_members(self) -> ProcessSet:
        """The set itself; of a layer that was loaded, the one that these ranks are registered as now."""
        given = self._polyhvd_process_set
        if isinstance(given, ProcessSet):
            return given
        context.engine()
        found = ProcessSet(given)
        numbers = [number for number, ranks in context.registered().items() if list(ranks) == found.ranks]
        if not numbers:
            raise invalid(
                f"SyncBatchNormalization(process_set={found.ranks}): there is no such process set; register "
                "it by init(process_sets=[...]) or add_process_set()"
            )
        found.process_set_id = numbers[0]
        return found

    def get_config(self) -> dict[str, Any]:
        """Of the base class, and the ranks of ``process_set`` unless it is all of them."""
        config: dict[str, Any] = super().get_config()  # type: ignore[misc]
        given = self._polyhvd_process_set
        ranks = given.ranks if isinstance(given, ProcessSet) else given
        return config if ranks is None else {**config, "process_set": sorted(ranks)}


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
    names = {"__doc__": _Synchronized.__doc__, "__module__": __name__}
    layer: type = register(package="polyhvd")(type("SyncBatchNormalization", (mixin, base), names))
    return layer
