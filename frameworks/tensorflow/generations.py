"""Which generation of the world a call belongs to: that of the engine that is current when it begins.

Between a ``shutdown()`` and the next ``init()`` a ``tf.function`` may be running, or a tape may wait to be
asked for its gradients. Their remaining collectives must not reach the new world, where no rank expects them:
each collective has the generation that its call belongs to, and fails as lost in another one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from polyhvd.tensorflow import names
from polyhvd.tensorflow.native import library

from polyhvd.runtime import current

__all__ = ["of_call", "of_operation"]

_CREATED = "_polyhvd_generation"
_READY = "_polyhvd_generation_is_known"
#: Ops that may take long, or have such ops in a branch or a body: where threads are few or busy, the
#: generation would be asked for after them.
_MAY_WAIT = frozenset(
    {
        "Case",
        "EagerPyFunc",
        "If",
        "IteratorGetNext",
        "PyFunc",
        "PyFuncStateless",
        "StatefulPartitionedCall",
        "While",
    }
)
_created = threading.Lock()


class _Constants(threading.local):
    """The generation as an eager tensor, which is made once for each thread."""

    generation = 0
    tensor: Any = None


_constants = _Constants()


def of_call() -> list[tf.Tensor]:
    """The input ``generation`` of collectives that are made here and now."""
    if tf.executing_eagerly():
        return [_constant(current.world().placement.generation)]
    graph = names.graph_of_call()
    with _created:
        tensor = getattr(graph, _CREATED, None)
        if tensor is None:
            # Neither inputs nor control inputs: it runs when the call begins.
            with graph.as_default(), graph.control_dependencies(None), tf.device(None):
                tensor = library.polyhvd_generation(name="polyhvd_generation")
            setattr(graph, _CREATED, tensor)
            setattr(graph, _READY, (tensor.op, 0))
        if graph.building_function:  # what a session has run may not be changed
            inner = tf.compat.v1.get_default_graph()
            while inner is not graph:  # a branch or the body of a loop, which may be run as part of its graph
                _ask_first(inner, tensor)
                inner = inner.outer_graph
            _ask_first(graph, tensor)
    return [tensor]


def _ask_first(graph: Any, generation: Any) -> None:
    """Let the ops of ``graph`` that may take long, and are new here, run after ``generation``."""
    ready, seen = getattr(graph, _READY, (None, 0))
    operations = graph.get_operations()
    waiting = [
        operation
        for operation in operations[seen:]
        if operation.type in _MAY_WAIT and operation._control_flow_context is None
    ]
    if waiting and ready is None:
        with graph.as_default(), graph.control_dependencies(None), tf.device(None):
            ready = tf.identity(graph.capture(generation), name="polyhvd_generation").op
    for operation in waiting:
        operation._add_control_input(ready)
    setattr(graph, _READY, (ready, len(operations)))


def _constant(generation: int) -> Any:
    if _constants.generation != generation:
        with tf.device("CPU:0"):
            _constants.tensor = tf.constant(generation, tf.int64)
        _constants.generation = generation
    return _constants.tensor


def of_operation(operation: Any, tensors: int) -> Sequence[Any]:
    """The input ``generation`` of a collective, which stands after ``tensors`` others; empty: it has none."""
    return list(operation.inputs[tensors:])
