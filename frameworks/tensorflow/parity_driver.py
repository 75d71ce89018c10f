"""TensorFlow as the conformance tests use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polyhvd.collectives.adapter import Capability
from polyhvd.parity.driver import BFLOAT16, Driver

__all__ = ["DRIVERS"]

Array = np.ndarray[Any, Any]
_TYPES_OF_GRAPHS = ("uint8", "int32", "bfloat16", "float32", "float64", "bool")


class _TensorFlow(Driver):
    mismatch_error = "tensorflow.errors.FailedPreconditionError"

    def from_numpy(self, array: Array) -> Any:
        import tensorflow as tf

        if array.dtype == BFLOAT16:  # older releases know another bfloat16 than ml_dtypes'
            return tf.cast(tf.constant(array.astype(np.float32)), tf.bfloat16)
        return tf.constant(array)

    def to_numpy(self, tensor: Any) -> Array:
        import tensorflow as tf

        if tensor.dtype == tf.bfloat16:
            return np.asarray(tf.cast(tensor, tf.float32).numpy()).astype(BFLOAT16)
        values: Array = np.asarray(tensor.numpy())
        return values

    def gradients(
        self, function: Callable[..., Sequence[Any]], arrays: Sequence[Array], weights: Sequence[Array]
    ) -> list[Array]:
        import tensorflow as tf

        factors = [self.from_numpy(w) for w in weights]

        def of_sum(*tensors: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                results = function(*tensors)
                sums = [tf.reduce_sum(r * w) for r, w in zip(results, factors, strict=True)]
                loss = tf.add_n([tf.cast(each, tf.float64) for each in sums])
            return tape.gradient(loss, tensors)

        found = self.call(of_sum, *map(self.from_numpy, arrays))
        return [self.to_numpy(gradient) for gradient in found]

    def parameter(self, array: Array) -> Any:
        import tensorflow as tf

        return tf.Variable(array)

    def broadcast_parameters(self, parameters: dict[str, Any], root: int) -> None:
        # Horovod's signature: a list, matched by position.
        self.hvd.broadcast_variables([parameters[key] for key in sorted(parameters)], root_rank=root)

    def unsupported(self) -> Sequence[Any]:
        import tensorflow as tf

        return [tf.ones(4, tf.complex64), tf.constant(["text"])]

    def argument_errors(self) -> tuple[type[BaseException], ...]:
        import tensorflow as tf

        return (ValueError, tf.errors.InvalidArgumentError)


class _TensorFlowFunction(_TensorFlow):
    form = "-function"

    @property
    def dtypes(self) -> list[np.dtype[Any]]:
        # Graphs call the operations that eager tensors have been tested with.
        return [dtype for dtype in super().dtypes if self.is_thorough or dtype.name in _TYPES_OF_GRAPHS]

    @property
    def capabilities(self) -> frozenset[Capability]:
        # In a graph every collective is asynchronous, and none has a handle.
        return super().capabilities - {Capability.ASYNC}

    def call(self, function: Callable[..., Any], *tensors: Any) -> Any:
        import tensorflow as tf

        return tf.function(function, autograph=False)(*tensors)


DRIVERS = (
    _TensorFlow,
    _TensorFlowFunction,
)
