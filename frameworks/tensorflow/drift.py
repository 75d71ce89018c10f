"""Comparison of the weights of an optimizer over its ranks, eager and in graphs."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf
from polyhvd.tensorflow.errors import as_tensorflow
from polyhvd.tensorflow.passes import only_effects
from polyhvd.tensorflow.reducer import TensorflowReducer
from tensorflow.core.framework import attr_value_pb2

from polyhvd.collectives.process_sets import ProcessSet
from polyhvd.runtime import current
from polyhvd.training.drift import DriftCheck, Hyperparameters
from polyhvd.training.keras.weights import DRIFT_REMEDY, hyperparameters_of, path_of

__all__ = ["DriftOp", "drift_of_tapes"]

#: Attribute of a graph: the last comparison in it.
_LAST = "_polyhvd_drift"
#: Attribute of a variable: comparisons of tapes whose first source it is.
_OF_TAPES = "_polyhvd_drift_of_tapes"


_TAPE_REMEDY = (
    "call hvd.broadcast_variables(model.variables, root_rank=0) before the second step; "
    "register_local_source(variable) of the tape excludes variables that each rank keeps for itself"
)


class DriftOp:
    """Compares weights in the second step of each world: programs may broadcast them after the first one.

    In a graph a variable records whether a comparison is pending, and other steps only read it.

    Args:
        reducer: of the gradients of the optimizer or tape.
        call: names it in reports.
        remedy: how to broadcast its weights.
    """

    def __init__(
        self, reducer: TensorflowReducer, call: str = "DistributedOptimizer", remedy: str = DRIFT_REMEDY
    ) -> None:
        self._reducer = reducer
        self._check = DriftCheck(call, reducer.process_set, remedy, step=2, mapping=reducer.options.mapping)
        self._is_pending: Any = None  # a variable, once there is a graph
        _everyone.add(self)

    def before(self, sources: Sequence[Any] | None, optimizer: Any = None) -> AbstractContextManager[Any]:
        """Compare the variables that a step is about to change; reduce its gradients within.

        Args:
            sources: the variables.
            optimizer: whose hyperparameters are compared, too; None: there is none.
        """
        if sources is None or not self._reducer.takes_part():
            return nullcontext()
        if current.world().settings.check_drift == "off":  # the graph needs no variable then
            return nullcontext()
        if tf.executing_eagerly() and self._check.is_settled:
            return nullcontext()
        shared = [
            (i, source)
            for i, (source, stays) in enumerate(zip(sources, self._reducer.are_local(sources), strict=True))
            if not stays
        ]
        positions = [i for i, _ in shared]
        names = [path_of(source) for _, source in shared]

        def given(values: Sequence[Any]) -> list[Any]:
            if self._reducer.options.mapping is not None:
                return self._reducer.mapped_values(names, (source for _, source in shared), values)
            found: list[Any] = [None] * len(sources)
            for i, name, value in zip(positions, names, values, strict=True):
                found[i] = name, value
            return found

        def compare(rate: Any, *values: Any) -> bool:
            def hyperparameters() -> Hyperparameters:
                if optimizer is None:
                    return {}
                local = [i not in positions for i in range(len(sources))]
                return hyperparameters_of(optimizer, sources, local, float(rate))

            self._check.compare(self._reducer.prefix, lambda: given(values), hyperparameters)
            return not self._check.is_settled

        if tf.executing_eagerly():
            with as_tensorflow():
                rate = _rate(optimizer).numpy()
                compare(rate, *(tf.convert_to_tensor(source).numpy() for _, source in shared))
            return nullcontext()
        if not tf.compat.v1.executing_eagerly_outside_functions():
            return nullcontext()

        def compare_in_graph() -> tf.Tensor:
            values = [_rate(optimizer), *(tf.convert_to_tensor(source) for _, source in shared)]
            is_pending = tf.ensure_shape(tf.numpy_function(compare, values, tf.bool), [])
            return only_effects([pending.assign(is_pending, read_value=False)])

        pending, graph = self._variable(), tf.compat.v1.get_default_graph()
        # One after the other, as on the other ranks: with "error" they wait.
        with tf.control_dependencies(getattr(graph, _LAST, [])):
            done = tf.cond(tf.convert_to_tensor(pending), compare_in_graph, lambda: tf.constant(True))
        _keep_whole(done)
        setattr(graph, _LAST, [done])
        return tf.control_dependencies([done])

    def _variable(self) -> Any:
        if self._is_pending is None:
            # In its own thread, which is in no graph: tf.function refuses variables after its first trace.
            with ThreadPoolExecutor(1) as elsewhere:
                self._is_pending = elsewhere.submit(tf.Variable, True, trainable=False).result()
        return self._is_pending

    def restart(self) -> None:
        """Compare again: another world is current."""
        if self._is_pending is not None:
            with tf.init_scope():
                self._is_pending.assign(True)


def _rate(optimizer: Any) -> tf.Tensor:
    """The learning rate; 0 if it cannot be read here."""
    try:
        return tf.cast(tf.convert_to_tensor(optimizer.learning_rate), tf.float64)
    except (AttributeError, TypeError, ValueError):
        return tf.zeros([], tf.float64)


def _variable_of(source: Any) -> Any:
    """The variable of TensorFlow in a variable of Keras 3; else the source."""
    inner = getattr(source, "value", None)
    return inner if isinstance(inner, tf.Variable) else source


class _OfTapes:
    """The comparison of tapes with the same sources and process set.

    Args:
        sources: variables.
        reducer: of the first of these tapes.
    """

    def __init__(self, sources: Sequence[Any], reducer: TensorflowReducer) -> None:
        self._sources = [weakref.ref(source) for source in sources]
        self._process_set = reducer.process_set
        self.drift = DriftOp(reducer, "DistributedGradientTape", _TAPE_REMEDY)

    def is_of(self, sources: Sequence[Any], process_set: ProcessSet) -> bool:
        return (
            self._process_set is process_set
            and len(self._sources) == len(sources)
            and all(map(lambda kept, source: kept() is source, self._sources, sources))
        )


def drift_of_tapes(reducer: TensorflowReducer, sources: Sequence[Any]) -> DriftOp | None:
    """The comparison that all tapes with these sources share, in whatever graphs they are.

    Args:
        reducer: of a tape.
        sources: of its gradients.

    Returns:
        None if a source is not a variable: such a tensor may be other data on each rank.
    """
    variables = list(map(_variable_of, sources))
    if not variables or not all(isinstance(variable, tf.Variable) for variable in variables):
        return None
    known: list[_OfTapes] = variables[0].__dict__.setdefault(_OF_TAPES, [])
    for each in known:
        if each.is_of(variables, reducer.process_set):
            return each.drift
    known.append(_OfTapes(variables, reducer))
    return known[-1].drift


def _keep_whole(result: tf.Tensor) -> None:
    """Leave the branches of a tf.cond functions: else each variable that one reads costs time in a step."""
    operation = result.op if "If" in result.op.type else result.op.inputs[0].op
    operation._set_attr("_lower_using_switch_merge", attr_value_pb2.AttrValue(b=False))


_everyone: weakref.WeakSet[DriftOp] = weakref.WeakSet()


def _on_change(_: object) -> None:
    for operation in list(_everyone):
        operation.restart()


current.on_change(_on_change)
