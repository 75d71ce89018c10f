"""How gradients of TensorFlow travel: as tensors that an operation returns, eager and in graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from polyhvd.tensorflow import names, ops, sparse
from polyhvd.tensorflow.compression import VariableState
from polyhvd.tensorflow.errors import as_tensorflow

from polyhvd.collectives.process_sets import ProcessSet
from polyhvd.training.compression import Compressor, CompressorState
from polyhvd.training.keras.weights import path_of
from polyhvd.training.options import Options
from polyhvd.training.reducer import Exchange, GradientReducer, Results, keras_layers

__all__ = ["TensorflowExchange", "TensorflowReducer", "reference"]


def reference(source: Any) -> Any:
    """The same object for a variable and its wrappers: Keras 3 wraps TensorFlow's variables."""
    variable = getattr(source, "value", None)
    if isinstance(variable, (tf.Variable, tf.Tensor)):
        source = variable
    return source.ref() if hasattr(source, "ref") else id(source)


class TensorflowExchange(Exchange[Any]):
    """Tensors and tf.IndexedSlices, each kind of a step as one operation unless there are groups.

    Args:
        is_mapped: whether ranks have different frameworks: each gradient is then sent by itself.
    """

    whole_steps = True
    scales_local_sums = True

    def __init__(self, *, is_mapped: bool = False) -> None:
        self._state = VariableState()
        self._is_mapped = is_mapped
        self._first: list[tf.Tensor] = []  # results of the first operation of a step

    def begin(self) -> None:
        """Forget the results of the step before."""
        self._first = []

    def start(
        self, tensors: Sequence[Any], name: str, priority: int, request: Mapping[str, Any]
    ) -> Results[Any]:
        """Reduce dense tensors into new ones; in a graph, after the first operation, which may fail."""
        dense = [tf.convert_to_tensor(tensor) for tensor in tensors]
        with self._state.after_writes(), tf.control_dependencies(self._first):
            reduced = ops.allreduce(dense, name=name, **request)
        if not self._is_mapped:
            self._first = self._first or list(reduced)
        return lambda: reduced

    def start_sparse(
        self,
        gradients: Mapping[Any, Any],
        prefix: str,
        compression: Compressor,
        priority: int,
        request: Mapping[str, Any],
    ) -> Results[Any]:
        """Gather the slices of all ranks, as :meth:`start` does; the results have each index once."""
        key = next(iter(gradients)) if self._is_mapped else "sparse"
        with tf.control_dependencies(self._first):
            reduced = sparse.allreduce(
                list(gradients.values()),
                name=f"{prefix}.{key}",
                compression=compression,
                mark=0 if self._is_mapped else self.mark_of(list(gradients)),
                **request,
            )
        return lambda: [sparse.merged(slices) for slices in reduced]

    def is_sparse(self, gradient: Any) -> bool:
        """Return whether it is a tf.IndexedSlices."""
        return isinstance(gradient, tf.IndexedSlices)

    def dense(self, gradient: Any) -> tf.Tensor:
        """The gradient as a tensor."""
        return tf.convert_to_tensor(gradient)

    def put(self, key: Any, gradient: Any, reduced: Any) -> Any:
        """The reduced gradient itself."""
        if not self._state.has_writes:
            return reduced
        with self._state.after_writes():
            return tf.nest.map_structure(tf.identity, reduced, expand_composites=True)

    def zeros(self, source: Any) -> tf.Tensor:
        """Like a variable of TensorFlow or Keras."""
        return tf.zeros(source.shape, source.dtype)

    def transposed(self, tensor: tf.Tensor, axes: Sequence[int]) -> tf.Tensor:
        """A new tensor."""
        return tf.transpose(tensor, axes)

    def reshaped(self, tensor: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
        """A new tensor."""
        return tf.reshape(tensor, shape)

    def taken(self, tensor: tf.Tensor, places: Sequence[int]) -> tf.Tensor:
        """A new tensor."""
        return tf.gather(tensor, list(places), axis=-1)

    def size_of(self, process_set: ProcessSet) -> Any:
        """In a graph a tensor."""
        return sparse.size_of(process_set)

    def divided(self, gradient: Any, divisor: Any) -> Any:
        """A tensor or slices, divided."""
        return sparse.divided(gradient, divisor)

    def with_overflow_of(self, gradient: Any, others: Sequence[Any]) -> Any:
        """Return the gradient, or infinity in each element if one of the others is not finite."""
        are_slices = isinstance(gradient, tf.IndexedSlices)
        values = tf.convert_to_tensor(gradient.values if are_slices else gradient)
        local = [other.values if isinstance(other, tf.IndexedSlices) else other for other in others]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(other)) for other in local])
        values = tf.where(finite, values, tf.constant(float("inf"), values.dtype))
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape) if are_slices else values

    def name_of(self, source: Any) -> str:
        """Return the path of a variable; an eager tensor does not have one."""
        return "a tensor" if isinstance(source, tf.Tensor) else path_of(source)

    def marker(self, like: Any, mark: int) -> tf.Tensor:
        """A new tensor."""
        return tf.zeros([0, mark], like.dtype)

    def identity(self, source: Any) -> Any:
        """See :func:`reference`."""
        return reference(source)

    def new_state(self) -> CompressorState:
        """Variables."""
        return self._state


class TensorflowReducer(GradientReducer[Any]):
    """A :class:`GradientReducer` for lists of gradients, with TensorFlow's errors.

    Args:
        prefix: begins the names on the wire.
        options: of the optimizer or tape.
        local_layers: a layer of Keras, or several, whose gradients stay on their rank.
        is_tape: whether it lives for one step.
    """

    def __init__(
        self, prefix: str, options: Options, local_layers: Any = None, *, is_tape: bool = False
    ) -> None:
        remedy = "register_local_var() of the optimizer, or register_local_source() of the tape"
        with as_tensorflow():
            super().__init__(
                TensorflowExchange(is_mapped=options.mapping is not None),
                prefix=prefix,
                options=options,
                local_layers=keras_layers(local_layers, remedy),
                shares_compressor=is_tape,
            )

    def name_of_step(self) -> str:
        """A prefix for a branch of the graph that is being traced, where names start again."""
        if tf.executing_eagerly():
            return self.prefix
        return names.in_graph(self.prefix, self.process_set.process_set_id or 0)

    def __call__(
        self, gradients: Sequence[Any], sources: Sequence[Any] | None = None, prefix: str | None = None
    ) -> list[Any]:
        """The reduced gradients, None where there was none; outside of the process set this rank's own.

        Args:
            gradients: tensors, slices or None.
            sources: the variables they belong to.
            prefix: for this call.
        """
        given = {i: gradient for i, gradient in enumerate(gradients) if gradient is not None}
        with as_tensorflow():
            reduced = self.reduce(given, sources, prefix=prefix)
        return [reduced.get(i) for i in range(len(gradients))]
