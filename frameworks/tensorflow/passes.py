"""Gradients of several passes, added up in variables of this rank until they are due.

Every call counts as a pass, so ranks that make equally many calls reduce in the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf
from polyhvd.tensorflow import sparse
from polyhvd.tensorflow.errors import invalid
from polyhvd.tensorflow.reducer import reference

from polyhvd.training import passes
from polyhvd.training.options import Options

__all__ = ["Passes", "only_effects"]

T = TypeVar("T")


def _variable(initial: tf.Tensor, shape: Any) -> Any:
    """A variable of this rank only, outside of the function that is being traced."""
    if tf.compat.v1.executing_eagerly_outside_functions():
        return tf.Variable(initial, trainable=False, shape=shape)
    return tf.compat.v1.Variable(
        initial,
        trainable=False,
        shape=shape,
        use_resource=True,
        validate_shape=False,
        collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
    )


class _Dense:
    """The sum of a variable's dense gradients."""

    def __init__(self, gradient: tf.Tensor, shape: tf.TensorShape) -> None:
        self._sum = _variable(tf.zeros(shape, gradient.dtype), shape)

    def with_last(self, gradient: Any) -> tf.Tensor:
        """The sum, and the gradient of the last pass if it has one."""
        return tf.convert_to_tensor(self._sum) if gradient is None else self._sum + gradient

    def add(self, gradient: Any) -> list[Any]:
        """Operations that keep the gradient of another pass."""
        return [self._sum.assign_add(gradient, read_value=False)]

    def clear(self) -> list[Any]:
        """Operations that reset the passes."""
        return [self._sum.assign(tf.zeros_like(self._sum), read_value=False)]


class _Sparse:
    """The sum of a variable's slices, with each index once: it does not outgrow the variable."""

    def __init__(self, gradient: tf.IndexedSlices, shape: tf.TensorShape) -> None:
        row = shape[1:]
        self._shape = shape
        self._values = _variable(tf.zeros([0, *row], gradient.values.dtype), [None, *row])
        self._indices = _variable(tf.zeros([0], gradient.indices.dtype), [None])

    def with_last(self, gradient: Any) -> tf.IndexedSlices:
        if gradient is None:
            gradient = tf.IndexedSlices(self._values[:0], self._indices[:0], tf.constant(self._shape))
        values = tf.concat([self._values, gradient.values], axis=0)
        indices = tf.concat([self._indices, gradient.indices], axis=0)
        return sparse.merged(tf.IndexedSlices(values, indices, gradient.dense_shape))

    def add(self, gradient: Any) -> list[Any]:
        total = self.with_last(gradient)
        with tf.control_dependencies([total.values, total.indices]):
            return self._assign(total.values, total.indices)

    def clear(self) -> list[Any]:
        return self._assign(self._values[:0], self._indices[:0])

    def _assign(self, values: tf.Tensor, indices: tf.Tensor) -> list[Any]:
        return [
            self._values.assign(values, read_value=False),
            self._indices.assign(indices, read_value=False),
        ]


class Passes:
    """Adds up gradients, eager and in graphs.

    The sums are not variables of the optimizer: they are neither saved nor broadcast.

    Args:
        options: of the optimizer.
    """

    def __init__(self, options: Options) -> None:
        self.number = options.backward_passes_per_step
        self._average = options.average_aggregated_gradients
        self._sparse_as_dense = options.sparse_as_dense
        self._counts: dict[Any, Any] = {}
        self._sums: dict[Any, _Dense | _Sparse] = {}
        passes.register(self)

    def passes_held(self) -> int:
        """See :class:`polyhvd.training.passes.CountedPasses`; only where operations run at once."""
        count = self._counts.get(None)
        return 0 if self.number == 1 or count is None or int(count) % self.number == 0 else self.number

    def drop_passes(self) -> None:
        """Forget the passes since the last step; only where operations run at once."""
        if None not in self._counts:
            return
        self._counts[None].assign(0)  # also where the last pass has failed after it was counted
        for (graph, _), total in self._sums.items():
            if graph is None:
                total.clear()

    def run(
        self,
        gradients: Sequence[Any],
        sources: Sequence[Any] | None,
        on_last: Callable[[list[Any]], T],
        otherwise: Callable[[list[Any]], T],
    ) -> tuple[T, Any]:
        """Take the gradients of a pass.

        Args:
            gradients: tensors, slices or None; a total is None where no pass had a gradient.
            sources: the variables they belong to; None: those of all passes, in the same order.
            on_last: called with the totals in the last pass of a step, in a graph within its branch.
            otherwise: called with the pass's own gradients in others; returns the same structure.

        Returns:
            What was returned, and whether it was the last pass: a bool or a tensor of it.
        """
        parts = [self._prepared(gradient) for gradient in gradients]
        known = {i: self._sum_of(i, part, sources) for i, part in enumerate(parts)}
        sums = {i: total for i, total in known.items() if total is not None}
        with tf.control_dependencies([] if tf.executing_eagerly() else _tensors(parts)):
            last = self._count_pass()  # a pass whose gradients fail does not count

        def finish() -> T:
            totals: list[Any] = [None] * len(parts)
            for i, total in sums.items():
                totals[i] = total.with_last(parts[i])
                if self._average:
                    totals[i] = sparse.divided(totals[i], self.number)
            with tf.control_dependencies(_tensors(totals)):
                cleared = [operation for total in sums.values() for operation in total.clear()]
            with tf.control_dependencies(_operations(cleared)):
                return on_last(totals)

        def keep() -> T:
            some = [(total, parts[i]) for i, total in sums.items() if parts[i] is not None]
            added = [operation for total, part in some for operation in total.add(part)]
            with tf.control_dependencies(_operations(added)):
                return otherwise(parts)

        if tf.executing_eagerly():
            is_last = bool(last)
            return (finish() if is_last else keep()), is_last
        return tf.cond(last, finish, keep), last

    def _prepared(self, gradient: Any) -> Any:
        if gradient is None:
            return None
        if isinstance(gradient, tf.IndexedSlices) and not self._sparse_as_dense:
            parts = tf.convert_to_tensor(gradient.values), tf.convert_to_tensor(gradient.indices)
            return tf.IndexedSlices(*parts, gradient.dense_shape)
        return tf.convert_to_tensor(gradient)

    def _sum_of(self, position: int, gradient: Any, sources: Sequence[Any] | None) -> Any:
        """The sum that a gradient belongs to; None if there never was one."""
        source = None if sources is None else sources[position]
        key = self._graph(), position if source is None else reference(source)
        known = self._sums.get(key)
        if gradient is None:
            return known
        kind = _Sparse if isinstance(gradient, tf.IndexedSlices) else _Dense
        if known is None:
            shape = tf.TensorShape((gradient if source is None else source).shape)
            with tf.init_scope():
                known = self._sums[key] = kind(gradient, shape)
        elif not isinstance(known, kind):
            raise invalid(
                "backward_passes_per_step: a variable's gradient is a tensor in one pass, and a "
                "tf.IndexedSlices in another; pass sparse_as_dense=True"
            )
        return known

    def _count_pass(self) -> tf.Tensor:
        """Return whether this pass is the last one of its step."""
        graph = self._graph()
        if graph not in self._counts:
            with tf.init_scope():
                self._counts[graph] = _variable(tf.zeros([], tf.int64), [])
        return tf.equal(tf.convert_to_tensor(self._counts[graph].assign_add(1)) % self.number, 0)

    @staticmethod
    def _graph() -> Any:
        """The graph of tf.compat.v1 that variables belong to, if there is one."""
        if tf.compat.v1.executing_eagerly_outside_functions():
            return None
        return tf.compat.v1.get_default_graph()


def only_effects(result: Any) -> tf.Tensor:
    """A tensor that is ready when the operations of ``result`` are done: branches must return a tensor."""
    with tf.control_dependencies(_operations(tf.nest.flatten(result))):
        return tf.constant(True)


def _operations(results: Sequence[Any]) -> list[Any]:
    """In a graph what can be waited for; eager operations are done."""
    if tf.executing_eagerly():
        return []
    return [result for result in results if isinstance(result, (tf.Operation, tf.Tensor))]


def _tensors(gradients: Sequence[Any]) -> list[tf.Tensor]:
    flat = [g for g in gradients if g is not None]
    return [t for g in flat for t in ([g.values, g.indices] if isinstance(g, tf.IndexedSlices) else [g])]
